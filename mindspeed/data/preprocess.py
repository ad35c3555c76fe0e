"""Text to tokens: jsonl files become Megatron's indexed data sets (``.bin`` and ``.idx``).

    {"text": "..."}  --tokenizer-->  PREFIX_text_document.bin   all ids, one after another
    (N lines)                        PREFIX_text_document.idx   the length of every document

The parent reads blocks of whole lines, worker processes parse and tokenize them, and the parent
writes the results in the order of the input through ``IndexedDatasetBuilder`` of megatron.core:
the output is byte-identical for any number of workers and readable by everything that reads
Megatron data. It appears under its final name only when complete, ``.idx`` last; a run that was
interrupted is simply started again. Lines that cannot be used are counted and the first few are
named, or stop the run with ``strict``.
"""

from __future__ import annotations

import fcntl
import gzip
import json
import multiprocessing
import os
import time
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import IO

import numpy as np

from mindspeed.data.tokenizer import TextTokenizer, TokenizerOptions, build_tokenizer
from mindspeed.errors import ConfigError, DataError
from mindspeed.files import check_path, make_dirs, secure_open

BLOCK_BYTES = 1 << 20
BLOCKS_IN_FLIGHT_PER_WORKER = 4
NAMED_BROKEN_LINES = 5
INPUT_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz")


@dataclass(frozen=True)
class PreprocessOptions:
    """What to read, how to tokenize it and where to write it."""

    inputs: tuple[Path, ...]
    output_prefix: Path
    tokenizer: TokenizerOptions
    json_keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    workers: int = 1
    strict: bool = False
    overwrite: bool = False

    def output(self, key: str) -> Path:
        """Path of the data set of one key, without ``.bin`` or ``.idx``."""
        return self.output_prefix.with_name(f"{self.output_prefix.name}_{key}_document")


