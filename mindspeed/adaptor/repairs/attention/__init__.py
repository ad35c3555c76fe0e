"""Repairs of attention and its positions."""
