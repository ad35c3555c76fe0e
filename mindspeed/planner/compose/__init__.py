"""Figures of jobs of any size, spliced from recordings of small ones."""
