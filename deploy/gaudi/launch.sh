#!/usr/bin/env bash
# Do a job on the Gaudis of this host, together with other hosts:
#   launch.sh JOB.json HOSTS GAUDIS_HERE FIRST_HOSTS_ADDRESS NUMBER_OF_THIS_HOST
set -euo pipefail
job=$(realpath "$1") hosts=$2 here=$3 first=$4 number=$5
cd "$(dirname "$0")/../.."
export PYTHONPATH=$PWD PT_HPU_LAZY_MODE=${PT_HPU_LAZY_MODE:-0}
exec torchrun --nnodes="$hosts" --nproc_per_node="$here" --node_rank="$number" \
  --master_addr="$first" --master_port="${MASTER_PORT:-12345}" --no-python \
  python3 -P -m runtimes "$job"
