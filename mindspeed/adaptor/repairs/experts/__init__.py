"""Repairs of mixtures of experts."""
