"""Habana's GPU migration toolkit: to load it is all that is emulated."""
