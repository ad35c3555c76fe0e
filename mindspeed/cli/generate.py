"""``mindspeed generate``: continue a text with a trained model.

    mindspeed generate --load runs/quickstart/checkpoints --prompt "The import statement"
    mindspeed generate --load hf:models/llama2-7b --tp 2 --pp 2 --greedy --prompt-file prompts.txt
    mindspeed generate --load hf:models/qwen3-8b --messages chat.jsonl --json
    mindspeed generate --load DIR --num-beams 4 --num-return-sequences 2 --prompt "Once upon a"

The tokenizer and the shape of the model come from the checkpoint, whatever layout it was trained
in. Text goes to standard output as it is made (with one prompt), everything else to standard error.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed.cli.chat import add_template_arguments, template_name
from mindspeed.cli.inference_flags import (
    add_model_arguments,
    add_sampling_arguments,
    run_model,
    sampling_options,
)
from mindspeed.errors import ConfigError, DataError
from mindspeed.flags import given_in
from mindspeed.inference.sampling import Constraint, SamplingOptions
from mindspeed.parsing import parse_object, read_json
from mindspeed.ranges import number, whole

if TYPE_CHECKING:
    from mindspeed.inference.text_generator import TextGenerator

HELP = "continue a text with a trained model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add = parser.add_argument
    add("--prompt", action="append", metavar="TEXT", help="may be repeated")
    add("--prompt-file", type=Path, metavar="FILE", help="one prompt a line, instead of --prompt")
    add(
        "--messages",
        type=Path,
        metavar="FILE",
        help="answer conversations instead: .json or .jsonl, each with messages, and perhaps tools "
        "and chat_template_kwargs",
    )
    add("--json", action="store_true", help="print a JSON object a line for every text or answer")
    add("--batch-size", type=whole(1), default=16, help="prompts in one pass")
    add_template_arguments(parser)
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
    if args.messages is not None:
        return _answer(args, options)
    given = given_in(vars(args))
    for name in ("prompt_type", "hf_chat_template", "chat_template_kwargs", "tool_call_parser"):
        if name in given:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} is for conversations: give them with --messages FILE")
    texts = _prompts(args)
    return run_model(
        "generate", args, lambda generator: _print_all(generator, texts, options, args)
    )


def _answer(args: argparse.Namespace, options: SamplingOptions) -> int:
    """Answer the conversations of ``--messages``."""
    if args.prompt or args.prompt_file:
        raise ConfigError("give either --messages or prompts")
    from mindspeed.inference.conversation import read_conversations

    conversations, name = read_conversations(args.messages), template_name(args)
    variables = parse_object(args.chat_template_kwargs, "--chat-template-kwargs")

    def body(generator: TextGenerator) -> None:
        import torch.distributed as dist

        from mindspeed.inference.answers.call_formats import format_of
        from mindspeed.inference.conversation import answer_all, remarks_of, template_of

        template = template_of(generator, name).with_variables(variables)
        calls = format_of(template.source, args.tool_call_parser)
        found = answer_all(generator, template, conversations, options, args.batch_size, calls)
        if dist.get_rank() == 0:
            for remark in remarks_of(conversations):
                print(remark, file=sys.stderr)
            for answer in chain(*found):
                print(_line(answer) if args.json else _readable(answer))

    return run_model("generate", args, body)


def _line(content: Mapping[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False)


def _readable(answer: Mapping[str, Any]) -> str:
    """An answer for a reader: its reasoning, its content, its calls; a line below."""
    calls = [_line(call["function"]) for call in answer.get("tool_calls", ())]
    parts = (answer.get("reasoning_content"), answer["content"], "\n".join(calls))
    return "\n\n".join(part for part in parts if part) + "\n" + "-" * 40


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
        raise ConfigError("give --prompt TEXT (may be repeated), --prompt-file or --messages FILE")
    if args.prompt:
        return list(args.prompt)
    if not args.prompt_file.is_file():
        raise DataError(f"--prompt-file {args.prompt_file}: there is no such file")
    lines = args.prompt_file.read_text("utf-8").splitlines()
    return [line for line in lines if line.strip()]


def _print_all(
    generator: TextGenerator,
    texts: Sequence[str],
    options: SamplingOptions,
    args: argparse.Namespace,
) -> None:
    """Print every prompt with its continuations on rank 0. Collective."""
    import torch.distributed as dist

    prints = dist.get_rank() == 0
    if len(texts) == options.num_return_sequences == options.num_beams == 1 and not args.json:
        if prints:
            print(texts[0], end="", flush=True)
        for chunk in generator.stream(texts, options):
            if prints:
                print(chunk.text, end="", flush=True)
        if prints:
            print()
        return
    results = generator.generate(texts, options, args.batch_size, share=True)
    for text, completions in zip(texts, results, strict=True):
        for completion in completions:
            if prints and args.json:
                content = {"prompt": text, "text": completion.text}
                print(_line({**content, "finish_reason": completion.finish}))
            elif prints:
                print(text + completion.text)
                print("-" * 40)
