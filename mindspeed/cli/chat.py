"""``mindspeed chat``: talk with a model.

    mindspeed chat --load hf:models/qwen3-8b
    mindspeed chat --load out/finetuned --prompt-type alpaca --tp 2 --system "Be brief."
    printf 'Hello!\\nq\\n' | mindspeed chat --load DIR --prompt-type chatml --greedy

One question a line; ``q`` leaves, ``clear`` forgets, ``/save FILE`` writes the conversation, and
``/help`` lists the rest. Answers go to standard output as they are made.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from mindspeed.cli.inference_flags import (
    add_model_arguments,
    add_sampling_arguments,
    run_model,
    sampling_options,
)
from mindspeed.errors import ConfigError
from mindspeed.ranges import whole

if TYPE_CHECKING:
    from mindspeed.inference.text_generator import TextGenerator

HELP = "talk with a model"


def add_template_arguments(parser: argparse.ArgumentParser) -> None:
    """How a conversation becomes text; ``serve`` has them, too."""
    group = parser.add_argument_group("conversation")
    group.add_argument(
        "--prompt-type",
        metavar="NAME",
        help="chat template: alpaca, chatml, llama2, llama3, ..., a .yaml or .jinja file; default "
        "hf, the tokenizer's own",
    )
    group.add_argument(
        "--hf-chat-template", action="store_true", help="the tokenizer's own, like --prompt-type hf"
    )


def template_name(args: argparse.Namespace) -> str | None:
    """The value of :func:`add_template_arguments`.

    Raises:
        ConfigError: Both flags name one.
    """
    if args.hf_chat_template and args.prompt_type not in (None, "hf"):
        raise ConfigError(f"--prompt-type {args.prompt_type}: give it or --hf-chat-template")
    return "hf" if args.hf_chat_template else args.prompt_type


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this sub-command."""
    add_model_arguments(parser)
    add_template_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", help="what the model is told first")
    parser.add_argument(
        "--history-turns",
        type=whole(0),
        metavar="N",
        help="turns to remember, 0: none (default: all that fit; the oldest go first)",
    )
    add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Chat; started by hand with more than one rank, start the ranks first."""
    name = template_name(args)
    options = sampling_options(args)

    def body(generator: TextGenerator) -> None:
        from mindspeed.inference.chat import run_chat
        from mindspeed.inference.conversation import Conversation, template_of, with_stops

        template = template_of(generator, name)
        conversation = Conversation(generator, template, args.system or "", args.history_turns)
        run_chat(generator, conversation, with_stops(options, template))

    return run_model("chat", args, body)
