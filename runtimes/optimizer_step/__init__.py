"""Formulas of the optimizer step that every runtime shares."""
