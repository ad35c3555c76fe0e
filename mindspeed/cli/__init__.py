"""The ``mindspeed`` command: one sub-command a file, each thin."""
