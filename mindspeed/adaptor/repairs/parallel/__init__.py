"""Repairs of process groups, losses and gradients over several ranks."""
