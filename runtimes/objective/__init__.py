"""What the model is asked to predict: noise, its levels, targets, loss weights. NumPy alone."""
