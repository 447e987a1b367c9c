#!/usr/bin/env bash
# Do a job on this worker of a slice:  worker.sh JOB.json
#
# Who the workers are, and which one this is, the machine's metadata say. The first one speaks: its
# events, as JSON lines, and its log, on standard output. The others write worker.log.
set -euo pipefail
job=$(realpath "$1")
cd "$(dirname "$0")/../.."

attribute() {
  curl --silent --fail --header 'Metadata-Flavor: Google' \
    "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$1"
}

rank=$(attribute agent-worker-number)
# One "name:port:address" a worker, separated by commas, in the order of their numbers.
IFS=, read -ra workers <<<"$(attribute worker-network-endpoints)"
export RANK=$rank WORLD_SIZE=${#workers[@]} LOCAL_RANK=0 LOCAL_WORLD_SIZE=1
export MASTER_ADDR=${workers[0]##*:} MASTER_PORT=${MASTER_PORT:-8476}
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 KILN_EVENT_FD=3

# What an earlier try has left running would hold the chips.
pkill -KILL -f "runtimes $(dirname "$PWD")/kiln-[0-9a-f]*/job[.]json" || true
train() { .venv-xla/bin/python -P -m runtimes "$job"; }
# Its input ends with the connection, and it takes that for a wish to stop.
if [ "$rank" = 0 ]; then
  train 3>&1 2>&1
else
  train 3>/dev/null >worker.log 2>&1 || {
    code=$?
    echo "worker $rank ended with $code:"
    tail -n 20 worker.log
    exit "$code"
  }
fi
