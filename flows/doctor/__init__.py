"""Checks of a machine and a recipe, with the command that mends each problem."""
