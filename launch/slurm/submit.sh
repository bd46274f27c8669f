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
# Unquoted: several options in one setting.
# shellcheck disable=SC2086
exec sbatch $XMOD_SBATCH --signal="B:USR1@$XMOD_NOTICE" "$@"
