"""A package that extends mindspeed from outside; docs/extending.md explains each file."""
