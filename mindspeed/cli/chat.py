"""``mindspeed chat``: chat with a model.

    mindspeed chat --load hf:models/qwen3-8b
    mindspeed chat --load out/finetuned --prompt-type alpaca --tp 2 --system "Be brief."
    printf 'Hello!\\nq\\n' | mindspeed chat --load DIR --prompt-type chatml --greedy

One message per line; ``q`` quits, ``clear`` starts a new conversation, ``/save FILE`` writes it,
``/help`` lists all commands. Answers are streamed to standard output.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from mindspeed.cli.inference_flags import (
    add_model_arguments,
    add_sampling_arguments,
    run_model,
    sampling_options,
)
from mindspeed.errors import ConfigError
from mindspeed.inference.answers.call_formats import FORMATS
from mindspeed.parsing import parse_object
from mindspeed.ranges import whole

if TYPE_CHECKING:
    from mindspeed.inference.text_generator import TextGenerator

HELP = "chat with a model"


def add_template_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the chat template, shared with ``generate`` and ``serve``."""
    add = parser.add_argument_group("conversation").add_argument
    add(
        "--prompt-type",
        metavar="NAME",
        help="chat template: alpaca, chatml, llama2, llama3, ..., a .yaml or .jinja file; default "
        "hf, the tokenizer's template",
    )
    add(
        "--hf-chat-template",
        action="store_true",
        help="the tokenizer's template, like --prompt-type hf",
    )
    add(
        "--chat-template-kwargs",
        default="{}",
        metavar="JSON",
        help="variables of the tokenizer's template, such as '{\"enable_thinking\": false}'",
    )
    add(
        "--tool-call-parser",
        default="auto",
        metavar="NAME",
        help=f"how the model writes calls of tools: {', '.join(one.name for one in FORMATS)} "
        "(default: auto, by its chat template)",
    )


def template_name(args: argparse.Namespace) -> str | None:
    """The chat template that the flags of :func:`add_template_arguments` name.

    Raises:
        ConfigError: Both flags are given and differ.
    """
    if args.hf_chat_template and args.prompt_type not in (None, "hf"):
        raise ConfigError(f"--prompt-type {args.prompt_type}: give either it or --hf-chat-template")
    return "hf" if args.hf_chat_template else args.prompt_type


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_template_arguments(parser)
    add = parser.add_argument
    add("--system", metavar="TEXT", help="system message")
    add(
        "--history-turns",
        type=whole(0),
        metavar="N",
        help="maximum number of earlier turns in the prompt (default: all that fit)",
    )
    add("--hide-reasoning", action="store_true", help="print answers without their reasoning")
    add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the chat; outside a job with more than one rank, launch the ranks first."""
    name = template_name(args)
    options = sampling_options(args)
    variables = parse_object(args.chat_template_kwargs, "--chat-template-kwargs")

    def body(generator: TextGenerator) -> None:
        from mindspeed.inference.answers.call_formats import format_of
        from mindspeed.inference.chat import run_chat
        from mindspeed.inference.conversation import Conversation, template_of

        template = template_of(generator, name).with_variables(variables)
        calls = format_of(template.source, args.tool_call_parser)
        answer = options
        if args.max_new_tokens is None:
            half = max(1, generator.context_length // 2)
            answer = replace(options, max_new_tokens=min(options.max_new_tokens, half))
        conversation = Conversation(
            generator, template, args.system or "", args.history_turns, calls
        )
        run_chat(generator, conversation, answer, not args.hide_reasoning)

    return run_model("chat", args, body)
