"""The original's import paths of computation over communication (CoC)."""
