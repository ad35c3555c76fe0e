"""Digests of every file of a checkpoint, by blocks, computed while the file is written.

    digests.jsonl    {"xxh3_64": "9f3c..."}                 of the second line
                     {"block_bytes": 1048576, "files": {"common.pt": {"bytes": .., "blocks": ..}}}

A file is divided into blocks of 1 MiB, each with a 64-bit XXH3. The hash finds damage (disks,
networks, copies); it is no protection from somebody who changes a checkpoint on purpose and writes
new digests.

A reader verifies the blocks that it reads, in a second thread while it reads the next ones; a rank
that needs a part of a file reads and verifies that part only.

    with CheckedFile(folder / "__0_0.distcp", digests) as file:
        file.read(100)                  # DamagedCheckpoint, with the file and the bytes, if damaged
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
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


class ReadOnlyFile(io.RawIOBase):
    """``size`` bytes; a subclass implements :meth:`read_at`."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self._position = 0

    def read_at(self, position: int, view: memoryview) -> int:
        """Fill ``view`` with the bytes from ``position`` on; returns how many there were."""
        raise NotImplementedError

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        if base + offset < 0:
            raise OSError("seek before the beginning of the file")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self.size - self._position)]
        count = self.read_at(self._position, view)
        self._position += count
        return count


class FileSlice(ReadOnlyFile):
    """The bytes ``start`` to ``start + size`` of a file; torch's own view cannot seek from its end.

    Args:
        file: An open file; its position changes.
        start: First byte.
        size: Number of bytes.
    """

    def __init__(self, file: IO[bytes] | io.RawIOBase, start: int, size: int) -> None:
        super().__init__(size)
        self._file, self._start = file, start

    def read_at(self, position: int, view: memoryview) -> int:
        self._file.seek(self._start + position)
        return fill(self._file, view)


def fill(file: Any, view: memoryview) -> int:
    """Read until ``view`` is full or the file ends; returns the number of bytes read."""
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])
        if not count:
            break
        done += count
    return done


_BLOCKS_PER_READ = 4


class CheckedFile(ReadOnlyFile):
    """A file whose blocks are verified when bytes of them are first read.

    Args:
        path: The file.
        digests: Of its directory; None reads without verifying.

    Raises:
        DamagedCheckpoint: While opening or reading: it has no digest, or a block is damaged.
    """

    def __init__(self, path: Path, digests: Digests | None) -> None:
        super().__init__(path.stat().st_size)
        self._verified: set[int] = set()
        self._cached: dict[int, memoryview] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._blocks: tuple[str, ...] | None = None
        if digests is not None:
            self._block_bytes = digests.block_bytes
            self._name = path.relative_to(digests.folder).as_posix()
            digest = digests.files.get(self._name)
            if digest is None:
                raise DamagedCheckpoint(f"{self._name} is damaged: it has no digest in {NAME}")
            if self.size != digest.size:
                raise DamagedCheckpoint(f"{self._name} has {self.size} bytes, not {digest.size}")
            self._blocks = digest.blocks
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115  (closed by close)

    def read_at(self, position: int, view: memoryview) -> int:
        if self._blocks is None:
            self._file.seek(position)
            return fill(self._file, view)
        done, checks = 0, list[Future[None]]()
        while done < len(view):
            number, inside = divmod(position + done, self._block_bytes)
            whole = (len(view) - done) // self._block_bytes if inside == 0 else 0
            if whole and number not in self._cached:
                count = min(whole, _BLOCKS_PER_READ) * self._block_bytes
                target = view[done : done + count]
                self._read_raw(position + done, target)
                checks.append(self._hasher().submit(self._check_run, number, target))
            else:
                count = min(self._block_bytes - inside, len(view) - done)
                target = view[done : done + count]
                if number in self._verified and number not in self._cached:
                    self._read_raw(position + done, target)
                else:
                    target[:] = self._block(number)[inside : inside + count]
            done += count
        for check in checks:
            check.result()
        return done

    def check_all(self) -> None:
        """Read the whole file.

        Raises:
            DamagedCheckpoint: A block is damaged.
        """
        buffer = memoryview(bytearray(2 * _BLOCKS_PER_READ * BLOCK_BYTES))
        self.seek(0)
        while self.readinto(buffer):
            pass

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        self._file.close()
        super().close()

    def _hasher(self) -> ThreadPoolExecutor:
        """The thread that hashes the last blocks while the next ones are read."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "checkpoint-digests")
        return self._thread

    def _check_run(self, first: int, data: memoryview) -> None:
        """Verify consecutive blocks."""
        for start in range(0, len(data), self._block_bytes):
            number = first + start // self._block_bytes
            if number not in self._verified:
                self._check(number, data[start : start + self._block_bytes])

    def _read_raw(self, position: int, target: memoryview) -> None:
        self._file.seek(position)
        if fill(self._file, target) < len(target):
            raise DamagedCheckpoint(f"{self._name} ends too early")

    def _block(self, number: int) -> memoryview:
        """A block that is read in part.

        Two stay cached, because the next reads need the rest of them: an entry of a file begins in
        one block and ends in another.
        """
        if number in self._cached:
            return self._cached[number]
        if len(self._cached) < 2:
            buffer = memoryview(bytearray(self._block_bytes))
        else:
            buffer = self._cached.pop(next(iter(self._cached))).obj  # type: ignore[assignment]
        start = number * self._block_bytes
        data = memoryview(buffer)[: min(self._block_bytes, self.size - start)]
        self._read_raw(start, data)
        self._check(number, data)
        self._cached[number] = data
        return data

    def _check(self, number: int, data: memoryview) -> None:
        assert self._blocks is not None
        if xxhash.xxh3_64_hexdigest(data) != self._blocks[number]:
            first = number * self._block_bytes
            raise DamagedCheckpoint(
                f"{self._name} is damaged: bytes {first} to {first + len(data)} do not have "
                "their digest"
            )
        self._verified.add(number)


def first_damage(digests: Digests, names: Iterable[str] | None = None) -> str | None:
    """The first damaged file of a checkpoint, in one line; None if there is none.

    Args:
        digests: Of the checkpoint.
        names: Files to read; None for all. For the others only the size is compared.
    """
    wanted = set(digests.files if names is None else names)
    for name, digest in digests.files.items():
        path = digests.folder / name
        if not path.is_file():
            return f"{name} is missing"
        if (size := path.stat().st_size) != digest.size:
            return f"{name} has {size} bytes, not {digest.size}"
    for name in wanted & set(digests.files):
        try:
            with CheckedFile(digests.folder / name, digests) as file:
                file.check_all()
        except DamagedCheckpoint as error:
            return str(error)
    return None
