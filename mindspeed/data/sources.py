"""Where records come from: files of every usual format, folders of them, Hugging Face data sets.

    .jsonl .json   one record per line, or one array of records      .txt   documents
    .csv           one record per row, with a header                 .parquet .arrow
    any of them with .gz or .zst behind it

A source is cut into blocks of about a megabyte, always at the same places: blocks are what worker
processes get, what progress is counted in and where an interrupted run continues.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

from mindspeed.errors import DataError
from mindspeed.files import check_path

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
TEXT_UNITS = ("line", "blank", "file")
_NOT_DATA = frozenset(
    {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
)


@dataclass(frozen=True)
class Block:
    """Consecutive records.

    Attributes:
        file: where they come from, for messages.
        first: line or record number of the first one, from 1.
        rows: lines of JSON (bytes), or records.
        size: what they take on disk, compressed or not.
    """

    file: str
    first: int
    rows: list[Any]
    size: int


@dataclass(frozen=True)
class HubDataset:
    """Arguments of ``datasets.load_dataset``."""

    params: tuple[tuple[str, Any], ...]

    def blocks(self) -> Iterator[Block]:
        """Records of one split, read as a stream where the parameters say so."""
        try:
            import datasets
        except ImportError as error:
            raise DataError(
                "--hf-datasets-params needs datasets: pip install 'mindspeed[data]'"
            ) from error
        params = {"split": "train", **dict(self.params)}
        name = str(params.get("path"))
        try:
            rows: Iterable[Any] = datasets.load_dataset(**params)
        except Exception as error:  # whatever the builder of the data set raises
            raise DataError(f"datasets cannot load {name}: {error}") from error
        yield from _record_blocks(name, iter(rows), size=_text_size)


@dataclass(frozen=True)
class Files:
    """Files in the order in which they are read."""

    paths: tuple[Path, ...]
    text_unit: str = "line"
    ignored: int = 0

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(path.stat().st_size for path in self.paths)

    def blocks(self) -> Iterator[Block]:
        """All records of all files."""
        for path in self.paths:
            yield from _file_blocks(path, self.text_unit)


def find_files(inputs: Sequence[Path], text_unit: str = "line") -> Files:
    """The files that ``inputs`` name; of a folder, those of its most frequent format.

    Raises:
        DataError: a path does not exist, or a folder holds nothing readable.
    """
    found: list[Path] = []
    ignored = 0
    for path in inputs:
        if path.is_dir():
            chosen, others = _in_folder(path)
            found += chosen
            ignored += others
        elif path.is_file():
            if format_of(path) is None:
                raise DataError(f"--input {path}: the name must end in {_known()}")
            found.append(path)
        else:
            raise DataError(f"--input {path}: there is no such file or directory")
    return Files(tuple(check_path(path, "input") for path in found), text_unit, ignored)


def hub_dataset(params_file: Path | None, inputs: Sequence[Path], streaming: bool) -> HubDataset:
    """What ``--hf-datasets-params``, ``--streaming`` and ``--input`` describe together.

    Raises:
        DataError: the file is no JSON object; the message shows the line.
    """
    params: dict[str, Any] = {}
    if params_file is not None:
        try:
            text = check_path(params_file, "input").read_text("utf-8")
            params = json.loads(text)
        except FileNotFoundError as error:
            raise DataError(f"--hf-datasets-params {params_file}: there is no such file") from error
        except json.JSONDecodeError as error:
            line = text.splitlines()[error.lineno - 1]
            raise DataError(f"{params_file}:{error.lineno}: {error.msg}: {line.strip()}") from error
        if not isinstance(params, dict):
            raise DataError(f"{params_file}: an object of load_dataset's arguments is expected")
    params.setdefault("path", str(inputs[0]))
    if streaming:
        params["streaming"] = True
    return HubDataset(tuple(params.items()))


def format_of(path: Path) -> str | None:
    """The format a file's name tells, None where it tells none."""
    suffixes = [suffix for suffix in path.suffixes[-2:] if suffix not in COMPRESSIONS]
    return FORMATS.get(suffixes[-1]) if suffixes else None


def _known() -> str:
    return f"{', '.join(FORMATS)}, each also with {' or '.join(COMPRESSIONS)}"


def _in_folder(folder: Path) -> tuple[list[Path], int]:
    if (folder / "dataset_dict.json").is_file() and (folder / "train").is_dir():
        folder = folder / "train"  # written by DatasetDict.save_to_disk
    if (folder / "state.json").is_file():  # written by Dataset.save_to_disk, which numbers files
        state = json.loads((folder / "state.json").read_text("utf-8"))
        return [folder / entry["filename"] for entry in state["_data_files"]], 0
    for candidates in (folder.iterdir(), folder.rglob("*")):
        files = [
            path
            for path in sorted(candidates)
            if path.is_file() and path.name not in _NOT_DATA and not path.name.startswith(".")
        ]
        formats = Counter(kind for path in files if (kind := format_of(path)))
        if formats:
            best = max(formats, key=lambda kind: (formats[kind], kind))
            return [p for p in files if format_of(p) == best], formats.total() - formats[best]
    raise DataError(f"{folder} has no file that ends in {_known()}")


