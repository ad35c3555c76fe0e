"""The original's import paths of tensor parallelism."""
