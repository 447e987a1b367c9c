"""Pipeline folders of diffusers: configs, tensor shapes and weight files."""
