"""Linear layers over tensor-parallel ranks."""
