"""The JAX runtime: TPU, GPU and CPU. It compiles diffusers' PyTorch modules through torchax."""

import os

os.environ.setdefault(
    "TF_CPP_MIN_LOG_LEVEL", "2"
)  # hides XLA's warnings, which do not concern the job
