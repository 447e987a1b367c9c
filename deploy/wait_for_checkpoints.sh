#!/usr/bin/env bash
# Run Prefect, and end after the trainings that it leaves:  wait_for_checkpoints.sh prefect worker start --pool gpu
#
# On SIGTERM Prefect ends its flows and exits, while their trainings write checkpoints. But a container ends with its
# first process, and a systemd service with its main one. This script does not signal trainings: a second SIGTERM kills.
# The platform's time limit ends the wait.
set -euo pipefail
# Flows and trainings inherit this variable, by which they are known among all processes of a machine.
KILN_STARTED_UNDER=$$.$(date +%s%N)
export KILN_STARTED_UNDER

set -m # otherwise the shell would have Prefect ignore SIGINT, which its worker sends to itself on SIGTERM
"$@" </dev/null &
set +m
prefect=$!
trap 'kill -TERM "$prefect" || true' TERM INT
while kill -0 "$prefect" 2>/dev/null; do wait "$prefect" || true; done # a signal ends `wait` alone
code=0
wait "$prefect" || code=$?

trains() {
  local job
  for job in $(grep -lsz '^runtimes$' /proc/[0-9]*/cmdline); do # python -P -m runtimes JOB.json
    if grep -qsz "^KILN_STARTED_UNDER=$KILN_STARTED_UNDER$" "${job%cmdline}environ"; then return 0; fi
  done
  return 1
}
trap '' TERM INT
while trains; do sleep 1; done
exit "$code"
