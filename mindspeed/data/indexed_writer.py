"""Resumable writer of Megatron's indexed data sets.

    PREFIX.bin   all ids, concatenated
    PREFIX.idx   header, length and position of every sequence, first sequence of every document

Files grow under hidden names; at checkpoints they are synced and a small state file records their
valid sizes. They get their final names only when complete, ``.idx`` last. A resumed run truncates
the files to the recorded sizes and skips the blocks they contain; a run that was killed while
renaming only finishes renaming.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np

from mindspeed.errors import DataError
from mindspeed.files import atomic_write_text, make_dirs, secure_open
from mindspeed.parsing import decode_json

HEADER = b"MMIDIDX\x00\x00"
VERSION = 1
_TYPE_CODES = {"int32": 4, "uint16": 8}
_PARTS = (".bin", ".lengths", ".documents")


class IndexedWriter:
    """Writes several data sets that are committed together.

    Args:
        prefixes: paths of the data sets without ``.bin`` or ``.idx``.
        dtype: dtype of the ids, uint16 or int32.
        state: path of the state file.
        fingerprint: digest of everything that determines the output; must match to resume.
        resume: continue the run that the state file describes.

    Raises:
        DataError: another process is writing the same data sets.
    """

    def __init__(
        self,
        prefixes: Sequence[Path],
        dtype: type[np.generic],
        state: Path,
        fingerprint: str,
        resume: bool,
    ) -> None:
        self._prefixes = list(prefixes)
        self._dtype = np.dtype(dtype)
        self._state_path = state
        self._fingerprint = fingerprint
        self._closed = False
        make_dirs(state.parent)
        with ExitStack() as stack:
            for prefix in self._prefixes:
                lock = stack.enter_context(secure_open(_hidden(prefix, ".lock"), "ab"))
                _lock(lock, prefix)
            self.state = self._load_state() if resume else None
            self._files: dict[Path, IO[bytes]] = {}
            if not self.complete:
                for prefix in self._prefixes:
                    for part in _PARTS:
                        path = _hidden(prefix, part)
                        self._files[path] = stack.enter_context(secure_open(path, "ab"))
                self._truncate()
            self._open = stack.pop_all()

    @property
    def complete(self) -> bool:
        """Whether everything is written and only renaming is left."""
        return bool(self.state and self.state["complete"])

    def add(
        self,
        index: int,
        tokens: np.ndarray,
        lengths: np.ndarray,
        documents: np.ndarray,
    ) -> None:
        """Append sequences to data set ``index``.

        Args:
            index: position in ``prefixes``.
            tokens: all ids, ``[ids]``.
            lengths: number of ids of each sequence, int32 ``[sequences]``.
            documents: number of sequences of each document, int32 ``[documents]``.
        """
        prefix = self._prefixes[index]
        self._files[_hidden(prefix, ".bin")].write(tokens.astype(self._dtype, copy=False).tobytes())
        self._files[_hidden(prefix, ".lengths")].write(lengths.tobytes())
        self._files[_hidden(prefix, ".documents")].write(documents.tobytes())

    def checkpoint(self, progress: Mapping[str, Any]) -> None:
        """Sync what was added so far; a resumed run continues with ``progress``."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        self._write_state(progress, complete=False)

    def commit(self, progress: Mapping[str, Any]) -> None:
        """Write the index files and rename all files to their final names."""
        if not self.complete:
            self.checkpoint(progress)
            for prefix in self._prefixes:
                self._write_index(prefix)
            self._write_state(progress, complete=True)
        for prefix in self._prefixes:
            bin_file, idx_file = _hidden(prefix, ".bin"), _hidden(prefix, ".idx")
            if idx_file.exists():
                _final(prefix, ".idx").unlink(missing_ok=True)  # no old index next to new data
                if bin_file.exists():
                    os.replace(bin_file, _final(prefix, ".bin"))
                os.replace(idx_file, _final(prefix, ".idx"))
        self.close(keep=False)

    def close(self, keep: bool) -> None:
        """Close the files; ``keep`` them for a resumed run or remove them."""
        if self._closed:
            return
        self._closed = True
        self._open.close()
        if keep:
            return
        self._state_path.unlink(missing_ok=True)
        for prefix in self._prefixes:
            for part in (*_PARTS, ".idx", ".lock"):
                _hidden(prefix, part).unlink(missing_ok=True)

    def _load_state(self) -> dict[str, Any] | None:
        try:
            state = decode_json(self._state_path.read_text("utf-8"))
        except (OSError, ValueError):
            return None
        if state["fingerprint"] != self._fingerprint:
            raise DataError(
                f"--resume: the interrupted run of {self._state_path.parent} had other options or "
                "input files; give the same ones, or leave out --resume to start again"
            )
        return state

    def _truncate(self) -> None:
        """Truncate every file to its valid size; to nothing if a file is too short."""
        if self.state and any(
            os.fstat(file.fileno()).st_size < self.state["sizes"][path.name]
            for path, file in self._files.items()
        ):
            self.state = None
        if self.state is None:
            self._state_path.unlink(missing_ok=True)
        for path, file in self._files.items():
            file.truncate(self.state["sizes"][path.name] if self.state else 0)

    def _write_state(self, progress: Mapping[str, Any], complete: bool) -> None:
        sizes = {path.name: os.fstat(file.fileno()).st_size for path, file in self._files.items()}
        state = {
            "fingerprint": self._fingerprint,
            "complete": complete,
            "sizes": sizes,
            "progress": dict(progress),
        }
        atomic_write_text(self._state_path, json.dumps(state))

    def _write_index(self, prefix: Path) -> None:
        lengths = np.fromfile(_hidden(prefix, ".lengths"), np.int32)
        counts = np.fromfile(_hidden(prefix, ".documents"), np.int32)
        with secure_open(_hidden(prefix, ".idx"), "wb") as file:
            write_index(file, self._dtype, lengths, counts)
            file.flush()
            os.fsync(file.fileno())


def write_index(
    file: IO[bytes], dtype: np.dtype, lengths: np.ndarray, documents: np.ndarray
) -> None:
    """Write the content of an ``.idx`` file.

    Args:
        file: open for writing.
        dtype: dtype of the ids.
        lengths: number of ids of each sequence, int32 ``[sequences]``.
        documents: number of sequences of each document, int32 ``[documents]``.
    """
    file.write(HEADER + struct.pack("<QB", VERSION, _TYPE_CODES[dtype.name]))
    file.write(struct.pack("<QQ", len(lengths), len(documents) + 1))
    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    pointers = np.concatenate([np.zeros(1, np.int64), ends])[: len(lengths)]
    file.write(lengths.tobytes() + pointers.tobytes())
    file.write(np.concatenate([[0], np.cumsum(documents)]).astype(np.int64).tobytes())


def _hidden(prefix: Path, end: str) -> Path:
    return prefix.with_name(f".{prefix.name}{end}.tmp")


def _final(prefix: Path, end: str) -> Path:
    return prefix.with_name(prefix.name + end)


def _lock(file: IO[bytes], prefix: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise DataError(f"another process is writing {prefix}") from error
