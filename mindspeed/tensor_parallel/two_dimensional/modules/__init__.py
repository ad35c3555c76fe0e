"""Linear layers and norms of the grid as modules of Megatron."""
