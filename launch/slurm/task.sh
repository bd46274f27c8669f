#!/usr/bin/env bash
# One task of a step: the command with the settings of this folder, its status such that srun, which
# gives the highest of all tasks, gives the one that counts:
#
#   0 < 75, start it again < 101 and 102, the faults 1 and 2 that another start would meet again
#
# A process that was killed counts as 75: the others, which lost it, say that too.
set -uo pipefail
. launch/slurm/settings.sh
child='' asked=0 status=0
trap 'asked=1; [[ -z $child ]] || kill -USR1 "$child" 2>/dev/null || true' TERM USR1
"$@" &
child=$!
((!asked)) || kill -USR1 "$child" 2>/dev/null || true
wait "$child" || status=$?
while kill -0 "$child" 2>/dev/null; do
  status=0
  wait "$child" || status=$?
done
case $status in
  0 | 75) ;;
  1 | 2) status=$((100 + status)) ;;
  130) ;;
  # Above the signals: what containers end with whose image is missing.
  *)
    if ((status > 128 && status < 160)); then status=75
    elif ((status < 75 || status >= 160)); then status=101
    fi
    ;;
esac
exit "$status"
