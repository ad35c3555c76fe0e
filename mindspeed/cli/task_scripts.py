"""Entry points of the original suite's scripts in ``tasks/inference`` and ``tasks/evaluation``.

Their command lines describe the model (``--num-layers 32 --hidden-size 4096 ...``). Here the
checkpoint does, so only the spelling of these flags is checked. Flags of parallel sizes, paths and
sampling are those of ``mindspeed generate`` and ``mindspeed evaluate``, which do the work.

    --task of inference     1  greedy decoding
                            2  sampling with top-k and top-p
                            3  beam search
                            4  beam search with sampling
                            5  several prompts of different length in one batch
                            6  chat (mindspeed chat)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mindspeed.cli import evaluate
from mindspeed.cli.inference_flags import add_model_arguments, run_model, sampling_options
from mindspeed.errors import MindSpeedError
from mindspeed.flags import GIVEN, given_in
from mindspeed.ranges import NOT_NEGATIVE, Range, number, whole

if TYPE_CHECKING:
    from mindspeed.inference.text_generator import TextGenerator

PROMPT = "Give three tips for staying healthy."
PROMPTS = (PROMPT, "How are you?", "Write quick sort code in python")
CHOICES: dict[int, dict[str, object]] = {
    1: {"greedy": True},
    2: {"greedy": False},
    3: {"greedy": True, "num_beams": 4},
    4: {"greedy": False, "num_beams": 4},
    5: {"greedy": True},
}


def run_evaluation(argv: Sequence[str] | None = None) -> int:
    """``tasks/evaluation/evaluation_*.py``; returns the exit code."""
    parser = argparse.ArgumentParser("evaluation", allow_abbrev=False)
    evaluate.add_arguments(parser)
    return _exit_code_of(lambda: evaluate.run(_parse(parser, argv)))


def run_inference(script: str, argv: Sequence[str] | None = None) -> int:
    """``tasks/inference/inference_*.py``; returns the exit code.

    Args:
        script: path of the script, to launch additional ranks.
        argv: its command line; default that of the process.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    return _exit_code_of(lambda: _infer(script, given))


def _infer(script: str, argv: Sequence[str]) -> int:
    from mindspeed.training.launch import inside_a_job, run_ranks

    parser = argparse.ArgumentParser("inference", allow_abbrev=False)
    add_model_arguments(parser)
    parser.add_argument("--task", type=int, nargs="+", choices=range(1, 7), default=[1, 2, 3, 4, 5])
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--prompt-type", help="task 6: chat template (default: the tokenizer's)")
    parser.add_argument("--max-new-tokens", type=whole(1), default=128)
    parser.add_argument("--temperature", type=number(NOT_NEGATIVE), default=0.7)
    parser.add_argument("--top-k", type=whole(0), default=50)
    parser.add_argument("--top-p", type=number(Range(0, 1, above=True)), default=0.95)
    parser.add_argument("--seed", type=whole(0, 2**32 - 1), default=1234)
    args = _parse(parser, argv)
    if not inside_a_job() and args.tp * args.pp > 1:
        return run_ranks([sys.executable, script, *argv], args.tp * args.pp)

    def body(generator: TextGenerator) -> None:
        for task in args.task:
            _talk(generator, args) if task == 6 else _continue(generator, task, args)

    return run_model("inference", args, body)


def _continue(generator: TextGenerator, number: int, args: argparse.Namespace) -> None:
    """Tasks 1 to 5: generate on all ranks, print on rank 0."""
    import torch.distributed as dist

    prompts = PROMPTS if number == 5 else (args.prompt,)
    answers = generator.generate(prompts, sampling_options(args, **CHOICES[number]))
    if dist.get_rank() == 0:
        for prompt, (answer, *_) in zip(prompts, answers, strict=True):
            print(f"[task {number}] {prompt}\n{answer.text}\n", flush=True)


def _talk(generator: TextGenerator, args: argparse.Namespace) -> None:
    """Task 6: chat."""
    from mindspeed.inference.answers.call_formats import format_of
    from mindspeed.inference.chat import run_chat
    from mindspeed.inference.conversation import Conversation, template_of

    template = template_of(generator, args.prompt_type)
    run_chat(
        generator,
        Conversation(generator, template, calls=format_of(template.source)),
        sampling_options(args),
    )


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse flags; flags unknown to ``parser`` must be flags of the model.

    Raises:
        ConfigError: a flag is unknown; the closest ones are suggested.
    """
    args, rest = parser.parse_known_args(argv)
    if rest:
        import mindspeed.megatron_adaptor  # noqa: F401  (before anything of Megatron)
        from mindspeed.training.arguments import parse

        model = parse(rest)
        args.tokenizer_model = args.tokenizer_model or model.tokenizer_model
        if getattr(args, "max_length", 0) is None:
            args.max_length = model.seq_length
        names = {"tokenizer_model", "max_length"} & vars(args).keys()
        setattr(args, GIVEN, sorted({*given_in(vars(args)), *names}))
    return args


def _exit_code_of(work: Callable[[], int]) -> int:
    """Run a command and print an error as one message."""
    try:
        return work()
    except MindSpeedError as error:
        print(f"{sys.argv[0]}: {error}", file=sys.stderr)
        return 1
