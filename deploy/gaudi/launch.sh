#!/usr/bin/env bash
# Run a training job on the Gaudis of several hosts; start this script on each host:
#   launch.sh JOB.json HOSTS GAUDIS_PER_HOST FIRST_HOST_ADDRESS HOST_RANK
set -euo pipefail
job=$(realpath "$1") hosts=$2 local=$3 first=$4 rank=$5
cd "$(dirname "$0")/../.."
export PYTHONPATH=$PWD PT_HPU_LAZY_MODE=${PT_HPU_LAZY_MODE:-0}
exec torchrun --nnodes="$hosts" --nproc_per_node="$local" --node_rank="$rank" \
  --master_addr="$first" --master_port="${MASTER_PORT:-12345}" --no-python \
  python3 -P -m runtimes "$job"
