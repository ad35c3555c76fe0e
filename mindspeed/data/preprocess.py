"""Preprocessing: files of records -> Megatron's indexed data sets (``.bin`` and ``.idx``).

    {"text": "..."}  --tokenizer-->  PREFIX_text_document.bin   all ids, concatenated
    (N records)                      PREFIX_text_document.idx   the length of every document

Handlers for conversations write three aligned data sets, one document per conversation:

    PREFIX_packed_input_ids_document        ids
    PREFIX_packed_attention_mask_document   ones
    PREFIX_packed_labels_document           the id where it is trained, else -100

The parent reads blocks of records (:mod:`~.sources`), worker processes parse and tokenize them
(:mod:`~.record_encoders`), and the parent writes the results in input order
(:mod:`~.indexed_writer`): the output is byte-identical for any number of workers. It gets its final
name only when complete; ``resume`` continues an interrupted run. Invalid records are counted and
the first few are reported, or stop the run with ``strict``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from mindspeed import __version__
from mindspeed.data import handlers
from mindspeed.data.file_formats import RecordBlock
from mindspeed.data.indexed_writer import IndexedWriter
from mindspeed.data.preference_encoder import PreferenceEncoder
from mindspeed.data.preprocess_options import PreprocessOptions, check
from mindspeed.data.record_encoders import (
    BrokenLine,
    ConversationEncoder,
    Encoded,
    TextEncoder,
    load_template,
)
from mindspeed.data.sources import Files, HubDataset, find_files, hub_dataset
from mindspeed.data.tokenizer import build_tokenizer
from mindspeed.errors import DataError, MindSpeedError

BLOCKS_IN_FLIGHT_PER_WORKER = 4
REPORTED_BROKEN_LINES = 5
REPORTED_REMARKS = 50
CHECKPOINT_SECONDS = 20.0  # between the points from which an interrupted run can continue


@dataclass
class Progress:
    """Running totals; the callback receives the same object every time."""

    bytes_total: int
    bytes_done: int = 0
    documents: int = 0
    empty: int = 0
    broken: int = 0
    tokens: int = 0
    trained: int = 0
    shortened: int = 0
    lost: int = 0
    untrained: int = 0
    blocks: int = 0
    seconds: float = 0.0
    first_broken: list[BrokenLine] = field(default_factory=list)
    remarks: dict[str, int] = field(default_factory=dict)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Progress:
        """The inverse of ``dataclasses.asdict``."""
        broken = [BrokenLine(**line) for line in values["first_broken"]]
        return cls(**{**values, "first_broken": broken})


@dataclass(frozen=True)
class PreprocessReport:
    """Result of a run."""

    outputs: tuple[Path, ...]
    vocab_size: int
    totals: Progress
    notes: tuple[str, ...] = ()


def preprocess(
    options: PreprocessOptions, progress: Callable[[Progress], None] | None = None
) -> PreprocessReport:
    """Tokenize the input into one indexed data set per key.

    Args:
        options: Input, tokenization and output.
        progress: Called after every block of about a megabyte.

    Raises:
        ConfigError: An option is invalid or the output already exists.
        DataError: Missing input, no valid document, or an invalid record under ``strict``.
    """
    check(options)
    source = _source(options)
    encoder = make_encoder(options)
    writer = IndexedWriter(
        [options.output(key) for key in options.keys],
        encoder.dtype,
        options.state,
        _fingerprint(options, source),
        options.resume,
    )
    keep = False
    try:
        totals = Progress(bytes_total=source.size if isinstance(source, Files) else 0)
        if writer.state is not None:
            totals = Progress.from_json(writer.state["progress"])
        if not writer.complete:
            _encode_into(writer, totals, source, options, encoder, progress)
            if not totals.documents:
                raise DataError(_no_documents(options, totals))
        keep = True
        writer.commit(dataclasses.asdict(totals))
        keep = False
    except MindSpeedError:
        raise
    except BaseException:
        keep = keep or options.resume
        raise
    finally:
        writer.close(keep)
    return PreprocessReport(
        tuple(options.output(key) for key in options.keys),
        encoder.tokenizer.vocab_size,
        totals,
        tuple(_notes(options, source, encoder)),
    )


def make_encoder(options: PreprocessOptions) -> TextEncoder | ConversationEncoder:
    """The encoder of the records of a handler."""
    tokenizer = build_tokenizer(options.tokenizer)
    handler = handlers.find(options.handler)
    if handler.preferences is not None:
        return PreferenceEncoder(options, tokenizer)
    if handler.conversations is not None:
        return ConversationEncoder(options, tokenizer)
    return TextEncoder(options, tokenizer)


def _encode_into(
    writer: IndexedWriter,
    totals: Progress,
    source: Files | HubDataset,
    options: PreprocessOptions,
    encoder: TextEncoder | ConversationEncoder,
    progress: Callable[[Progress], None] | None,
) -> None:
    blocks = _first_records(source.blocks(), options.max_samples)
    before = totals.seconds
    started = checkpointed = time.monotonic()
    for encoded in _encode_all(islice(blocks, totals.blocks, None), options, encoder):
        parts = zip(encoded.tokens, encoded.lengths, encoded.documents, strict=True)
        for index, part in enumerate(parts):
            writer.add(index, *part)
        _count(totals, encoded, options.strict)
        now = time.monotonic()
        totals.seconds = before + now - started
        if now - checkpointed >= CHECKPOINT_SECONDS:
            writer.checkpoint(dataclasses.asdict(totals))
            checkpointed = now
        if progress is not None:
            progress(totals)


def _source(options: PreprocessOptions) -> Files | HubDataset:
    if options.hf_datasets_params is not None or options.streaming:
        return hub_dataset(options.hf_datasets_params, options.inputs, options.streaming)
    return find_files(options.inputs, options.text_unit)


def _first_records(blocks: Iterable[RecordBlock], limit: int | None) -> Iterator[RecordBlock]:
    if limit is None:
        yield from blocks
        return
    for block in blocks:
        if limit <= 0:
            return
        yield dataclasses.replace(block, records=block.records[:limit])
        limit -= len(block.records)


def _encode_all(
    blocks: Iterable[RecordBlock],
    options: PreprocessOptions,
    encoder: TextEncoder | ConversationEncoder,
) -> Iterator[Encoded]:
    if options.workers == 1:
        yield from map(encoder, blocks)
        return
    pool = ProcessPoolExecutor(
        options.workers,
        # A forked child of a process with threads may hang; a spawned one starts clean.
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(options,),
    )
    with pool:
        waiting: deque[Future[Encoded]] = deque()
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


_worker_encoder: TextEncoder | ConversationEncoder  # set once in every worker process


def _start_worker(options: PreprocessOptions) -> None:
    global _worker_encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops its workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker_encoder = make_encoder(options)


def _encode_in_worker(block: RecordBlock) -> Encoded:
    return _worker_encoder(block)


def _count(totals: Progress, encoded: Encoded, strict: bool) -> None:
    counts = encoded.counts
    if strict and counts.broken:
        raise DataError(f"{counts.broken[0]} (--strict stops at the first broken line)")
    names = ("documents", "empty", "tokens", "trained", "shortened", "lost", "untrained")
    for name in names:
        setattr(totals, name, getattr(totals, name) + getattr(counts, name))
    totals.bytes_done += encoded.size
    totals.blocks += 1
    totals.broken += len(counts.broken)
    for remark, count in counts.remarks.items():
        known = remark in totals.remarks or len(totals.remarks) < REPORTED_REMARKS
        key = remark if known else "other columns and keys are not used"
        totals.remarks[key] = totals.remarks.get(key, 0) + count
    room = REPORTED_BROKEN_LINES - len(totals.first_broken)
    totals.first_broken += counts.broken[:room]


RENDERING = 2
"""To be raised when the same record gives other tokens: what is cached is then made again."""


def digest_of(options: PreprocessOptions) -> str:
    """Digest of the input files, the tokenizer and the options, but of the output's name."""
    return _fingerprint(options, _source(options))


