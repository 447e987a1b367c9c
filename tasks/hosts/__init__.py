"""Training on several machines: engines reserve them, one retry logic follows all attempts."""
