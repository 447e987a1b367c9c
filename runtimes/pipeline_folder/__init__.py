"""What a diffusers folder holds: which parts, of which sizes, in which files."""
