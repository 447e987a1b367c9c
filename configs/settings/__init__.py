"""The settings of a recipe by section: names, defaults, descriptions and checks."""
