#!/usr/bin/env bash
# Run a training job on this worker of a slice:  worker.sh JOB.json
#
# The VM's metadata have the addresses of the workers and the rank of this one. Rank 0 prints its
# events (JSON lines) and log to standard output. The others write worker.log.
set -euo pipefail
job=$(realpath "$1")
cd "$(dirname "$0")/../.."

attribute() {
  curl --silent --fail --header 'Metadata-Flavor: Google' \
    "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$1"
}

rank=$(attribute agent-worker-number)
# One "name:port:address" per worker, separated by commas, in order of rank.
IFS=, read -ra workers <<<"$(attribute worker-network-endpoints)"
export RANK=$rank WORLD_SIZE=${#workers[@]} LOCAL_RANK=0 LOCAL_WORLD_SIZE=1
export MASTER_ADDR=${workers[0]##*:} MASTER_PORT=${MASTER_PORT:-8476}
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 KILN_EVENT_FD=3

# A process of an earlier attempt would hold the chips.
pkill -KILL -f "runtimes $(dirname "$PWD")/kiln-[0-9a-f]*/job[^ /]*[.]json" || true
train() { .venv-xla/bin/python -P -m runtimes "$job"; }
# Standard input closes with the connection; the job then stops.
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
