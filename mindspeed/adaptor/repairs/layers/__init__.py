"""Repairs of transformer layers, multi-token prediction and recomputation."""
