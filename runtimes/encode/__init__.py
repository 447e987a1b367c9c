"""Encode pictures and captions in a process of its own, and tokenize captions."""