@dataclass(frozen=True)
class BrokenLine:
    """A line that could not be used."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


@dataclass
class Progress:
    """Running totals; the same object is handed to the callback again and again."""

    bytes_total: int
    bytes_done: int = 0
    documents: int = 0
    empty: int = 0
    broken: int = 0
    tokens: int = 0
    seconds: float = 0.0
    first_broken: list[BrokenLine] = field(default_factory=list)


@dataclass(frozen=True)
class PreprocessReport:
    """What was written."""

    outputs: tuple[Path, ...]
    vocab_size: int
    totals: Progress


@dataclass(frozen=True)
class _Block:
    """Whole lines of one file; ``size`` is what they take on disk, compressed or not."""

    file: str
    first_line: int
    lines: list[bytes]
    size: int


@dataclass(frozen=True)
class _Encoded:
    """A tokenized block: per key, all ids in one array and the length of each document."""

    tokens: dict[str, np.ndarray]
    lengths: dict[str, list[int]]
    documents: int
    empty: int
    broken: list[BrokenLine]
    size: int


def preprocess(
    options: PreprocessOptions, progress: Callable[[Progress], None] | None = None
) -> PreprocessReport:
    """Tokenize the input files into one indexed data set per JSON key.

    Args:
        options: What to do.
        progress: Called after every block of about a megabyte.

    Raises:
        ConfigError: An option is wrong or the output exists already.
        DataError: Missing input, no usable document, or a broken line under ``strict``.
    """
    files = _input_files(options)
    _check(options)
    tokenizer = build_tokenizer(options.tokenizer)
    totals = Progress(bytes_total=sum(file.stat().st_size for file in files))
    encoder = _Encoder(tokenizer, options.json_keys, options.append_eod)
    with ExitStack() as stack:
        sinks = {
            key: stack.enter_context(_Sink(options.output(key), encoder.dtype))
            for key in options.json_keys
        }
        started = time.monotonic()
        for encoded in _encode_all(files, options, encoder):
            for key, sink in sinks.items():
                sink.add(encoded.tokens[key], encoded.lengths[key])
            _count(totals, encoded, options.strict)
            totals.seconds = time.monotonic() - started
            if progress is not None:
                progress(totals)
        if not totals.documents:
            raise DataError(_nothing_usable(files, totals))
        for sink in sinks.values():
            sink.commit()
    outputs = tuple(options.output(key) for key in options.json_keys)
    return PreprocessReport(outputs, tokenizer.vocab_size, totals)


class _Encoder:
    """Turns a block of lines into token arrays; one per process."""

    def __init__(self, tokenizer: TextTokenizer, keys: Sequence[str], append_eod: bool) -> None:
        self._tokenizer = tokenizer
        self._keys = tuple(keys)
        self._tail = [tokenizer.eod] if append_eod else []
        # The rule of DType.optimal_dtype, without importing megatron.core into every worker.
        self.dtype: type[np.generic] = np.uint16 if tokenizer.vocab_size < 65500 else np.int32

    def __call__(self, block: _Block) -> _Encoded:
        rows: list[list[str]] = []
        broken: list[BrokenLine] = []
        for number, line in enumerate(block.lines, start=block.first_line):
            if line.strip():
                try:
                    rows.append(self._texts(line))
                except ValueError as error:
                    broken.append(BrokenLine(block.file, number, str(error)))
        tokens, lengths = {}, {}
        filled = [False] * len(rows)
        for index, key in enumerate(self._keys):
            encoded = self._tokenizer.tokenize_batch([row[index] for row in rows])
            filled = [before or bool(ids) for before, ids in zip(filled, encoded, strict=True)]
            documents = [ids + self._tail for ids in encoded if ids]
            lengths[key] = [len(ids) for ids in documents]
            tokens[key] = np.fromiter(chain.from_iterable(documents), self.dtype, sum(lengths[key]))
        documents_found = sum(filled)
        empty = len(rows) - documents_found
        return _Encoded(tokens, lengths, documents_found, empty, broken, block.size)

    def _texts(self, line: bytes) -> list[str]:
        """The text of every key; ValueError says what is wrong with the line."""
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"invalid JSON: {error.msg} (column {error.colno})") from error
        if not isinstance(record, dict):
            raise ValueError(f"a JSON object is expected, found {type(record).__name__}")
        for key in self._keys:
            if key not in record:
                raise ValueError(f"no key {key!r}; the line has {', '.join(map(repr, record))}")
            if not isinstance(record[key], str):
                raise ValueError(f"{key!r} is {type(record[key]).__name__}, a string is expected")
            try:
                record[key].encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"{key!r} is no valid Unicode: {error.reason}") from error
        return [record[key] for key in self._keys]


class _Sink:
    """One ``.bin``/``.idx`` pair that gets its name in :meth:`commit` and not before."""

    def __init__(self, prefix: Path, dtype: type[np.generic]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about training packages that play no role here
            from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        self._final = {end: prefix.with_name(prefix.name + end) for end in (".bin", ".idx")}
        self._temporary = {
            end: path.with_name(f".{path.name}.tmp") for end, path in self._final.items()
        }
        make_dirs(prefix.parent)
        # The builder opens files by name; ours are made first, private and locked by this process.
        self._files = {end: secure_open(path, "ab") for end, path in self._temporary.items()}
        try:
            fcntl.flock(self._files[".bin"], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            for file in self._files.values():
                file.close()
            raise DataError(f"another process is writing {prefix} at this moment") from error
        self._builder = IndexedDatasetBuilder(str(self._temporary[".bin"]), dtype=dtype)

    def __enter__(self) -> _Sink:
        return self

    def __exit__(self, *exception: object) -> None:
        self._builder.data_file.close()
        for end, file in self._files.items():
            self._temporary[end].unlink(missing_ok=True)
            file.close()

    def add(self, tokens: np.ndarray, lengths: Sequence[int]) -> None:
        start = 0
        for length in lengths:
            self._builder.add_document(tokens[start : start + length], [length])
            start += length

    def commit(self) -> None:
        self._builder.finalize(str(self._temporary[".idx"]))
        for file in self._files.values():
            os.fsync(file.fileno())
        self._final[".idx"].unlink(missing_ok=True)  # never an old index beside new data
        for end in (".bin", ".idx"):
            os.replace(self._temporary[end], self._final[end])


def _encode_all(
    files: Sequence[Path], options: PreprocessOptions, encoder: _Encoder
) -> Iterator[_Encoded]:
    blocks = (block for file in files for block in _blocks(file))
    if options.workers == 1:
        yield from map(encoder, blocks)
        return
    pool = ProcessPoolExecutor(
        options.workers,
        # A forked child of a process with threads may hang; a spawned one starts clean.
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(options.tokenizer, options.json_keys, options.append_eod),
    )
    with pool:
        waiting: deque[Future[_Encoded]] = deque()
        try:
            for block in blocks:
                waiting.append(pool.submit(_encode_in_worker, block))
                if len(waiting) >= options.workers * BLOCKS_IN_FLIGHT_PER_WORKER:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise DataError(
                "a worker process died, often because memory ran out; lower --workers "
                f"(now {options.workers})"
            ) from error
        finally:
            for future in waiting:
                future.cancel()


_worker_encoder: _Encoder  # set once in every worker process, never in the parent


def _start_worker(tokenizer: TokenizerOptions, keys: Sequence[str], append_eod: bool) -> None:
    global _worker_encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker_encoder = _Encoder(build_tokenizer(tokenizer), keys, append_eod)


def _encode_in_worker(block: _Block) -> _Encoded:
    return _worker_encoder(block)


def _blocks(path: Path) -> Iterator[_Block]:
    """Cut a file into blocks of whole lines, each with its share of the file's size on disk."""
    line, position = 1, 0
    with open(path, "rb") as raw, gzip.open(raw) as unpacked:
        text: IO[bytes] = unpacked if path.suffix == ".gz" else raw  # type: ignore[assignment]
        try:
            while lines := text.readlines(BLOCK_BYTES):
                size = raw.tell() - position
                yield _Block(str(path), line, lines, size)
                line += len(lines)
                position += size
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(f"{path} is damaged after line {line - 1}: {error}") from error


