"""``mindspeed generate``: continue a text with a trained model.

    mindspeed generate --load runs/quickstart/checkpoints --prompt "The import statement"
    mindspeed generate --load DIR --tp 2 --pp 2 --greedy --prompt-file prompts.txt

The tokenizer and the shape of the model come from the checkpoint, whatever layout it was trained
in. Text goes to standard output as it is made (with one prompt), everything else to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed.errors import ConfigError, DataError
from mindspeed.inference.sampling import SamplingOptions

if TYPE_CHECKING:
    from mindspeed.inference.load import LoadedModel

HELP = "continue a text with a trained model"

_UNFINISHED = "\ufffd"  # how a part of a character decodes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this sub-command."""
    parser.add_argument("--load", required=True, metavar="DIR", help="directory of checkpoints")
    parser.add_argument("--ckpt-step", type=int, help="iteration to load (default: the latest)")
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="may be repeated")
    parser.add_argument(
        "--prompt-file", type=Path, metavar="FILE", help="one prompt a line, instead of --prompt"
    )
    parser.add_argument("--max-new-tokens", type=int, default=SamplingOptions.max_new_tokens)
    parser.add_argument("--greedy", action="store_true", help="always take the most likely token")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-k", type=int, default=0, help="0: all tokens")
    parser.add_argument("--top-p", type=float, default=0.95, help="1: all tokens")
    parser.add_argument("--seed", type=int, default=SamplingOptions.seed)
    parser.add_argument(
        "--tp", "--tensor-model-parallel-size", type=int, default=1, help="tensor-parallel size"
    )
    parser.add_argument(
        "--pp", "--pipeline-model-parallel-size", type=int, default=1, help="pipeline stages"
    )
    parser.add_argument(
        "--tokenizer-model", metavar="DIR", help="default: the tokenizer of the training"
    )


def run(args: argparse.Namespace) -> int:
    """Generate; started by hand with more than one rank, start the ranks first."""
    options = SamplingOptions(
        max_new_tokens=args.max_new_tokens,
        greedy=args.greedy,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
    )
    texts = _prompts(args)
    from mindspeed.training.quiet import choose_warnings

    choose_warnings()
    import mindspeed.megatron_adaptor  # noqa: F401  (before anything of Megatron)
    from mindspeed.inference.load import Source, load_model, resolve_source
    from mindspeed.training.guard import stop_together
    from mindspeed.training.launch import inside_a_job, run_ranks

    source = Source(args.load, args.ckpt_step, args.tp, args.pp, args.tokenizer_model)
    size = args.tp * args.pp
    if not inside_a_job() and size > 1:
        resolve_source(source, size)  # says what is wrong once, before any rank starts
        return run_ranks(_command(args), size)
    with stop_together("generate"):
        with contextlib.redirect_stdout(sys.stderr):  # standard output is for the text alone
            loaded = load_model(source, int(os.environ.get("WORLD_SIZE", "1")))
        _print_all(loaded, texts, options)
    return 0


def _command(args: argparse.Namespace) -> list[str]:
    """This command line again, for one rank."""
    words = [sys.executable, "-m", "mindspeed", "generate"]
    for name, value in vars(args).items():
        option = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words += [option] if value else []
        elif isinstance(value, list):
            words += [f"{option}={item}" for item in value]
        elif value is not None:
            words.append(f"{option}={value}")
    return words


def _prompts(args: argparse.Namespace) -> list[str]:
    if bool(args.prompt) == bool(args.prompt_file):
        raise ConfigError("give --prompt TEXT (may be repeated) or --prompt-file FILE")
    if args.prompt:
        return list(args.prompt)
    if not args.prompt_file.is_file():
        raise DataError(f"--prompt-file {args.prompt_file}: there is no such file")
    lines = args.prompt_file.read_text("utf-8").splitlines()
    return [line for line in lines if line.strip()]


def _print_all(loaded: LoadedModel, texts: Sequence[str], options: SamplingOptions) -> None:
    """Print every prompt with its continuation; rank 0 speaks, all ranks take part."""
    import torch.distributed as dist

    from mindspeed.inference.generate import ModelRanks, generate

    tokenizer = loaded.tokenizer
    # A model that only ever saw documents after an end-of-text token begins with one.
    prompts = [tokenizer.tokenize(text) or [tokenizer.eod] for text in texts]
    speaks = dist.get_rank() == 0
    if len(texts) == 1:
        for piece in _pieces(loaded, prompts[0], options):
            if speaks:
                print(piece, end="", flush=True)
        if speaks:
            print()
        return
    rows = generate(
        loaded.stage,
        prompts,
        options,
        ranks=ModelRanks.of_megatron(),
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
    )
    for prompt, row in zip(prompts, rows, strict=True):
        if speaks:
            print(tokenizer.detokenize([*prompt, *row]))
            print("-" * 40)


def _pieces(loaded: LoadedModel, prompt: Sequence[int], options: SamplingOptions) -> Iterator[str]:
    """The text of one prompt and its continuation, piece by piece, never half a character."""
    from mindspeed.inference.generate import ModelRanks, stream

    tokens, printed = list(prompt), ""
    steps = stream(
        loaded.stage,
        [prompt],
        options,
        ranks=ModelRanks.of_megatron(),
        vocab_size=loaded.tokenizer.vocab_size,
        eod=loaded.tokenizer.eod,
    )
    yield (printed := loaded.tokenizer.detokenize(tokens))
    for step in steps:
        tokens += step.values()
        text = loaded.tokenizer.detokenize(tokens)
        if not text.endswith(_UNFINISHED):
            yield text[len(printed) :]
            printed = text
