"""Adapters (LoRA): which layers have them, and the formats that others load."""
