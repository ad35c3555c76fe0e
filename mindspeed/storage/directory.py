"""A checkpoint directory: names, which checkpoints are complete, which are deleted.

A checkpoint is written as ``iter_0000100.tmp`` and renamed when all its bytes are on disk; then the
tracker file is replaced. So a directory with its final name is complete, whenever a run is killed,
and what happens to its bytes later its digests show (:mod:`mindspeed.storage.digests`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mindspeed.errors import CheckpointError, DamagedCheckpoint
from mindspeed.files import (
    DIRECTORY_MODE,
    atomic_write_text,
    check_path,
    harden_tree,
    make_dirs,
)
from mindspeed.guard.checkpoints import is_kept
from mindspeed.parsing import decode_json
from mindspeed.storage import digests
from mindspeed.storage.digests import first_damage
from mindspeed.unpickle import check_relative

TRACKER = "latest_checkpointed_iteration.txt"
SIDECAR = "mindspeed.json"
CONFIG = "config.yaml"
RELEASE = "release"
COMMON_STATE = "common_state/shard_0_1"
"""Since megatron-core 0.19: the entry of the index that has the contents of ``common.pt``."""
_NAME = re.compile(r"iter_(\d{7,})")
_TENSORS = (".distcp", ".safetensors", "model_optim_rng.pt", "_model_states.pt")
_LEFT_OVER = re.compile(r"iter_\d{7,}\.(tmp|old)")


def path_of(root: str | Path, iteration: int) -> Path:
    return Path(root) / f"iter_{iteration:07d}"


def unfinished_path_of(root: str | Path, iteration: int) -> Path:
    """Path while it is being written."""
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
        text = (Path(root) / TRACKER).read_bytes().strip()
    except OSError:
        return None
    return RELEASE if text == RELEASE.encode() else int(text) if text.isdigit() else None


def tracker_problem(root: str | Path) -> str | None:
    """How the tracker file disagrees with the checkpoints next to it; None if it agrees.

    A tracker has no digest: it is Megatron-LM's, and people write it by hand to go back.
    """
    found, latest = iterations(root), tracked(root)
    path = Path(root) / TRACKER
    if latest == RELEASE or (latest is None and not found and not path.exists()):
        return None
    if latest is None:
        return f"{path} is damaged" if path.exists() else f"{path} is missing"
    if latest not in found:
        return f"{path} names iteration {latest}, which is not there"
    if found[0] > latest:
        return f"{path} names iteration {latest}, but there is a later one, {found[0]}"
    return None


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
    """Why a checkpoint cannot be loaded, as far as all files but the tensors tell; None if it can.

    Its names and sizes, and the contents of the small files; tensors are checked while they are
    read.
    """
    if not checkpoint.is_dir():
        return "there is no such directory"
    for name in ("metadata.json", ".metadata"):
        if not (checkpoint / name).is_file():
            return f"{name} is missing"
    index = checkpoint / ".metadata"
    if not (checkpoint / "common.pt").is_file() and COMMON_STATE.encode() not in index.read_bytes():
        return "common.pt is missing"
    return damage_of(checkpoint, whole=False)


def damage_of(checkpoint: Path, *, whole: bool) -> str | None:
    """The first file of a checkpoint that is not what was written; None if there is none.

    Args:
        checkpoint: Directory of one iteration, or ``release``, of any format.
        whole: Read the files with tensors, too.
    """
    try:
        stored = digests.Digests.read(checkpoint)
    except DamagedCheckpoint as error:
        return str(error)
    if stored is not None:
        small = [name for name in stored.files if not name.endswith(_TENSORS)]
        return first_damage(stored, None if whole else small)
    sidecar = checkpoint / SIDECAR
    if not sidecar.is_file():  # written by Megatron-LM
        return None
    try:
        values = decode_json(sidecar.read_text("utf-8"))
        sizes: dict[str, int] = values["files"]
        with_digests = values.get("digests")
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{SIDECAR} is damaged"
    if with_digests:
        return f"{digests.NAME} is missing"
    for name, size in sizes.items():
        path = checkpoint / check_relative(name, str(sidecar))
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, not {size}"
    return None


def others(checkpoint: Path) -> str:
    """What to do about a damaged checkpoint, as the end of a sentence."""
    found = root_and_iteration(str(checkpoint))[1]
    for iteration in iterations(checkpoint.parent):
        path = path_of(checkpoint.parent, iteration)
        if iteration != found and problem_with(path) is None:
            return f"; {path.name} is complete: take it with --ckpt-step {iteration}"
    return f" (if it was changed on purpose, delete {digests.NAME} and {SIDECAR} next to it)"


def begin(root: str | Path, iteration: int) -> Path:
    """Make the empty directory into which a checkpoint is written. On one rank.

    Raises:
        SecurityError: A symbolic link is in its place.
        OSError: It cannot be made.
    """
    make_dirs(root)
    remove_leftovers(root)
    path = unfinished_path_of(root, iteration)
    check_path(path, "output")
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(mode=DIRECTORY_MODE)
    return path


def publish(
    root: str | Path,
    iteration: int,
    extra: dict[str, Any],
    texts: Mapping[str, str],
    written: Mapping[str, digests.FileDigest] | None = None,
) -> None:
    """Make a written checkpoint the latest one: texts, sidecar, digests, sync, rename, tracker.

    On one rank.

    Args:
        root: Directory of checkpoints.
        iteration: Of this one.
        extra: Goes into the sidecar.
        texts: Contents of additional files by their names.
        written: Digests of files that were made while they were written.
    """
    unfinished, final = unfinished_path_of(root, iteration), path_of(root, iteration)
    for name, text in texts.items():
        (unfinished / name).write_text(text, "utf-8")
    files = {path.name: path.stat().st_size for path in sorted(unfinished.iterdir())}
    values = {**extra, "iteration": iteration, "files": files, "digests": digests.NAME}
    (unfinished / SIDECAR).write_text(json.dumps(values, indent=1), "utf-8")
    add_digests(unfinished, written)
    harden_tree(unfinished)
    for path in unfinished.iterdir():
        _sync(path)
    _sync(unfinished)
    if final.exists():
        final.rename(final.with_suffix(".old"))
    unfinished.rename(final)
    _sync(Path(root))
    atomic_write_text(Path(root) / TRACKER, str(iteration))


def add_digests(folder: Path, written: Mapping[str, digests.FileDigest] | None = None) -> None:
    """Write the digests of all files of a checkpoint next to them.

    Args:
        folder: Its directory.
        written: Digests that are known already; the other files are read.
    """
    (folder / digests.NAME).write_text(digests.digest_all(folder, written).text(), "utf-8")


def remove_leftovers(root: str | Path) -> None:
    """Delete the remains of interrupted saves and deletions. On one rank."""
    for path in Path(root).glob("iter_*"):
        if not _LEFT_OVER.fullmatch(path.name):
            continue
        final = path.with_suffix("")
        if path.suffix == ".old" and not final.exists():
            path.rename(final)  # killed between the two renames of publish()
        else:
            shutil.rmtree(path, ignore_errors=True)


def remove_old(root: str | Path, keep_last: int | None, keep_every: int | None) -> list[int]:
    """Delete all but the newest checkpoints; returns the iterations deleted. On one rank.

    Those before a finding of ``--guard`` are kept, too.
    """
    if keep_last is None:
        return []
    latest = tracked(root)
    old = [i for i in iterations(root)[keep_last:] if i != latest]
    old = [i for i in old if not keep_every or i % keep_every]
    old = [i for i in old if not is_kept(path_of(root, i))]
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
        hint = others(next(iter(tried))) if len(tried) == 1 else ""
        raise CheckpointError(f"--load {root}: no checkpoint can be loaded{hint}\n{reasons}")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
