"""The settings of a recipe, one file per section: names, defaults, descriptions and checks."""
