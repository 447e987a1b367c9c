"""Recipes and the definitions of all their settings."""