def _file_blocks(path: Path, text_unit: str) -> Iterator[Block]:
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
                number = block.first + len(block.rows)
    except (gzip.BadGzipFile, EOFError, zlib.error, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is damaged after line {number - 1}: {error}") from error
    except Exception as error:
        if type(error).__module__.startswith("zstandard"):
            raise DataError(f"{path} is damaged after line {number - 1}: {error}") from error
        raise


@contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """The file as it is on disk, for its position, and its content."""
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
    """Characters of a file, which stays open."""
    wrapper = io.TextIOWrapper(text, "utf-8-sig", newline=newline)  # type: ignore[type-var]
    try:
        yield wrapper
    finally:
        wrapper.detach()


def _json_blocks(path: Path, raw: IO[bytes], text: IO[bytes]) -> Iterator[Block]:
    """Lines, or the elements of an array, which is what a file that begins with ``[`` holds."""
    head = _peek(text)
    if head.startswith(b"["):
        with _decoded(text) as characters:
            yield from _record_blocks(str(path), _array(path, characters), raw)
    else:
        yield from _line_blocks(path, raw, text)


def _peek(text: IO[bytes]) -> bytes:
    """The first characters that are no blanks, without moving on."""
    start = text.peek(64) if hasattr(text, "peek") else b""
    return start.removeprefix(b"\xef\xbb\xbf").lstrip()


def _line_blocks(path: Path, raw: IO[bytes], text: IO[bytes]) -> Iterator[Block]:
    line, position = 1, 0
    while lines := text.readlines(BLOCK_BYTES):
        size = raw.tell() - position
        if line == 1:
            lines[0] = lines[0].removeprefix(b"\xef\xbb\xbf")
        yield Block(str(path), line, lines, size)
        line += len(lines)
        position += size


def _array(path: Path, text: IO[str]) -> Iterator[Any]:
    """Elements of a JSON array, one after another; the file is never in memory as a whole."""
    decoder = json.JSONDecoder()
    buffer, line, complete = "", 1, False
    may_follow = "["  # of the signs; otherwise a record is expected
    while True:
        rest = buffer.lstrip()
        line += buffer[: len(buffer) - len(rest)].count("\n")
        buffer = rest
        if buffer and buffer[0] in may_follow:
            if buffer[0] == "]":
                return
            may_follow = "]" if buffer[0] == "[" else ""
            buffer = buffer[1:]
            continue
        try:
            if buffer and may_follow in ("", "]"):
                record, end = decoder.raw_decode(buffer)
                yield record
                line += buffer[:end].count("\n")
                buffer, may_follow = buffer[end:], ",]"
                continue
        except json.JSONDecodeError as error:
            if complete:
                at = line + buffer[: error.pos].count("\n")
                raise DataError(f"{path}:{at}: invalid JSON: {error.msg}") from error
        if complete:
            found = f"{buffer[:20]!r} where {' or '.join(may_follow)} is expected"
            raise DataError(f"{path}:{line}: {found if buffer else 'the array does not end'}")
        piece = text.read(max(BLOCK_BYTES, len(buffer)))
        complete = not piece
        buffer += piece


def _csv_blocks(path: Path, raw: IO[bytes], text: IO[bytes]) -> Iterator[Block]:
    csv.field_size_limit(1 << 30)
    with _decoded(text, newline="") as characters:
        yield from _record_blocks(str(path), iter(csv.DictReader(characters)), raw)


def _text_blocks(path: Path, raw: IO[bytes], text: IO[bytes], unit: str) -> Iterator[Block]:
    with _decoded(text) as lines:
        if unit == "file":
            documents: Iterator[str] = iter([lines.read()])
        elif unit == "blank":
            documents = _paragraphs(lines)
        else:
            documents = (line.rstrip("\n") for line in lines)
        yield from _record_blocks(str(path), ({"text": text} for text in documents), raw)


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


def _columnar_blocks(path: Path, kind: str) -> Iterator[Block]:
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
        whole = path.stat().st_size
        for batch in batches:
            rows = batch.to_pylist()
            size = whole * (done + len(rows)) // total - whole * done // total
            yield Block(str(path), done + 1, rows, size)
            done += len(rows)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} is no valid {kind} file: {error}") from error


def _text_size(rows: list[Any]) -> int:
    return sum(len(str(row)) for row in rows)


def _record_blocks(
    name: str, records: Iterator[Any], raw: IO[bytes] | None = None, size: Any = None
) -> Iterator[Block]:
    first, position = 1, 0
    while rows := list(islice(records, BLOCK_RECORDS)):
        taken = size(rows) if raw is None else raw.tell() - position
        yield Block(name, first, rows, taken)
        first += len(rows)
        position += taken
