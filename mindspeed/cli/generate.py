"""``mindspeed generate``: continue a text with a trained model.

    mindspeed generate --load runs/quickstart/checkpoints --prompt "The import statement"
    mindspeed generate --load hf:models/llama2-7b --tp 2 --pp 2 --greedy --prompt-file prompts.txt
    mindspeed generate --load DIR --num-beams 4 --num-return-sequences 2 --prompt "Once upon a"

The tokenizer and the shape of the model come from the checkpoint, whatever layout it was trained
in. Text goes to standard output as it is made (with one prompt), everything else to standard error.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed.cli.inference_flags import (
    add_model_arguments,
    add_sampling_arguments,
    run_model,
    sampling_options,
)
from mindspeed.errors import ConfigError, DataError
from mindspeed.inference.sampling import Constraint, SamplingOptions
from mindspeed.parsing import read_json
from mindspeed.ranges import number, whole

if TYPE_CHECKING:
    from mindspeed.inference.text_generator import TextGenerator

HELP = "continue a text with a trained model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add = parser.add_argument
    add("--prompt", action="append", metavar="TEXT", help="may be repeated")
    add("--prompt-file", type=Path, metavar="FILE", help="one prompt a line, instead of --prompt")
    add("--batch-size", type=whole(1), default=16, help="prompts in one pass")
    add_sampling_arguments(parser)
    add("--num-beams", type=whole(1), default=1, help="sequences a beam search follows")
    add("--num-return-sequences", type=whole(1), default=1, help="texts for each prompt")
    add("--length-penalty", type=number(), default=1.0, help="above 0: longer beams")
    add("--json-schema", type=Path, metavar="FILE", help="the text is JSON that fits this schema")
    add("--regex", metavar="TEXT", help="the text matches this regular expression")
    add("--recompute", action="store_true", help="run the whole text for every token: slow, exact")


def run(args: argparse.Namespace) -> int:
    """Generate; started by hand with more than one rank, start the ranks first."""
    options = sampling_options(
        args,
        num_beams=args.num_beams,
        num_return_sequences=args.num_return_sequences,
        length_penalty=args.length_penalty,
        recompute=args.recompute,
        constraint=_constraint(args),
    )
    texts = _prompts(args)
    return run_model(
        "generate", args, lambda generator: _print_all(generator, texts, options, args.batch_size)
    )


def _constraint(args: argparse.Namespace) -> Constraint | None:
    """What the text must be."""
    if args.json_schema is not None and args.regex is not None:
        raise ConfigError("give either --json-schema or --regex")
    if args.json_schema is not None:
        schema = read_json(args.json_schema, f"--json-schema {args.json_schema}", DataError)
        return Constraint("json_schema", json.dumps(schema))
    return None if args.regex is None else Constraint("regex", args.regex)


def _prompts(args: argparse.Namespace) -> list[str]:
    if bool(args.prompt) == bool(args.prompt_file):
        raise ConfigError("give --prompt TEXT (may be repeated) or --prompt-file FILE")
    if args.prompt:
        return list(args.prompt)
    if not args.prompt_file.is_file():
        raise DataError(f"--prompt-file {args.prompt_file}: there is no such file")
    lines = args.prompt_file.read_text("utf-8").splitlines()
    return [line for line in lines if line.strip()]


def _print_all(
    generator: TextGenerator, texts: Sequence[str], options: SamplingOptions, batch_size: int
) -> None:
    """Print every prompt with its continuations on rank 0. Collective."""
    import torch.distributed as dist

    prints = dist.get_rank() == 0
    if len(texts) == options.num_return_sequences == options.num_beams == 1:
        if prints:
            print(texts[0], end="", flush=True)
        for chunk in generator.stream(texts, options):
            if prints:
                print(chunk.text, end="", flush=True)
        if prints:
            print()
        return
    results = generator.generate(texts, options, batch_size, share=True)
    for text, completions in zip(texts, results, strict=True):
        for completion in completions:
            if prints:
                print(text + completion.text)
                print("-" * 40)
