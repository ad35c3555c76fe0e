"""One class per feature: its flags, its level, its checks, and what it attaches to which seam."""
