"""The demo: handwritten digits, a tiny base model, and judges of its pictures."""
