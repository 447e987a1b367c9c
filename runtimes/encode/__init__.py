"""Tokenize captions, and serve encoders to other processes."""
