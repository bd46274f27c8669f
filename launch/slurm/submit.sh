#!/usr/bin/env bash
# Submits a script of this folder with the site's options (site.sh):
#
#   launch/slurm/submit.sh --array=0-5 --gpus-per-node=8 launch/slurm/sweep.sbatch --experiment=NAME ...
#
# Options of sbatch come first, then the script, then the flags of the run or sweep.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."
. launch/slurm/site.sh
mkdir -p runs/logs  # where the scripts' --output lies; Slurm makes no folder

# Sets `gpus` (of a node, or of a job: `whole`) and `tasks` (of a node) to what the options ask for,
# and `cpus` and `memory` to whether they name these themselves.
gpus='' whole='' tasks=1 cpus='' memory=''
read_options() {
  while (($#)); do
    # `--name value` as `--name=value`, where it is no option and no script that stands behind.
    if [[ $1 =~ ^(--[a-z-]+|-[A-Za-z])$ && $# -gt 1 && $2 != -* && $2 != *.sbatch ]]; then
      set -- "$1=$2" "${@:3}"
    fi
    case $1 in
      --gpus-per-node=* | --gres=*gpu*) gpus=$(count "${1#*=}") ;;
      --gpus=* | --gpus-per-task=* | -G*) whole=1 ;;
      --ntasks-per-node=* | --tasks-per-node=*) tasks=${1#*=} ;;
      --cpus-per-* | -c* | --exclusive*) cpus=1 ;;&
      --mem=* | --mem-per-* | --exclusive*) memory=1 ;;
      -*) ;;
      *) return 0 ;;
    esac
    shift
  done
}

# The number in `8`, `a100:8` and `gpu:a100:8(S:0-1),other:2`; one where none is given.
count() {
  local part=$1
  [[ $part != *gpu* ]] || part=gpu${part#*gpu}
  part=${part%%[,(]*} part=${part##*:}
  [[ $part =~ ^[0-9]+$ ]] && echo "$part" || echo 1
}

# shellcheck disable=SC2086
read_options $XMOD_SBATCH
read_options "$@"
asked=()
if [[ -n $gpus && $tasks =~ ^[1-9][0-9]*$ ]]; then
  [[ -n $cpus || -z $XMOD_CPUS_PER_GPU ]] ||
    asked+=("--cpus-per-task=$(((gpus * XMOD_CPUS_PER_GPU + tasks - 1) / tasks))")
  [[ -n $memory || -z $XMOD_GB_PER_GPU ]] || asked+=("--mem=$((gpus * XMOD_GB_PER_GPU))G")
elif [[ -n $whole ]]; then
  [[ -n $cpus || -z $XMOD_CPUS_PER_GPU ]] || asked+=("--cpus-per-gpu=$XMOD_CPUS_PER_GPU")
  [[ -n $memory || -z $XMOD_GB_PER_GPU ]] || asked+=("--mem-per-gpu=${XMOD_GB_PER_GPU}G")
fi
# Unquoted: several options in one setting.
# shellcheck disable=SC2086
exec sbatch $XMOD_SBATCH --signal="B:USR1@$XMOD_NOTICE" "${asked[@]}" "$@"
