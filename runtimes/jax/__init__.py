"""The JAX runtime: TPU, GPU and CPU; diffusers' own modules, compiled whole and sharded."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA says much that is not about the job
