"""Digests of every file of a checkpoint, by blocks: made while it is written, checked while read.

    digests.jsonl    {"xxh3_64": "9f3c..."}                 of the second line
                     {"block_bytes": 1048576, "files": {"common.pt": {"bytes": .., "blocks": ..}}}

A file is cut into blocks of 1 MiB, each with a 64-bit XXH3. A reader checks the blocks that it
reads, in a second thread while it reads the next ones; a rank that needs a part of a file reads and
checks that part only. The hash finds damage (disks, networks, copies); it is no protection from
somebody who changes a checkpoint on purpose and writes new digests.

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
from mindspeed.unpickle import check_relative

NAME = "digests.jsonl"
BLOCK_BYTES = 1 << 20
_RUN = 4  # blocks that are read in one go
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
        values = json.loads(body)
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

    def problem(self, names: Iterable[str] | None = None) -> str | None:
        """The first damage, in one line; None if there is none.

        Args:
            names: Files to read; None for all. Of the others only the size is looked at.
        """
        wanted = set(self.files if names is None else names)
        for name, digest in self.files.items():
            path = self.folder / name
            if not path.is_file():
                return f"{name} is missing"
            if (size := path.stat().st_size) != digest.size:
                return f"{name} has {size} bytes, not {digest.size}"
        for name in wanted & set(self.files):
            try:
                with CheckedFile(self.folder / name, self) as file:
                    file.check_all()
            except DamagedCheckpoint as error:
                return str(error)
        return None


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
        """Of all bytes; none may follow."""
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
        """Write bytes."""
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


class CheckedFile(io.RawIOBase):
    """A file, read only, whose blocks are checked when bytes of them are first read.

    Args:
        path: The file.
        digests: Of its directory; None reads without checking.

    Raises:
        DamagedCheckpoint: While opening or reading: it has no digest, or a block is damaged.
    """

    def __init__(self, path: Path, digests: Digests | None) -> None:
        super().__init__()
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115  (closed by close)
        self._position = 0
        self._good: set[int] = set()
        self._kept: dict[int, memoryview] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._digest: FileDigest | None = None
        if digests is not None:
            self._block_bytes = digests.block_bytes
            self._name = path.relative_to(digests.folder).as_posix()
            self._digest = digests.files.get(self._name)
            if self._digest is None:
                raise DamagedCheckpoint(f"{self._name} is damaged: it has no digest in {NAME}")
            if (size := self._file.seek(0, io.SEEK_END)) != self._digest.size:
                raise DamagedCheckpoint(f"{self._name} has {size} bytes, not {self._digest.size}")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        if whence == io.SEEK_CUR:
            offset += self._position
        elif whence == io.SEEK_END:
            offset += self._file.seek(0, io.SEEK_END)
        self._position = offset
        return offset

    def readinto(self, buffer: Any, /) -> int:
        """Read as many bytes as there are and ``buffer`` holds."""
        view = memoryview(buffer).cast("B")
        if self._digest is None:
            self._file.seek(self._position)
            count = _fill(self._file, view)
            self._position += count
            return count
        view = view[: max(0, self._digest.size - self._position)]
        done, checks = 0, list[Future[None]]()
        while done < len(view):
            number, inside = divmod(self._position, self._block_bytes)
            whole = (len(view) - done) // self._block_bytes if inside == 0 else 0
            if whole and number not in self._kept:
                count = min(whole, _RUN) * self._block_bytes
                target = view[done : done + count]
                self._read_at(self._position, target)
                checks.append(self._hasher().submit(self._check_run, number, target))
            else:
                count = min(self._block_bytes - inside, len(view) - done)
                target = view[done : done + count]
                if number in self._good and number not in self._kept:
                    self._read_at(self._position, target)
                else:
                    target[:] = self._block(number)[inside : inside + count]
            done += count
            self._position += count
        for check in checks:
            check.result()
        return done

    def check_all(self) -> None:
        """Read the whole file.

        Raises:
            DamagedCheckpoint: A block is damaged.
        """
        buffer = memoryview(bytearray(2 * _RUN * BLOCK_BYTES))
        self.seek(0)
        while self.readinto(buffer):
            pass

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        self._file.close()
        super().close()

    def _hasher(self) -> ThreadPoolExecutor:
        """The thread that hashes what was read while the next bytes are read."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "checkpoint-digests")
        return self._thread

    def _check_run(self, first: int, data: memoryview) -> None:
        """Check blocks that lie one behind the other."""
        for start in range(0, len(data), self._block_bytes):
            number = first + start // self._block_bytes
            if number not in self._good:
                self._check(number, data[start : start + self._block_bytes])

    def _read_at(self, position: int, target: memoryview) -> None:
        self._file.seek(position)
        if _fill(self._file, target) < len(target):
            raise DamagedCheckpoint(f"{self._name} ends too early")

    def _block(self, number: int) -> memoryview:
        """A block of which a part is wanted; two are kept: an entry begins in one, ends in another.

        The next reads want the rest of them.
        """
        if number in self._kept:
            return self._kept[number]
        if len(self._kept) < 2:
            buffer = memoryview(bytearray(self._block_bytes))
        else:
            buffer = self._kept.pop(next(iter(self._kept))).obj  # type: ignore[assignment]
        data = memoryview(buffer)[: self._size_of(number)]
        self._read_at(number * self._block_bytes, data)
        self._check(number, data)
        self._kept[number] = data
        return data

    def _size_of(self, number: int) -> int:
        assert self._digest is not None
        return min(self._block_bytes, self._digest.size - number * self._block_bytes)

    def _check(self, number: int, data: Any) -> None:
        assert self._digest is not None
        if xxhash.xxh3_64_hexdigest(data) != self._digest.blocks[number]:
            first = number * self._block_bytes
            raise DamagedCheckpoint(
                f"{self._name} is damaged: bytes {first} to {first + len(data)} do not have "
                "their digest"
            )
        self._good.add(number)


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


def _fill(file: io.FileIO, view: memoryview) -> int:
    """Read until ``view`` is full or the file ends."""
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])
        if not count:
            break
        done += count
    return done


def _head(body: bytes) -> bytes:
    return json.dumps({"xxh3_64": xxhash.xxh3_64_hexdigest(body)}).encode()


def _divided(blocks: str) -> tuple[str, ...]:
    return tuple(blocks[i : i + _WIDTH] for i in range(0, len(blocks), _WIDTH))
