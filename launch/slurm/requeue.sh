# Runs a command for a batch script, so that a signal reaches the run and its status the scheduler.
# Sourced; defines `run_or_requeue`.

# run_or_requeue COMMAND [ARGUMENT ...]
#
# Slurm signals the batch shell (--signal=B:...) or the steps, depending on how it was asked and on
# who preempts; either way the command hears of it, as SIGUSR1: srun forwards that one to its tasks,
# but takes SIGTERM for an order to kill them. Status 75 means saved and unfinished: the job is
# queued again under the same number, and goes on where it stopped.
run_or_requeue() {
  local asked=0 status=0 child='' job
  trap 'asked=1; [[ -z $child ]] || kill -USR1 "$child" 2>/dev/null || true' TERM USR1
  "$@" &
  child=$!
  # A signal before the line above found nobody to tell.
  ((!asked)) || kill -USR1 "$child" 2>/dev/null || true
  # A trapped signal ends `wait` before the child has ended.
  wait "$child" || status=$?
  while kill -0 "$child" 2>/dev/null; do
    status=0
    wait "$child" || status=$?
  done
  trap - TERM USR1
  # A run that had not begun to listen dies of the signal: it lost nothing.
  if ((status == 75 || (asked && (status == 138 || status == 143)))); then
    job=$SLURM_JOB_ID
    [[ -z ${SLURM_ARRAY_JOB_ID:-} ]] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
    scontrol requeue "$job"
    exit 0
  fi
  return "$status"
}
