# Runs a command for a batch script, so that a signal reaches the run and its status the scheduler.
# Sourced; defines `run_or_requeue`.
. launch/attempt.sh

# run_or_requeue COMMAND [ARGUMENT ...]
#
# Slurm signals the batch shell (--signal=B:...) or the steps, depending on how it was asked and on
# who preempts; either way the command hears of it, as SIGUSR1: srun forwards that one to its tasks,
# but takes SIGTERM for an order to kill them. Status 75 means unfinished (launch/attempt.sh says
# when): the job is queued again under the same number, and goes on where it stopped.
run_or_requeue() {
  local status=0 job
  job=$SLURM_JOB_ID
  [[ -z ${SLURM_ARRAY_JOB_ID:-} ]] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
  # What an older job of this number left behind, should Slurm count anew.
  ((${SLURM_RESTART_COUNT:-0})) || rm -f -- "${XMOD_ATTEMPTS:-runs/logs}/.attempt_$job"{,.left}
  attempt "$job" "$@" || status=$?
  # As launch/slurm/task.sh writes the statuses of tasks whose fault stays.
  if ((status == 101 || status == 102)); then status=$((status - 100)); fi
  if ((status == 75)); then
    scontrol requeue "$job"
    exit 0
  fi
  return "$status"
}

# tasks COMMAND [ARGUMENT ...]
#
# One process for each task of the job, with the settings of launch/slurm/settings.sh.
tasks() {
  # Since Slurm 22.05 srun does not take sbatch's number of CPUs by itself.
  [[ -z ${SLURM_CPUS_PER_TASK:-} ]] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
  # It forwards SIGUSR1 to every task, and gives the highest of their statuses.
  run_or_requeue srun --kill-on-bad-exit=0 launch/slurm/task.sh "$@"
}
