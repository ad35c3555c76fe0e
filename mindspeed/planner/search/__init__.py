"""The search for the best layouts of a job: its space, bounds and results."""
