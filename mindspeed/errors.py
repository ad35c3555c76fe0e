"""Every error a user can cause, one class per kind of remedy.

A message reads like a colleague: what was given, what is allowed, which flag or file to change.
All classes derive from :class:`MindSpeedError`, so a launcher can print the message without a
traceback and still let programming errors through.
"""

from __future__ import annotations


class MindSpeedError(Exception):
    """Base class of all errors with a message meant for the user."""


class ConfigError(MindSpeedError, ValueError):
    """A flag or recipe, or a combination, is wrong; the message names the flag and the fix."""


class VersionError(MindSpeedError, ImportError):
    """An installed package is outside the range this release was tested with."""


class PatchError(MindSpeedError):
    """A patch could not be applied; nothing was changed."""


class PatchTargetMissing(PatchError):
    """The patched name does not exist in the installed version."""


class PatchTargetChanged(PatchError):
    """The patched name exists with another signature than the patch was written for."""


class PatchConflict(PatchError):
    """Two features replace the same name."""


class DataError(MindSpeedError, ValueError):
    """A dataset or tokenizer is missing, damaged or does not fit the model."""


class CheckpointError(MindSpeedError):
    """A checkpoint is missing, damaged or of another architecture."""


class TrainingError(MindSpeedError, RuntimeError):
    """Training cannot go on, for example because the loss is not finite."""


class SecurityError(MindSpeedError, PermissionError):
    """A path or file is refused because loading or writing it would be unsafe."""
