"""Readers of all input file formats, as blocks of records.

A file is split into blocks of about a megabyte, always at the same places. A block is the unit of
work of a worker process, of progress, and of resuming an interrupted run.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

from mindspeed.errors import DataError
from mindspeed.parsing import int_or_text

BLOCK_BYTES = 1 << 20
BLOCK_RECORDS = 1000
FORMATS = {
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".txt": "text",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
COMPRESSIONS = (".gz", ".zst")


@dataclass(frozen=True)
class RecordBlock:
    """Consecutive records.

    Attributes:
        file: input file, for messages.
        first: line or record number of the first record, starting at 1.
        records: lines of JSON (bytes), or decoded records.
        size: bytes on disk, after compression.
    """

    file: str
    first: int
    records: list[Any]
    size: int


def format_of(path: Path) -> str | None:
    """The format that a file's name indicates, or None."""
    suffixes = [suffix for suffix in path.suffixes[-2:] if suffix not in COMPRESSIONS]
    return FORMATS.get(suffixes[-1]) if suffixes else None


def file_blocks(path: Path, text_unit: str) -> Iterator[RecordBlock]:
    """The records of a file.

    Args:
        path: file; the suffix determines the format.
        text_unit: unit of a document in a text file, one of ``sources.TEXT_UNITS``.

    Raises:
        DataError: the file is damaged, or a package to read it is missing.
    """
    kind = format_of(path)
    if kind in ("parquet", "arrow"):
        yield from _columnar_blocks(path, kind)
        return
    number = 1
    try:
        with _opened(path) as (raw, text):
            if kind == "json":
                blocks = _json_blocks(path, raw, text)
            elif kind == "csv":
                blocks = _csv_blocks(path, raw, text)
            else:
                blocks = _text_blocks(path, raw, text, text_unit)
            for block in blocks:
                yield block
                number = block.first + len(block.records)
    except (gzip.BadGzipFile, EOFError, zlib.error, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is damaged after line {number - 1}: {error}") from error
    except Exception as error:
        if type(error).__module__.startswith("zstandard"):
            raise DataError(f"{path} is damaged after line {number - 1}: {error}") from error
        raise


@contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """The raw file (for its position) and its decompressed content."""
    with open(path, "rb") as raw:
        if path.suffix == ".gz":
            with gzip.open(raw) as content:
                yield raw, content  # type: ignore[misc]
        elif path.suffix == ".zst":
            try:
                import zstandard
            except ImportError as error:
                raise DataError(f"{path} needs zstandard: pip install 'mindspeed[data]'") from error
            with zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True) as stream:
                yield raw, io.BufferedReader(stream)
        else:
            yield raw, raw


@contextmanager
def _decoded(text: IO[bytes], newline: str | None = None) -> Iterator[IO[str]]:
    """A text view of a binary file, which stays open."""
    wrapper = io.TextIOWrapper(text, "utf-8-sig", newline=newline)  # type: ignore[type-var]
    try:
        yield wrapper
    finally:
        wrapper.detach()


def _json_blocks(path: Path, raw: IO[bytes], text: IO[bytes]) -> Iterator[RecordBlock]:
    """JSON Lines, or the elements of an array if the file begins with ``[``."""
    head = _peek(text)
    if head.startswith(b"["):
        with _decoded(text) as characters:
            yield from record_blocks(str(path), _array(path, characters), raw)
    else:
        yield from _line_blocks(path, raw, text)


def _peek(text: IO[bytes]) -> bytes:
    """The first non-blank characters, without consuming them."""
    start = text.peek(64) if hasattr(text, "peek") else b""
    return start.removeprefix(b"\xef\xbb\xbf").lstrip()


def _line_blocks(path: Path, raw: IO[bytes], text: IO[bytes]) -> Iterator[RecordBlock]:
    line, position = 1, 0
    while lines := text.readlines(BLOCK_BYTES):
        size = raw.tell() - position
        if line == 1:
            lines[0] = lines[0].removeprefix(b"\xef\xbb\xbf")
        yield RecordBlock(str(path), line, lines, size)
        line += len(lines)
        position += size


