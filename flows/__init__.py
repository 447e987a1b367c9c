"""The roof: the flows that chain the stages, and the `kiln` command."""
