"""Seconds of a step: the schedule simulated with the seconds of recorded or whole ranks."""
