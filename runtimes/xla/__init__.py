"""The PyTorch/XLA runtime: TPU and CPU, partitioned over all devices by GSPMD."""

import os

# XLA's warnings do not concern the job.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
