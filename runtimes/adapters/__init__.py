"""LoRA adapters: target layers, initialisation, merging and file formats."""
