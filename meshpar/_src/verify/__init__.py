"""Proof that a layout does not change the result."""
