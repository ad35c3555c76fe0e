"""``mindspeed data show``: what a model is trained on, before it is.

    mindspeed data show chat.jsonl --tokenizer-model models/qwen3-8b --seq-length 4096

prints samples as the model sees them, with the trained tokens in colour, and how many samples are
truncated and how full sequences become at a length. A file of conversations is tokenized as
``finetune --data`` does it; the prefix of a data set of ``mindspeed preprocess`` works, too.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from mindspeed.data.handlers import HANDLERS
from mindspeed.data.tokenizer import add_tokenizer_arguments
from mindspeed.ranges import MAX_SIZE, whole

if TYPE_CHECKING:
    import numpy as np

HELP = "show samples of a data set with their trained tokens, and figures of lengths"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("action", choices=("show",), help="what to do")
    add("source", metavar="FILE", help="file of conversations, or prefix of a data set of them")
    add("--count", type=whole(1, 1000), default=3, help="samples to show (default: 3)")
    add("--first", type=whole(1), default=1, help="number of the first one (default: 1)")
    add(
        "--seq-length",
        type=whole(2, MAX_SIZE),
        default=4096,
        help="length of the figures (default: 4096)",
    )
    group = parser.add_argument_group("records of a file")
    group.add_argument(
        "--handler-name",
        default="",
        choices=(
            "",
            *(name for name, one in HANDLERS.items() if one.conversations or one.preferences),
        ),
        metavar="NAME",
        help="format (default: found by the columns)",
    )
    group.add_argument(
        "--map-keys", default="{}", metavar="JSON", help="column names of the format"
    )
    group.add_argument("--prompt-type", metavar="NAME", help="chat template")
    group.add_argument(
        "--chat-template-kwargs", default="{}", metavar="JSON", help="variables of the template"
    )
    group.add_argument("--train-on", choices=("all", "last"), default="all", help="trained answers")
    group.add_argument("--data-cache-path", metavar="DIR", help="where tokens are kept")
    add_tokenizer_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Show samples and figures."""
    import mindspeed.megatron_adaptor  # noqa: F401  (before anything of Megatron)
    from mindspeed.data.instruction_dataset import InstructionFiles, part_prefixes
    from mindspeed.data.preference_dataset import PARTS, values_prefix
    from mindspeed.data.preprocess_report import print_samples
    from mindspeed.data.tokenizer import build_tokenizer
    from mindspeed.data.tokenizer_types import TokenizerOptions
    from mindspeed.training.raw_data import tokenize_file

    console = Console()
    tokenizer = build_tokenizer(TokenizerOptions.from_args(args))
    prefix = args.source
    if not Path(f"{part_prefixes(prefix)[0]}.idx").exists():
        whole_samples = argparse.Namespace(
            **vars(args)
            | {"is_instruction_dataset": True, "seq_length": MAX_SIZE}
            | _objective(args)
        )
        prefix = tokenize_file(whole_samples, Path(args.source), "data show", console)
    files = InstructionFiles(prefix)
    parts = PARTS if Path(f"{values_prefix(prefix)}.idx").exists() else ()
    each = max(1, len(parts))
    first, last = (each * (args.first - 1), each * (args.first - 1 + args.count))
    samples = [files[index] for index in range(first, min(last, len(files)))]
    print_samples(samples, tokenizer, console, args.first, parts)
    lengths = files.lengths
    if parts:  # a pair is packed as a whole
        lengths = lengths.reshape(-1, each).sum(axis=1) - each + 1
    for line in _figures(lengths, args.seq_length):
        console.print(line, highlight=False, soft_wrap=True)
    return 0


def _objective(args: argparse.Namespace) -> dict[str, str]:
    """What records of a file are for, by the handler or the columns of the first one."""
    from mindspeed.data.record_encoders import first_record
    from mindspeed.data.sources import find_files

    record = first_record(find_files([Path(args.source)], flag="data show").blocks()) or {}
    judged = {"completion", "label"} <= record.keys()
    handler = args.handler_name
    if handler:
        judged = handler.startswith("Unpaired")
    pairs = {"chosen", "rejected"} <= record.keys() or "preferred_output" in record
    if HANDLERS[handler].preferences if handler else pairs or judged:
        return {"objective": "preference", "loss_type": "kto" if judged else "sigmoid"}
    return {"objective": "next_token"}


def _figures(lengths: np.ndarray, limit: int) -> list[str]:
    """Lengths of samples, what a limit truncates, and how full packed sequences are.

    Args:
        lengths: tokens of each sample, int ``[samples]``.
        limit: ``--seq-length``.
    """
    import numpy as np

    from mindspeed.data import packing

    quantiles = np.percentile(lengths, (50, 90, 99)).round().astype(int)
    inputs = lengths - 1  # the last token is only predicted
    clipped = np.minimum(inputs[inputs > 0], limit)
    packed = packing.count(clipped, limit)
    long = inputs > limit
    lost = int((inputs[long] - limit).sum())
    return [
        f"{len(lengths):,} samples, {int(lengths.sum()):,} tokens; half of them have at most "
        f"{quantiles[0]:,} tokens, 90 % {quantiles[1]:,}, 99 % {quantiles[2]:,}, the longest "
        f"{int(lengths.max()):,}",
        f"--seq-length {limit}: {int(long.sum()):,} samples are longer, by {lost:,} tokens "
        f"({lost / max(1, int(inputs.sum())):.1%} of all)",
        f"packed: {packed:,} sequences, {1 - clipped.sum() / (packed * limit):.1%} padding; "
        f"each sample padded: {1 - clipped.sum() / (len(clipped) * limit):.1%}",
    ]