def _array(path: Path, text: IO[str]) -> Iterator[Any]:
    """Elements of a JSON array, decoded incrementally: the file is never completely in memory."""
    decoder = json.JSONDecoder(parse_int=int_or_text)
    buffer, line, complete = "", 1, False
    allowed = "["  # punctuation that may come next; without any, a record must follow
    while True:
        rest = buffer.lstrip()
        line += buffer[: len(buffer) - len(rest)].count("\n")
        buffer = rest
        if buffer and buffer[0] in allowed:
            if buffer[0] == "]":
                return
            allowed = "]" if buffer[0] == "[" else ""
            buffer = buffer[1:]
            continue
        try:
            if buffer and allowed in ("", "]"):
                record, end = decoder.raw_decode(buffer)
                yield record
                line += buffer[:end].count("\n")
                buffer, allowed = buffer[end:], ",]"
                continue
        except RecursionError as error:
            raise DataError(f"{path}:{line}: a record is nested too deep") from error
        except json.JSONDecodeError as error:
            if complete:
                at = line + buffer[: error.pos].count("\n")
                raise DataError(f"{path}:{at}: invalid JSON: {error.msg}") from error
        if complete:
            found = f"{buffer[:20]!r} where {' or '.join(allowed)} is expected"
            raise DataError(f"{path}:{line}: {found if buffer else 'the array does not end'}")
        chunk = text.read(max(BLOCK_BYTES, len(buffer)))
        complete = not chunk
        buffer += chunk


def _csv_blocks(path: Path, raw: IO[bytes], text: IO[bytes]) -> Iterator[RecordBlock]:
    csv.field_size_limit(1 << 30)
    with _decoded(text, newline="") as characters:
        yield from record_blocks(str(path), iter(csv.DictReader(characters)), raw)


def _text_blocks(path: Path, raw: IO[bytes], text: IO[bytes], unit: str) -> Iterator[RecordBlock]:
    with _decoded(text) as lines:
        if unit == "file":
            documents: Iterator[str] = iter([lines.read()])
        elif unit == "blank":
            documents = _paragraphs(lines)
        else:
            documents = (line.rstrip("\n") for line in lines)
        yield from record_blocks(str(path), ({"text": text} for text in documents), raw)


def _paragraphs(lines: Iterable[str]) -> Iterator[str]:
    """Documents separated by blank lines."""
    document: list[str] = []
    for line in lines:
        if line.strip():
            document.append(line)
        elif document:
            yield "".join(document).rstrip("\r\n")
            document = []
    if document:
        yield "".join(document).rstrip("\r\n")


def _columnar_blocks(path: Path, kind: str) -> Iterator[RecordBlock]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{path} needs pyarrow: pip install 'mindspeed[suite]'") from error
    try:
        if kind == "parquet":
            file = pyarrow.parquet.ParquetFile(path)
            total = file.metadata.num_rows
            batches = file.iter_batches(BLOCK_RECORDS)
        else:
            with pyarrow.memory_map(str(path)) as mapped:
                try:
                    table = pyarrow.ipc.open_stream(mapped).read_all()
                except pyarrow.ArrowInvalid:
                    table = pyarrow.ipc.open_file(mapped).read_all()
            total = table.num_rows
            batches = table.to_batches(BLOCK_RECORDS)
        done = 0
        file_size = path.stat().st_size
        for batch in batches:
            records = batch.to_pylist()
            size = file_size * (done + len(records)) // total - file_size * done // total
            yield RecordBlock(str(path), done + 1, records, size)
            done += len(records)
    except (
        pyarrow.ArrowException,
        OSError,
    ) as error:  # a damaged file raises an OSError without errno
        if isinstance(error, OSError) and error.errno:
            raise
        raise DataError(f"{path} is not a valid {kind} file: {error}") from error


def record_blocks(
    name: str, records: Iterator[Any], raw: IO[bytes] | None = None, size: Any = None
) -> Iterator[RecordBlock]:
    """Records in blocks; a block's size is the advance of ``raw``, or ``size(records)``."""
    first, position = 1, 0
    while batch := list(islice(records, BLOCK_RECORDS)):
        taken = size(batch) if raw is None else raw.tell() - position
        yield RecordBlock(name, first, batch, taken)
        first += len(batch)
        position += taken
