"""Retraining: what changed since the champion, training from it, and the decision."""
