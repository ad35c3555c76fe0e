"""What other projects' scripts expect, and combinations that are refused."""
