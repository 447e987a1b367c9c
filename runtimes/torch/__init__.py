"""The PyTorch runtime: CPU and CUDA."""

import os

# Read by these libraries when they are imported: what they would say is not about the job.
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
# Threads that spin while they wait for each other cost steps of small models a factor of four when
# anything else (the loader, the stage, another job) wants a core.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
