#!/usr/bin/env bash
# Runs the command of a pod whose Job starts pods again: launch/attempt.sh says with which statuses.
#
# XMOD_JOB: the Job's identity; JOB_COMPLETION_INDEX: the pod's number in it, as Kubernetes sets it.
set -uo pipefail
. launch/attempt.sh
attempt "${XMOD_JOB:-job}_${JOB_COMPLETION_INDEX:-0}" "$@"
