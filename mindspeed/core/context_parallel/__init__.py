"""The original's functions of context parallelism: its names and its order of arguments."""
