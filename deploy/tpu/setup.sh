#!/usr/bin/env bash
# Make runtime xla's environment on a TPU VM. Every worker of a slice runs it; again, it does nothing.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ -e .venv-xla/tpu ] && exit 0
if ! command -v python3.11 >/dev/null; then
  # A new machine may still be at its own updates: wait for the lock. PyTorch/XLA wants libpython.
  sudo apt-get update -qq -o DPkg::Lock::Timeout=600
  sudo DEBIAN_FRONTEND=noninteractive apt-get install -qq -y -o DPkg::Lock::Timeout=600 \
    python3.11 python3.11-venv libpython3.11 make
fi
make setup-xla PYTHON=python3.11
.venv-xla/bin/python -m pip install --quiet -r requirements/xla-tpu.txt
touch .venv-xla/tpu
