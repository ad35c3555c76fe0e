"""Pipeline stages, their schedules and messages."""
