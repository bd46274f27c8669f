# Runs a command that may be started again: hands signals on to it, and judges how it ended. Sourced.
#
# attempt NAME COMMAND [ARGUMENT ...]
#
# NAME is that of the job, the same at every start of it. Returns
#   0   done
#   75  start it again: it saved, lost a process, or waits for a run that another worker holds. So it
#       is when a process was killed (137: out of memory, as a rule), and when one that had not begun
#       to listen died of the signal: it lost nothing.
#   any other status: a fault, which another start would meet again.
# A start that leaves its runs where the one before left them makes no progress: then 75 becomes 1,
# with a line. After being asked to leave, which is nobody's fault, it takes five of them in a row.
# Where that cannot be noted, only a start that was asked to leave is made again.
#
# XMOD_ATTEMPTS: folder of what is known of a job's starts (runs/logs).
attempt() {
  local name=$1 asked=0 status=0 child='' folder=${XMOD_ATTEMPTS:-runs/logs} limit=1
  shift
  if ! { mkdir -p -- "$folder" && [[ -w $folder ]]; } 2>/dev/null; then
    echo "$folder cannot be written to: set XMOD_ATTEMPTS to a folder that outlives a start" >&2
    return 2
  fi
  # The commands write the folders of the runs that they train into this file.
  export XMOD_ATTEMPT=$folder/.attempt_$name
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
  # Of a signal but an interrupt (130): the processes that are left say 75, and srun the highest.
  if ((status > 128 && status < 160 && status != 130)); then status=75; fi
  if ((status != 75)); then
    rm -f -- "$XMOD_ATTEMPT" "$XMOD_ATTEMPT.left"
    return "$status"
  fi
  ((!asked)) || limit=5
  local count=0
  if ! count=$(_fruitless); then
    ((!asked)) || return 75
    echo "stopped: job $name was to be started again, but how far it is cannot be noted in" \
      "$folder, so nothing would end that: make room there, or set XMOD_ATTEMPTS to another folder" >&2
    return 1
  fi
  if ((count >= limit)); then
    echo "stopped: job $name was to be started again, but its last starts came no further" \
      "(no new checkpoint, no run done): see the lines above, then submit it again" >&2
    rm -f -- "$XMOD_ATTEMPT" "$XMOD_ATTEMPT.left"
    return 1
  fi
  return 75
}

# Prints how many starts in a row, up to this one, left the runs as they were; notes how they are.
# Fails where it cannot.
_fruitless() {
  local now before='' count=0 known=$XMOD_ATTEMPT.left
  now=$(_position)
  if [[ -f $known ]]; then
    { read -r count && before=$(cat); } <"$known" || true
    if [[ $now == "$before" ]]; then count=$((count + 1)); else count=0; fi
  fi
  printf '%s\n%s\n' "$count" "$now" >"$known" || return 1
  printf '%s\n' "$count"
}

# How far the runs of the job are: their checkpoints and marks.
_position() {
  local run
  [[ -f $XMOD_ATTEMPT ]] || return 0
  sort -u -- "$XMOD_ATTEMPT" | while IFS= read -r run; do
    find "$run/checkpoints" "$run/DONE" "$run/FAILED" -maxdepth 1 \
      \( -path '*/checkpoints/[0-9]*' -name '[0-9]*' ! -name '*[!0-9]*' -o -name DONE -o -name FAILED \) \
      2>/dev/null | sort || true
  done
}