def _fingerprint(options: PreprocessOptions, source: Files | HubDataset) -> str:
    """Digest of everything that determines the output."""
    ignored = ("workers", "resume", "overwrite", "strict", "tokenizer", "output_prefix")
    values = {
        item.name: getattr(options, item.name)
        for item in dataclasses.fields(options)
        if item.name not in ignored
    }
    files = list(source.paths) if isinstance(source, Files) else []
    model = Path(options.tokenizer.tokenizer_model or ".")
    if options.tokenizer.tokenizer_model is not None:
        files += sorted(p for p in model.iterdir() if p.is_file()) if model.is_dir() else [model]
    values["tokenizer"] = dataclasses.asdict(options.tokenizer)
    values["version"] = __version__, RENDERING
    values["files"] = [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    return hashlib.sha256(json.dumps(values, default=str, sort_keys=True).encode()).hexdigest()


def _no_documents(options: PreprocessOptions, totals: Progress) -> str:
    inputs = options.inputs
    names = ", ".join(map(str, inputs[:3])) + (", ..." if len(inputs) > 3 else "")
    first = f"; the first is {totals.first_broken[0]}" if totals.first_broken else ""
    counts = f"{totals.empty} empty and {totals.broken} broken lines"
    if totals.untrained:
        counts += f", {totals.untrained} samples without a label"
    return f"no valid document in {names}: {counts}{first}"


def _notes(
    options: PreprocessOptions,
    source: Files | HubDataset,
    encoder: TextEncoder | ConversationEncoder,
) -> Iterator[str]:
    """Notes for the user about a successful run."""
    if isinstance(source, Files) and source.ignored:
        yield f"{source.ignored} files of other formats or splits in the input folder were ignored"
    if not isinstance(encoder, ConversationEncoder):
        return
    template = load_template(options, encoder.tokenizer)
    if isinstance(encoder, PreferenceEncoder):
        trained = "the answers that are compared"
    elif options.train_on_inputs:
        trained = "every token"
    elif options.label_boundary == "legacy" or options.train_on == "last":
        trained = "the last answer of every conversation"
    else:
        trained = "every answer"
    yield f"chat template {template.name}; the loss covers {trained}"
    unknown = [text for text in template.special if encoder.tokenizer.token_id(text) is None]
    if unknown:
        yield (
            f"the tokenizer has no token {', '.join(unknown)}: these marks of template "
            f"{template.name} are tokenized as ordinary text; choose the model's template with "
            "--prompt-type"
        )
