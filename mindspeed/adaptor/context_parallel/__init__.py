"""Context-parallel attention by the original library's functions, classes and dictionaries.

Thin callers of :mod:`mindspeed.te.context_parallel`; ``mindspeed.core.context_parallel`` has them
under the original's import paths.
"""
