#!/usr/bin/env bash
# Make the bucket, a work pool for each kind of machine, all deployments, and the automation that marks lost runs
# as crashed:  set_up.sh s3://BUCKET [kubernetes]
# `kubernetes`: runs of the pools that have a job template are Jobs of a cluster. All other runs are processes.
# Each step may be repeated: a release with other deployments runs it again.
set -euo pipefail
bucket=$1 type=${2:-process}
cd "$(dirname "$0")/../.."
python - "$bucket" <<'PYTHON'
import sys
from fsspec.core import url_to_fs
fs, path = url_to_fs(sys.argv[1])
fs.makedirs(path, exist_ok=True)
PYTHON
for pool in cpu gpu tpu ascend gaudi; do
  runs=(--type process)
  template="deploy/kubernetes/${pool}_job_template.json"
  [ "$type" = process ] || [ ! -f "$template" ] || runs=(--type "$type" --base-job-template "$template")
  # An existing pool keeps its base job template.
  prefect --no-prompt work-pool inspect "$pool" >/dev/null 2>&1 || prefect --no-prompt work-pool create "$pool" "${runs[@]}"
done
prefect --no-prompt deploy --all --prefect-file deploy/prefect.yaml
python deploy/automations/apply.py deploy/automations/run-without-heartbeat.yaml
