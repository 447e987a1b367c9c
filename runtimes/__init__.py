"""What trains, draws and encodes: one objective, one loader, one loop, many thin runtimes."""

import os

# PyTorch would import torch_npu or Habana's bridge wherever they are installed, in every process.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
