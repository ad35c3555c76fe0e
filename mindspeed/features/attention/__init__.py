"""Attention: masks, positions, kernels, and sequences over several ranks."""
