"""The demo's world: real handwritten digits, a tiny base model, and judges of what it draws."""
