"""Holds the functions and classes of the library by their values."""

from tests.original.library import Layer, double

twice = double

__all__ = ["Layer", "twice"]
