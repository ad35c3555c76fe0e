"""Flags that other projects' scripts expect, and combinations that are refused."""
