#!/usr/bin/env bash
# Do a job on the NPUs of this host, together with other hosts:
#   launch.sh JOB.json NPUS_IN_ALL NPUS_HERE FIRST_HOSTS_ADDRESS NUMBER_OF_THIS_HOST
set -euo pipefail
job=$(realpath "$1") all=$2 here=$3 first=$4 number=$5
cd "$(dirname "$0")/../.."
toolkit=${ASCEND_HOME_PATH:-/usr/local/Ascend/ascend-toolkit/latest}
if [ -f "$toolkit/../set_env.sh" ]; then
  set +u # it appends to variables that may not be there
  # shellcheck disable=SC1091
  source "$toolkit/../set_env.sh"
  set -u
fi
export PATH=$PWD/.venv-mindspore/bin:$PATH
exec msrun --worker_num="$all" --local_worker_num="$here" --node_rank="$number" \
  --master_addr="$first" --master_port="${MASTER_PORT:-8118}" --cluster_time_out=600 \
  --log_dir="logs/$(basename "$job" .json)" --join=True \
  python -P -m runtimes "$job"
