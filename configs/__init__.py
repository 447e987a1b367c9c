"""Recipes: what a user edits, and the one place that says which settings exist."""
