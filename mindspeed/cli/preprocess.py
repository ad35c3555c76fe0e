"""``mindspeed preprocess``: texts and conversations to Megatron's ``.bin``/``.idx``.

    mindspeed preprocess --input corpus.jsonl --tokenizer-model tok/ --append-eod \\
        --output-prefix data/corpus --workers 4

writes ``data/corpus_text_document.bin`` and ``.idx``, ready for ``--data-path
data/corpus_text_document``. ``--input python-docs`` needs no file at all: it is the
documentation that comes with Python. With ``--handler-name GeneralInstructionHandler`` and the like
it writes conversations with the labels of their answers, ready for ``--data-path data/corpus
--is-instruction-dataset``.
"""

from __future__ import annotations

import argparse
import glob
from pathlib import Path

from rich.console import Console

from mindspeed.data import preprocess as data
from mindspeed.data import quickstart_corpus
from mindspeed.data.file_formats import COMPRESSIONS, FORMATS
from mindspeed.data.handlers import HANDLERS
from mindspeed.data.preprocess_report import (
    LOG_INTERVAL_SECONDS,
    preprocess_with_bar,
    print_report,
    say,
)
from mindspeed.data.sources import TEXT_UNITS
from mindspeed.data.tokenizer import add_tokenizer_arguments
from mindspeed.data.tokenizer_types import TokenizerOptions
from mindspeed.parsing import parse_object
from mindspeed.ranges import MAX_SIZE, whole

HELP = "tokenize texts and conversations into Megatron's data sets"
_PADDED = "the trainer pads the vocabulary"
# Accepted for old scripts -> why it has no effect.
_IGNORED = {
    "--partitions": "all workers share all files and write one output in the order of the input",
    "--log-interval": f"progress is a bar, or a line every {LOG_INTERVAL_SECONDS:.0f} seconds",
    "--make-vocab-size-divisible-by": _PADDED,
    "--pad-vocab-size-to": _PADDED,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _input_arguments(parser.add_argument_group("input"))
    _conversation_arguments(parser.add_argument_group("conversations (with --handler-name)"))
    _output_arguments(parser.add_argument_group("output"))
    add_tokenizer_arguments(parser)


def _input_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help=f"files ({' '.join(FORMATS)}, also with {' or '.join(COMPRESSIONS)}), folders of them "
        "or of a Hugging Face data set, patterns such as 'part-*.jsonl'; 'python-docs' is the "
        "documentation of the running Python",
    )
    add(
        "--datasets",
        nargs="+",
        default=[],
        metavar="PATH",
        help="additional inputs, read after --input into the same output",
    )
    add(
        "--json-keys",
        "--json-key",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="columns to tokenize, one data set each (default: text)",
    )
    add(
        "--handler-name",
        default="",
        metavar="NAME",
        help=f"format of the records: {', '.join(HANDLERS)} (default: the first)",
    )
    add(
        "--map-keys",
        default="{}",
        metavar="JSON",
        help="column names for the handler, such as "
        """'{"prompt": "question", "response": "answer"}'""",
    )
    add(
        "--hf-datasets-params",
        type=Path,
        metavar="FILE",
        help="JSON file with arguments of datasets.load_dataset (path, name, split, ...)",
    )
    add("--streaming", action="store_true", help="stream --input with the datasets package")
    add(
        "--txt-document",
        choices=TEXT_UNITS,
        default="line",
        help="one document of a .txt file: a line, a block between blank lines, or the file",
    )
    add(
        "--split-sentences",
        action="store_true",
        help="write one sequence per sentence; the output is PREFIX_KEY_sentence",
    )
    add("--keep-newlines", action="store_true", help="keep the whitespace after each sentence")
    add("--max-samples", type=whole(1), metavar="N", help="read at most N records")
    add(
        "--strict",
        action="store_true",
        help="stop at the first invalid record instead of skipping it",
    )


def _conversation_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--prompt-type",
        metavar="NAME",
        help="chat template: alpaca, llama2, llama3, chatml, qwen, mistral, baichuan2, deepseek, "
        "hf (the tokenizer's template), or a .yaml or .jinja file (default: the handler's)",
    )
    add(
        "--chat-template-kwargs",
        default="{}",
        metavar="JSON",
        help="variables of the tokenizer's template, such as '{\"enable_thinking\": false}'",
    )
    add(
        "--train-on",
        choices=("all", "last"),
        default="all",
        help="which answers of a conversation are trained",
    )
    add("--train-on-inputs", action="store_true", help="also train the prompts")
    add(
        "--label-boundary",
        choices=("exact", "legacy"),
        default="exact",
        help="exact: from the character offsets of the answers; legacy: from the length of the "
        "separately tokenized prompt, as in the original",
    )
    add(
        "--seq-length",
        type=whole(1, MAX_SIZE),
        metavar="N",
        help="truncate longer conversations: oldest turns first, then the start of the prompt",
    )


def _output_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--output-prefix",
        type=Path,
        required=True,
        metavar="PREFIX",
        help="data sets are written to PREFIX_KEY_document.bin and .idx",
    )
    add("--append-eod", action="store_true", help="end every document with the end-of-text token")
    add("--workers", type=whole(1, 1024), default=1, help="worker processes")
    add(
        "--keep-sequential-samples", action="store_true", help="always on; accepted for old scripts"
    )
    add("--overwrite", action="store_true", help="replace existing output")
    add("--resume", action="store_true", help="continue an interrupted run with the same options")
    add("--dataset-impl", choices=("mmap",), default="mmap", help="file format")
    for flag, why in _IGNORED.items():
        add(flag, type=whole(0), help=f"accepted for old scripts: {why}")


def run(args: argparse.Namespace) -> int:
    """Preprocess and print what came out."""
    console = Console(stderr=True)
    for flag, why in _IGNORED.items():
        value = getattr(args, flag.strip("-").replace("-", "_"))
        if value is not None:
            say(console, f"{flag} {value} has no effect: {why}", "yellow")
    names = [*args.input, *args.datasets]
    options = data.PreprocessOptions(
        inputs=tuple(path for name in names for path in _inputs(name, args.output_prefix)),
        output_prefix=args.output_prefix,
        tokenizer=TokenizerOptions.from_args(args),
        json_keys=tuple(args.json_keys),
        append_eod=args.append_eod,
        workers=args.workers,
        strict=args.strict,
        overwrite=args.overwrite,
        handler=args.handler_name,
        map_keys=parse_object(args.map_keys, "--map-keys"),
        prompt_type=args.prompt_type,
        template_variables=parse_object(args.chat_template_kwargs, "--chat-template-kwargs"),
        train_on=args.train_on,
        train_on_inputs=args.train_on_inputs,
        label_boundary=args.label_boundary,
        seq_length=args.seq_length,
        max_samples=args.max_samples,
        resume=args.resume,
        hf_datasets_params=args.hf_datasets_params,
        streaming=args.streaming,
        text_unit=args.txt_document,
        split_sentences=args.split_sentences,
        keep_newlines=args.keep_newlines,
    )
    print_report(preprocess_with_bar(options, console), console)
    return 0


def _inputs(name: str, output_prefix: Path) -> list[Path]:
    """The files of an input name; ``python-docs`` is first written next to the output."""
    path = Path(name)
    if path.exists():
        return [path]
    if name == quickstart_corpus.SOURCE_NAME:
        return [quickstart_corpus.write_python_docs(output_prefix.with_name(f"{name}.jsonl")).path]
    return sorted(map(Path, glob.glob(name))) or [path]  # a missing file is refused later, by name
