"""Answers on disk, so that an interrupted evaluation can continue.

    run.json            identity of the run: questions, model, settings, as hashes
    samples-0.jsonl     one line per answered question, from data-parallel rank 0, 1, ...
    samples.jsonl       all of them, in the order of the questions, when the run is complete

A line is appended when its question is answered. A killed run may leave an incomplete line at the
end of a file; it is dropped and the question repeated. A directory belongs to one run: different
questions, models or settings are refused.

A run of lm-evaluation-harness keeps the model's responses instead (:class:`ResponseCache`), each by
the digest of its request: token ids and settings, so a response is valid for every task and run
with this model. All ranks hold the same entries: those on disk when a run starts, and those of
requests that all of them made.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist

from mindspeed.errors import ConfigError, DataError
from mindspeed.files import atomic_write_text, make_dirs, secure_open
from mindspeed.parsing import decode_json

RUN, SAMPLES = "run.json", "samples.jsonl"
_PARTS = "samples-*.jsonl"

Outcome = dict[str, Any]


class SampleFile:
    """The file to which this data-parallel rank appends its outcomes; none without a directory."""

    def __init__(self, directory: Path | None, replica: int) -> None:
        self._file: IO[str] | None = None
        if directory is not None:
            self._file = secure_open(directory / f"samples-{replica}.jsonl", "a")

    def append(self, outcomes: Iterable[Outcome]) -> None:
        """Append lines and flush them."""
        if self._file is not None:
            self._file.writelines(_line(outcome) for outcome in outcomes)
            self._file.flush()

    def __enter__(self) -> SampleFile:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._file is not None:
            self._file.close()


def begin(directory: Path, identity: Mapping[str, Any]) -> dict[str, Outcome]:
    """Claim ``directory`` for a run, or continue an earlier one; its outcomes by key.

    Raises:
        ConfigError: It belongs to another run.
    """
    make_dirs(directory)
    check(directory, identity)
    atomic_write_text(directory / RUN, json.dumps(identity, indent=2) + "\n")
    parts = sorted(directory.glob(_PARTS))
    paths = [path for path in (directory / SAMPLES, *parts) if path.is_file()]
    done = {outcome["key"]: outcome for path in paths for outcome in _read(path)}
    if parts:  # so that nothing is appended to an incomplete line
        finish(directory, list(done.values()))
    return done


def check(directory: Path, identity: Mapping[str, Any]) -> None:
    """Check that a run may write to ``directory``; changes nothing.

    Raises:
        ConfigError: It belongs to another run.
    """
    file = directory / RUN
    if not file.is_file():
        return
    old, new = decode_json(file.read_text("utf-8")), json.loads(json.dumps(identity))
    changed = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    if changed:
        raise ConfigError(
            f"--output {directory} holds another run, which differs in {' and '.join(changed)}; "
            "choose another directory, or remove this one"
        )


def finish(directory: Path, outcomes: Sequence[Outcome]) -> None:
    """Merge the files of all ranks into one."""
    atomic_write_text(directory / SAMPLES, "".join(map(_line, outcomes)))
    for part in directory.glob(_PARTS):
        part.unlink()


def _line(outcome: Outcome) -> str:
    return json.dumps(outcome, ensure_ascii=False) + "\n"


def _read(path: Path) -> list[Outcome]:
    # Not splitlines(): it also splits at characters that JSON strings may hold unescaped.
    *lines, _unfinished = path.read_text("utf-8", errors="replace").split("\n")
    try:
        return [decode_json(line) for line in lines]
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path} is damaged ({error}); remove it to repeat its questions"
        ) from error


def request_key(kind: str, *parts: Any) -> str:
    """SHA-256 of a request, given as numbers and texts."""
    return hashlib.sha256(json.dumps([kind, *parts]).encode()).hexdigest()


class ResponseCache:
    """The responses so far. Its creation is collective.

    Args:
        directory: Directory of the cache; None: memory only.
        identity: Identifies model and settings.
        replica: Data-parallel rank.
        is_writer: This rank writes for its replica.

    Raises:
        ConfigError: The directory belongs to another model.
    """

    def __init__(
        self,
        directory: Path | None = None,
        identity: Mapping[str, Any] | None = None,
        replica: int = 0,
        is_writer: bool = True,
    ) -> None:
        self.entries: dict[str, Any] = {}
        if directory is None:
            self._file = SampleFile(None, replica)
            return
        distributed = dist.is_initialized() and dist.get_world_size() > 1
        box: list[Any] = [None]
        if not distributed or dist.get_rank() == 0:
            box = [begin(directory, identity or {})]
        if distributed:
            dist.broadcast_object_list(box, src=0)
        self.entries = {key: line["value"] for key, line in box[0].items()}
        self._file = SampleFile(directory if is_writer else None, replica)

    def add(self, responses: Mapping[str, Any]) -> None:
        """Add responses, by the keys of their requests."""
        new = {key: value for key, value in responses.items() if key not in self.entries}
        self.entries |= new
        self._file.append({"key": key, "value": value} for key, value in new.items())
