"""Explain a job, and predict the changes that help most."""
