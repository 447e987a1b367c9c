#!/usr/bin/env bash
# Make the bucket, a work pool for each kind of machine, and all deployments:  set_up.sh s3://BUCKET
# Each step may be repeated: a release with other deployments runs it again.
set -euo pipefail
bucket=$1
cd "$(dirname "$0")/../.."
python - "$bucket" <<'PYTHON'
import sys
from fsspec.core import url_to_fs
fs, path = url_to_fs(sys.argv[1])
fs.makedirs(path, exist_ok=True)
PYTHON
for pool in cpu gpu tpu ascend gaudi; do
  # An existing pool keeps its base job template.
  prefect --no-prompt work-pool inspect "$pool" >/dev/null 2>&1 || prefect --no-prompt work-pool create "$pool" --type process
done
prefect --no-prompt deploy --all --prefect-file deploy/prefect.yaml
