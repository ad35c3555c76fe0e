"""Ampipe: attention in chunks of the sequence, which hides the dispatch of the chunk before."""
