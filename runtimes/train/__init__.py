"""A training run: the loop, and all that happens beside its steps."""
