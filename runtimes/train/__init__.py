"""A training run: the loop, checkpoints, measurements and trackers."""
