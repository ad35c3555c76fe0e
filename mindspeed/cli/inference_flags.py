"""Flags and model loading shared by ``generate``, ``chat``, ``serve`` and ``evaluate``."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from mindspeed.flags import given_in, record_given
from mindspeed.inference.sampling import SamplingOptions
from mindspeed.ranges import ABOVE_ZERO, FRACTION, MAX_RANKS, NOT_NEGATIVE, Range, number, whole

if TYPE_CHECKING:
    from mindspeed.inference.text_generator import TextGenerator


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the model and its parallel sizes; records which flags are given."""
    record_given(parser)
    add = parser.add_argument_group("model").add_argument
    add(
        "--load",
        required=True,
        metavar="DIR",
        help="directory of checkpoints, or hf:DIR for a Hugging Face model",
    )
    add("--ckpt-step", type=whole(0), help="iteration to load (default: the latest)")
    add("--lora-load", metavar="DIR", help="LoRA adapter of mindspeed or PEFT")
    add(
        "--base-weights",
        choices=("nf4", "int8", "fp8", "none"),
        help="store the weights of linear layers in 4 bits (nf4) or 8 (int8, fp8), hf:DIR only; "
        "none: as they are (default: as the adapter of --lora-load was trained)",
    )
    add(
        "--tp",
        "--tensor-model-parallel-size",
        type=whole(1, MAX_RANKS),
        default=1,
        help="tensor-parallel size",
    )
    add(
        "--pp",
        "--pipeline-model-parallel-size",
        type=whole(1, MAX_RANKS),
        default=1,
        help="pipeline-parallel size",
    )
    add(
        "--tokenizer-model",
        metavar="DIR",
        help="tokenizer directory (default: the checkpoint's tokenizer)",
    )


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("sampling").add_argument
    add(
        "--max-new-tokens",
        type=whole(1),
        help="maximum length of the generated text (default: "
        f"{SamplingOptions.max_new_tokens}, in a chat at most half of the context length)",
    )
    add("--greedy", action="store_true", help="take the most likely token instead of sampling")
    add("--temperature", type=number(NOT_NEGATIVE), default=0.8, help="divides the logits")
    add(
        "--top-k",
        type=whole(0),
        default=0,
        help="sample from the K most likely tokens (default: 0, all tokens)",
    )
    add(
        "--top-p",
        type=number(Range(0, 1, above=True)),
        default=0.95,
        help="nucleus sampling: keep the most likely tokens with this total probability ",
    )
    add(
        "--min-p",
        type=number(FRACTION),
        default=0.0,
        help="drop tokens less likely than this fraction of the most likely one",
    )
    add(
        "--presence-penalty",
        type=number(),
        default=0.0,
        help="subtracted from logits of tokens that have been generated",
    )
    add(
        "--frequency-penalty",
        type=number(),
        default=0.0,
        help="the same, for each time that they have been generated",
    )
    add(
        "--repetition-penalty",
        type=number(ABOVE_ZERO),
        default=1.0,
        help="above 1 makes repeated tokens less likely (default: 1, off)",
    )
    add(
        "--stop", action="append", metavar="TEXT", help="string that ends the text; may be repeated"
    )
    add("--seed", type=whole(0, 2**32 - 1), default=SamplingOptions.seed, help="random seed")


def sampling_options(args: argparse.Namespace, **more: object) -> SamplingOptions:
    """The options of :func:`add_sampling_arguments`, as far as a command has them.

    Raises:
        ConfigError: A value is invalid.
    """
    given = vars(args)
    values = {name: given[name] for name in _SAMPLING if given.get(name) is not None}
    values["stop"] = tuple(values.get("stop") or ())
    return SamplingOptions(**{**values, **more})


_SAMPLING = (
    *("max_new_tokens", "greedy", "temperature", "top_k", "top_p", "min_p", "stop", "seed"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


def run_model(command: str, args: argparse.Namespace, body: Callable[[TextGenerator], None]) -> int:
    """Load the model and run ``body`` on every rank; outside a job, launch the ranks first."""
    from mindspeed.training.warning_filters import filter_warnings

    filter_warnings()
    import mindspeed.megatron_adaptor  # noqa: F401  (before anything of Megatron)
    from mindspeed.inference.load import Source, load_model, resolve_source
    from mindspeed.inference.text_generator import TextGenerator
    from mindspeed.training.fail_together import stop_together
    from mindspeed.training.launch import inside_a_job, run_ranks
    from mindspeed.training.resolve_parallel import check_fits_here
    from mindspeed.training.setup import leave_job

    model, tokenizer = args.load, args.tokenizer_model
    source = Source(
        model, args.ckpt_step, args.tp, args.pp, tokenizer, args.lora_load, args.base_weights
    )
    size = args.tp * args.pp * getattr(args, "dp", 1)
    if not inside_a_job() and size > 1:
        resolve_source(source, size)  # reports errors once, before any rank starts
        check_fits_here(size)
        return run_ranks(command_line(command, args), size)
    with stop_together(command):
        with contextlib.redirect_stdout(
            sys.stderr
        ):  # standard output is only for the generated text
            loaded = load_model(source, int(os.environ.get("WORLD_SIZE", "1")))
        body(TextGenerator.of(loaded))
        if inside_a_job():
            leave_job()
    return 0


def command_line(command: str, args: argparse.Namespace) -> list[str]:
    """The command of one rank: the flags that are given, again."""
    words = [sys.executable, "-m", "mindspeed", command]
    for name in given_in(vars(args)):
        value = getattr(args, name)
        option = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words += [option] if value else []
        elif isinstance(value, list):
            words += [f"{option}={item}" for item in value]
        elif value is not None:
            words.append(f"{option}={value}")
    return words
