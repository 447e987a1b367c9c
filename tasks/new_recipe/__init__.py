"""`kiln new`: a recipe from pictures, a goal, a machine, a base and prompts."""
