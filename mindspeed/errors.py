"""Every error a user can cause, one class per kind of remedy.

A message names the given value, the allowed values, and the flag or file to change.
All classes derive from :class:`MindSpeedError`. :func:`describe` is what a command or a rank prints
about any error: these messages as they are, one line about everything else.
"""

from __future__ import annotations

import os
import tempfile
import traceback
from pathlib import Path
from typing import Any


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


class PatchTooLate(PatchError):
    """The patched name was taken by somebody who cannot be given another."""


class PatchConflict(PatchError):
    """Two features replace the same name."""


class DataError(MindSpeedError, ValueError):
    """A dataset or tokenizer is missing, damaged or does not fit the model."""


class CheckpointError(MindSpeedError):
    """A checkpoint is missing, damaged or of another architecture."""


class DamagedCheckpoint(CheckpointError):
    """A file of a checkpoint is not as it was written; another checkpoint may be good."""


class TrainingError(MindSpeedError, RuntimeError):
    """Training cannot continue, for example because the loss is not finite."""


class NoAnswer(TrainingError):
    """What another rank should send did not come.

    Attributes:
        rank: global rank that waited.
        awaited: global rank that should have sent it.
    """

    def __init__(self, message: str, rank: int, awaited: int) -> None:
        super().__init__(message)
        self.rank, self.awaited = rank, awaited

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.rank, self.awaited)


class PlanError(MindSpeedError, RuntimeError):
    """The planner could not count or time a configuration."""


class SecurityError(MindSpeedError, PermissionError):
    """A path or file is refused because loading or writing it would be unsafe."""


DEBUG = "MINDSPEED_TRACEBACK"  # the environment carries --debug to the ranks that a command starts
_LONGEST_LINE = 300


def describe(error: BaseException) -> str:
    """What a command prints about ``error``: the message for the user, without a traceback.

    Errors of the operating system name their file. An unexpected error is one line: type,
    message, source line, file with the traceback. ``--debug`` prints the traceback instead.
    """
    if os.environ.get(DEBUG):
        return "\n" + "".join(traceback.format_exception(error)).rstrip()
    if isinstance(error, MindSpeedError):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, OSError) and error.strerror:
        names = [str(name) for name in (error.filename, error.filename2) if name is not None]
        return _shortened(": ".join([*names, error.strerror]))
    return f"unexpected {_shortened(_first_line(error))} ({_place(error)}){_kept(error)}"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return type(error).__name__ + (f": {lines[0]}" if lines else "")


def _shortened(line: str) -> str:
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}..."


def _place(error: BaseException) -> str:
    """The innermost line of this package, else of any other, that the error went through."""
    frames = traceback.extract_tb(error.__traceback__)
    here = str(Path(__file__).parent)
    ours = [frame for frame in frames if frame.filename.startswith(here)]
    if not frames:
        return "no traceback"
    frame = (ours or frames)[-1]
    name = frame.filename.removeprefix(here).lstrip("/")
    return f"{name}, line {frame.lineno}"


def _kept(error: BaseException) -> str:
    """Write the traceback to a file of the user's own; says where."""
    try:
        handle, name = tempfile.mkstemp(prefix="mindspeed-", suffix=".log")
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
            file.writelines(traceback.format_exception(error))
    except OSError:
        return "; --debug prints the traceback"
    return f"; traceback: {name}, or on the screen with --debug"
