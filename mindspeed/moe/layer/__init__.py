"""The forward of a mixture-of-experts layer that executes a program."""
