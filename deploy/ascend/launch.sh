#!/usr/bin/env bash
# Run a training job on the NPUs of several hosts; start this script on each host:
#   launch.sh JOB.json TOTAL_NPUS NPUS_PER_HOST FIRST_HOST_ADDRESS HOST_RANK
set -euo pipefail
job=$(realpath "$1") total=$2 local=$3 first=$4 rank=$5
cd "$(dirname "$0")/../.."
toolkit=${ASCEND_HOME_PATH:-/usr/local/Ascend/ascend-toolkit/latest}
if [ -f "$toolkit/../set_env.sh" ]; then
  set +u # the file uses unset variables
  # shellcheck disable=SC1091
  source "$toolkit/../set_env.sh"
  set -u
fi
export PATH=$PWD/.venv-mindspore/bin:$PATH
# In an image the checkout is root's, but not `outputs`.
exec msrun --worker_num="$total" --local_worker_num="$local" --node_rank="$rank" \
  --master_addr="$first" --master_port="${MASTER_PORT:-8118}" --cluster_time_out=600 \
  --log_dir="outputs/logs/$(basename "$job" .json)" --join=True \
  python -P -m runtimes "$job"
