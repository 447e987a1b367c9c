"""The PyTorch/XLA runtime: TPU, and XLA on a CPU; partitioned over all devices by GSPMD."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA says much that is not about the job
