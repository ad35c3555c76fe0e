"""Digests of every file of a checkpoint, by blocks, computed while the file is written.

    digests.jsonl    {"xxh3_64": "9f3c..."}                 of the second line
                     {"block_bytes": 1048576, "files": {"common.pt": {"bytes": .., "blocks": ..}}}

A file is divided into blocks of 1 MiB, each with a 64-bit XXH3. The hash finds damage (disks,
networks, copies); it is no protection from somebody who changes a checkpoint on purpose and writes
new digests. :mod:`mindspeed.storage.checked_file` verifies blocks while they are read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import xxhash

from mindspeed.errors import DamagedCheckpoint
from mindspeed.parsing import decode_json
from mindspeed.unpickle import check_relative

NAME = "digests.jsonl"
BLOCK_BYTES = 1 << 20
_WIDTH = 16  # hexadecimal digits of a digest


@dataclass(frozen=True)
class FileDigest:
    """One file.

    Attributes:
        size: Bytes.
        blocks: Digests of its blocks, in order; the last block may be shorter.
    """

    size: int
    blocks: tuple[str, ...]


@dataclass(frozen=True)
class Digests:
    """All files of a checkpoint, this one left out.

    Attributes:
        folder: Directory of the checkpoint.
        files: By their names in it.
        block_bytes: Size of a block.
    """

    folder: Path
    files: Mapping[str, FileDigest]
    block_bytes: int = BLOCK_BYTES

    @classmethod
    def read(cls, folder: Path) -> Digests | None:
        """The digests stored with a checkpoint; None where there are none.

        Raises:
            DamagedCheckpoint: The file with the digests is damaged.
            SecurityError: It names a file outside the directory.
        """
        path = folder / NAME
        try:
            head, _, body = path.read_bytes().partition(b"\n")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DamagedCheckpoint(f"{path} cannot be read: {error.strerror}") from error
        if head != _head(body):
            raise DamagedCheckpoint(f"{path} is damaged: it does not have its own digest")
        values = decode_json(body)
        files = {
            check_relative(name, str(path)): FileDigest(entry["bytes"], _divided(entry["blocks"]))
            for name, entry in values["files"].items()
        }
        return cls(folder, files, values["block_bytes"])

    def text(self) -> str:
        """What :meth:`read` reads."""
        files = {
            name: {"bytes": digest.size, "blocks": "".join(digest.blocks)}
            for name, digest in sorted(self.files.items())
        }
        body = json.dumps({"block_bytes": self.block_bytes, "files": files}).encode()
        return (_head(body) + b"\n" + body).decode()


class BlockHash:
    """The digest of bytes that come piece by piece."""

    def __init__(self) -> None:
        self._block = xxhash.xxh3_64()
        self._room = BLOCK_BYTES
        self._blocks: list[str] = []
        self.size = 0

    def update(self, view: memoryview) -> None:
        """Take the next bytes."""
        self.size += len(view)
        start = 0
        while len(view) - start >= self._room:
            self._block.update(view[start : start + self._room])
            start += self._room
            self._end_block()
        if start < len(view):
            self._block.update(view[start:])
            self._room -= len(view) - start

    def digest(self) -> FileDigest:
        """Digest of all bytes; none may follow."""
        if self._room < BLOCK_BYTES:
            self._end_block()
        return FileDigest(self.size, tuple(self._blocks))

    def _end_block(self) -> None:
        self._blocks.append(self._block.hexdigest())
        self._block = xxhash.xxh3_64()
        self._room = BLOCK_BYTES


class DigestingFile:
    """A file that is written from begin to end, with its digest in ``hash``.

    Args:
        file: Where the bytes go.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.hash = BlockHash()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._file.write(view)
        self.hash.update(view)
        return len(view)

    def tell(self) -> int:
        """Bytes so far."""
        return self.hash.size

    def flush(self) -> None:
        """Hand the bytes to the system."""
        self._file.flush()


def digest_of(path: Path) -> FileDigest:
    """The digest of a file that is there already."""
    total = BlockHash()
    with open(path, "rb") as file:
        while data := file.read(BLOCK_BYTES):
            total.update(memoryview(data))
    return total.digest()


def digest_all(folder: Path, known: Mapping[str, FileDigest] | None = None) -> Digests:
    """The digests of all files below a directory; of those not ``known`` it reads the files."""
    files = dict(known or {})
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in files and name != NAME:
            files[name] = digest_of(path)
    return Digests(folder, files)


def _head(body: bytes) -> bytes:
    return json.dumps({"xxh3_64": xxhash.xxh3_64_hexdigest(body)}).encode()


def _divided(blocks: str) -> tuple[str, ...]:
    return tuple(blocks[i : i + _WIDTH] for i in range(0, len(blocks), _WIDTH))
