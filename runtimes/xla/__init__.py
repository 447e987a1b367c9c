"""The PyTorch/XLA runtime: TPU and CPU, partitioned over all devices by GSPMD."""

import os

os.environ.setdefault(
    "TF_CPP_MIN_LOG_LEVEL", "2"
)  # hides XLA's warnings, which do not concern the job
