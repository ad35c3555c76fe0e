"""The checkpoint before a finding is kept: a file beside it says why.

DIR/iter_0000100/       the checkpoint
DIR/iter_0000100.keep   why it is never deleted
"""

from __future__ import annotations

from pathlib import Path

from mindspeed.files import atomic_write_text

TRACKER = "latest_checkpointed_iteration.txt"


def latest(root: str) -> Path | None:
    """The checkpoint that the tracker file of a directory names; None without one."""
    if not root:
        return None
    try:
        text = Path(root, TRACKER).read_text("utf-8").strip()
    except OSError:
        return None
    path = Path(root, f"iter_{int(text):07d}") if text.isdigit() else Path(root, text)
    return path if path.is_dir() else None


def keep(checkpoint: Path, why: str) -> None:
    """Keep a checkpoint from being deleted by ``--keep-last``. On one rank."""
    atomic_write_text(_marker(checkpoint), why + "\n")


def is_kept(checkpoint: Path) -> bool:
    """Whether a finding keeps it."""
    return _marker(checkpoint).is_file()


def _marker(checkpoint: Path) -> Path:
    return checkpoint.with_suffix(".keep")
