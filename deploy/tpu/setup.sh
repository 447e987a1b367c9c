#!/usr/bin/env bash
# Make runtime xla's environment on a TPU VM. Every worker of a slice runs it; again, it does nothing.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ -e .venv-xla/tpu ] && exit 0
usable() { "python$1" -c 'import ensurepip' 2>/dev/null; }
if usable 3.11; then version=3.11; elif usable 3.12; then version=3.12; else
  # A new machine may still be at its own updates: wait for the lock. PyTorch/XLA wants libpython.
  sudo apt-get update -qq -o DPkg::Lock::Timeout=600
  # Ubuntu 24.04 has no 3.11, 22.04 no 3.12.
  if apt-cache show python3.11 >/dev/null 2>&1; then version=3.11; else version=3.12; fi
  sudo DEBIAN_FRONTEND=noninteractive apt-get install -qq -y -o DPkg::Lock::Timeout=600 \
    "python$version" "python$version-venv" "libpython$version" make
fi
make setup-xla PYTHON="python$version"
.venv-xla/bin/python -m pip install --quiet -r requirements/xla-tpu.txt
touch .venv-xla/tpu
