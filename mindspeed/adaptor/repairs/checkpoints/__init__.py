"""Repairs of what is written to checkpoints and read from them."""
