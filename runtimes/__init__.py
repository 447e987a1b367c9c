"""Training, sampling and encoding: shared objective, loader and loop; one runtime per framework."""

import os

# Otherwise PyTorch imports torch_npu or Habana's bridge in every process, where installed.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
