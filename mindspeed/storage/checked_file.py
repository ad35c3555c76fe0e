"""Reading a file of a checkpoint and verifying the digest of every block that is read.

A reader verifies the blocks that it reads, in a second thread while it reads the next ones; a rank
that needs a part of a file reads and verifies that part only.

    with CheckedFile(folder / "__0_0.distcp", digests) as file:
        file.read(100)                  # DamagedCheckpoint, with the file and the bytes, if damaged
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import xxhash

from mindspeed.errors import DamagedCheckpoint
from mindspeed.storage.digests import BLOCK_BYTES, NAME, Digests


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
