"""A checkpoint directory: names, which checkpoints are complete, which are deleted.

A checkpoint is written as ``iter_0000100.tmp`` and renamed when all its bytes are on disk; then the
tracker file is replaced. So a directory with its final name is complete, whenever a run is killed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mindspeed.errors import CheckpointError
from mindspeed.files import atomic_write_text, harden_tree

TRACKER = "latest_checkpointed_iteration.txt"
SIDECAR = "mindspeed.json"
CONFIG = "config.yaml"
RELEASE = "release"
_NAME = re.compile(r"iter_(\d{7,})")
_LEFT_OVER = re.compile(r"iter_\d{7,}\.(tmp|old)")


def path_of(root: str | Path, iteration: int) -> Path:
    """Where the checkpoint of an iteration is."""
    return Path(root) / f"iter_{iteration:07d}"


def unfinished_path_of(root: str | Path, iteration: int) -> Path:
    """Where it is while it is being written."""
    return path_of(root, iteration).with_suffix(".tmp")


def root_and_iteration(path: str) -> tuple[str, int | None]:
    """A directory of checkpoints, or one checkpoint in it: the directory and its iteration."""
    name = _NAME.fullmatch(Path(path).name)
    return (path, None) if name is None else (str(Path(path).parent), int(name[1]))


def iterations(root: str | Path) -> list[int]:
    """Iterations with a checkpoint, newest first."""
    names = [_NAME.fullmatch(path.name) for path in Path(root).glob("iter_*")]
    return sorted((int(name[1]) for name in names if name), reverse=True)


def tracked(root: str | Path) -> int | str | None:
    """What the tracker file names: an iteration, ``"release"``, or None without a readable one."""
    try:
        text = (Path(root) / TRACKER).read_text("utf-8").strip()
    except OSError:
        return None
    return text if text == RELEASE else int(text) if text.isdecimal() else None


def candidates(root: str | Path, step: int | None = None) -> Iterator[Path]:
    """Checkpoints to try, best first: the tracked one, then older ones, newest first.

    An untracked newer one (a run killed between rename and tracker) is complete, but only tried
    when the tracked one is not: Megatron-LM would not load it either.
    """
    if step is not None:
        yield path_of(root, step)
        return
    latest = tracked(root)
    if latest == RELEASE:
        yield Path(root) / RELEASE
        return
    found = iterations(root)
    if isinstance(latest, int):
        found.sort(key=lambda iteration: (iteration > latest, -iteration))
        if latest not in found:
            yield path_of(root, latest)
    elif not found:
        return
    for iteration in found:
        yield path_of(root, iteration)


def problem_with(checkpoint: Path) -> str | None:
    """Why a checkpoint cannot be loaded, as far as names and sizes tell; None if it can."""
    if not checkpoint.is_dir():
        return "there is no such directory"
    for name in ("metadata.json", "common.pt", ".metadata"):
        if not (checkpoint / name).is_file():
            return f"{name} is missing"
    sidecar = checkpoint / SIDECAR
    if not sidecar.is_file():  # written by Megatron-LM
        return None
    try:
        sizes: dict[str, int] = json.loads(sidecar.read_text("utf-8"))["files"]
    except (ValueError, KeyError, TypeError):
        return f"{SIDECAR} is damaged"
    for name, size in sizes.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, not {size}"
    return None


def publish(
    root: str | Path, iteration: int, extra: dict[str, Any], texts: Mapping[str, str]
) -> None:
    """Make a written checkpoint the latest one: texts, sidecar, sync, rename, tracker.

    On one rank. ``texts`` are further files by their names.
    """
    unfinished, final = unfinished_path_of(root, iteration), path_of(root, iteration)
    for name, text in texts.items():
        (unfinished / name).write_text(text, "utf-8")
    files = {path.name: path.stat().st_size for path in sorted(unfinished.iterdir())}
    text = json.dumps({**extra, "iteration": iteration, "files": files}, indent=1)
    (unfinished / SIDECAR).write_text(text, "utf-8")
    harden_tree(unfinished)
    for path in unfinished.iterdir():
        _sync(path)
    _sync(unfinished)
    if final.exists():
        final.rename(final.with_suffix(".old"))
    unfinished.rename(final)
    _sync(Path(root))
    atomic_write_text(Path(root) / TRACKER, str(iteration))


def remove_leftovers(root: str | Path) -> None:
    """Delete what interrupted saves and deletions left behind. On one rank."""
    for path in Path(root).glob("iter_*"):
        if not _LEFT_OVER.fullmatch(path.name):
            continue
        final = path.with_suffix("")
        if path.suffix == ".old" and not final.exists():
            path.rename(final)  # killed between the two renames of publish()
        else:
            shutil.rmtree(path, ignore_errors=True)


def remove_old(root: str | Path, keep_last: int | None, keep_every: int | None) -> list[int]:
    """Delete all but the newest checkpoints; returns the iterations deleted. On one rank."""
    if keep_last is None:
        return []
    latest = tracked(root)
    old = [i for i in iterations(root)[keep_last:] if i != latest]
    old = [i for i in old if not keep_every or i % keep_every]
    for iteration in old:
        path = path_of(root, iteration)
        doomed = path.with_suffix(
            ".tmp"
        )  # a deletion that is interrupted leaves no half checkpoint
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
    return old


def require_some(root: str | Path, tried: dict[Path, str]) -> None:
    """Raise unless the directory simply holds no checkpoint yet.

    Raises:
        CheckpointError: names every checkpoint tried and what is wrong with it.
    """
    if tried:
        reasons = "\n".join(f"  {path}: {reason}" for path, reason in tried.items())
        raise CheckpointError(f"--load {root}: no checkpoint can be loaded\n{reasons}")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
