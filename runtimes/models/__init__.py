"""The PyTorch modules that runtimes torch, xla and jax all run."""

import os

# Read by these libraries when they are imported: what they would say is not about the job.
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
# Threads that spin while they wait for each other make steps of small models faster, and ten times
# slower once anything else (the stage, another job) wants a core: they spin briefly, then sleep.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
