"""Repairs of optimizers, their states and schedules."""
