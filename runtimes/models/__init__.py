"""The PyTorch modules that runtimes torch, xla and jax all run."""
