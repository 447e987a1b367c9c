"""Stages: one module or package each, every one cached by content and resumable inside."""
