"""The JAX runtime: TPU, GPU and CPU. It compiles diffusers' PyTorch modules through torchax."""

import os

# XLA's warnings do not concern the job.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
