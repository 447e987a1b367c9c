"""A training run: the loop, checkpoints, validation, sample images and trackers."""
