"""One module per feature: its flags, its level, its checks, and what it hands to which seam."""
