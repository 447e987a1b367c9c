"""PyTorch models that runtimes torch, xla and jax share."""

import os

# diffusers and transformers read these at import. Their warnings do not concern the user's job.
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
# Spinning OpenMP threads make steps of small models faster, but ten times slower when another
# process competes for a core. A short spin before sleeping keeps most of the gain.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
