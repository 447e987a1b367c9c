#!/usr/bin/env bash
# Create or renew the environment of a runtime on a TPU VM: setup.sh [xla|jax]. Every worker of a slice
# runs it. A repetition takes a second, because make installs only what changed.
set -euo pipefail
cd "$(dirname "$0")/../.."
runtime="${1:-xla}"
case "$runtime" in
  xla | jax) ;;
  *) echo "setup.sh: $runtime is neither xla nor jax" >&2; exit 2 ;;
esac
usable() { "python$1" -c 'import ensurepip' 2>/dev/null; }
if usable 3.11; then version=3.11; elif usable 3.12; then version=3.12; else
  # A new VM may still install updates: wait for apt's lock. PyTorch/XLA requires libpython.
  sudo apt-get update -qq -o DPkg::Lock::Timeout=600
  # Ubuntu 22.04 has Python 3.11, 24.04 has 3.12.
  if apt-cache show python3.11 >/dev/null 2>&1; then version=3.11; else version=3.12; fi
  sudo DEBIAN_FRONTEND=noninteractive apt-get install -qq -y -o DPkg::Lock::Timeout=600 \
    "python$version" "python$version-venv" "libpython$version" make
fi
exec make "setup-$runtime-tpu" PYTHON="python$version"
