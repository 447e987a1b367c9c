"""Plan training on GPUs without a GPU."""
