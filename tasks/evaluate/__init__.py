"""The evaluate stage: compare the tuned model with its base on equal prompts and noise."""
