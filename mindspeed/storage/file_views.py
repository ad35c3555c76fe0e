"""Read-only files with random access: the base class, and one entry of a larger file."""

from __future__ import annotations

import io
from typing import IO, Any


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
