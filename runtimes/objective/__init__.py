"""The training objective in NumPy: random numbers, timesteps, noise, targets, loss weights."""
