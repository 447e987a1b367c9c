#!/usr/bin/env bash
# Create the environment of a runtime on a TPU VM, unless it exists: setup.sh [xla|jax]. Every worker of
# a slice runs it.
set -euo pipefail
cd "$(dirname "$0")/../.."
runtime="${1:-xla}"
case "$runtime" in
  xla) made=.venv-xla/tpu ;;
  jax) made=.venv/jax-tpu.stamp ;;
  *) echo "setup.sh: $runtime is neither xla nor jax" >&2; exit 2 ;;
esac
[ -e "$made" ] && exit 0
usable() { "python$1" -c 'import ensurepip' 2>/dev/null; }
if usable 3.11; then version=3.11; elif usable 3.12; then version=3.12; else
  # A new VM may still install updates: wait for apt's lock. PyTorch/XLA requires libpython.
  sudo apt-get update -qq -o DPkg::Lock::Timeout=600
  # Ubuntu 22.04 has Python 3.11, 24.04 has 3.12.
  if apt-cache show python3.11 >/dev/null 2>&1; then version=3.11; else version=3.12; fi
  sudo DEBIAN_FRONTEND=noninteractive apt-get install -qq -y -o DPkg::Lock::Timeout=600 \
    "python$version" "python$version-venv" "libpython$version" make
fi
if [ "$runtime" = jax ]; then
  exec make setup-jax-tpu PYTHON="python$version"
fi
make setup-xla PYTHON="python$version"
.venv-xla/bin/python -m pip install --quiet -r requirements/xla-tpu.txt
touch .venv-xla/tpu
