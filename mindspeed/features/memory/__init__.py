"""Activations: kept, computed again, or in host memory; the allocator."""