def _count(totals: Progress, encoded: _Encoded, strict: bool) -> None:
    if strict and encoded.broken:
        raise DataError(f"{encoded.broken[0]} (--strict stops at the first broken line)")
    totals.bytes_done += encoded.size
    totals.documents += encoded.documents
    totals.empty += encoded.empty
    totals.broken += len(encoded.broken)
    totals.tokens += sum(map(len, encoded.tokens.values()))
    room = NAMED_BROKEN_LINES - len(totals.first_broken)
    totals.first_broken += encoded.broken[:room]


def _input_files(options: PreprocessOptions) -> list[Path]:
    files: list[Path] = []
    for path in options.inputs:
        if path.is_dir():
            found = sorted(p for p in path.iterdir() if p.name.endswith(INPUT_SUFFIXES))
            if not found:
                raise DataError(f"{path} has no file that ends in {', '.join(INPUT_SUFFIXES)}")
            files += found
        elif path.is_file():
            files.append(path)
        else:
            raise DataError(f"--input {path}: there is no such file or directory")
    return [check_path(file, "input") for file in files]


def _check(options: PreprocessOptions) -> None:
    if options.workers < 1:
        raise ConfigError(f"--workers {options.workers}: at least 1 is needed")
    if len(set(options.json_keys)) != len(options.json_keys) or not options.json_keys:
        raise ConfigError(f"--json-keys {' '.join(options.json_keys)}: name every key once")
    if options.overwrite:
        return
    for key in options.json_keys:
        index = options.output(key).with_name(options.output(key).name + ".idx")
        if index.exists():
            raise ConfigError(f"{index} exists already; replace it with --overwrite")


def _nothing_usable(files: Sequence[Path], totals: Progress) -> str:
    names = ", ".join(map(str, files[:3])) + (", ..." if len(files) > 3 else "")
    first = f"; the first is {totals.first_broken[0]}" if totals.first_broken else ""
    counts = f"{totals.empty} empty and {totals.broken} broken lines"
    return f"no usable document in {names}: {counts}{first}"
