"""Find the sub-command, run it, and print the errors that are meant for the user in one piece.

A sub-command module has ``HELP`` and either ``add_arguments(parser)`` with ``run(args)``, or
``PASS_THROUGH = True`` with ``run(argv)`` when it hands Megatron's flags on. It is imported only
when it is used, so that ``mindspeed --help`` is quick. What follows ``--`` is in ``args.flags``.

Every error ends here (in a rank of a job: in :mod:`mindspeed.training.fail_together`) as one
message; ``--debug``, behind any command, adds the traceback.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Sequence

from mindspeed import __version__
from mindspeed.errors import DEBUG, describe
from mindspeed.files import SecurityWarning, tighten_umask, warn_if_root
from mindspeed.ranges import HelpFormatter, Parser

COMMANDS: dict[str, str] = {
    "quickstart": "the whole way on this machine: from text to a tuned, evaluated model",
    "corpus": "write practice data from this Python's documentation",
    "tokenizer": "train a byte-level BPE tokenizer",
    "preprocess": "turn text into token files",
    "pretrain": "pretrain a model",
    "finetune": "train a model further on conversations: all of it, or adapters (LoRA)",
    "models": "list the models that --model knows",
    "recipes": "list the recipes that --config knows, print one",
    "convert": "convert weights between Hugging Face and Megatron",
    "export": "write a trained model for transformers",
    "merge-lora": "merge an adapter into its base model, or write it for peft",
    "verify": "compare a checkpoint's files with their digests, or its logits with transformers",
    "generate": "continue a text with a trained model",
    "chat": "talk with a model",
    "serve": "answer requests in the form of OpenAI's API",
    "evaluate": "score a model on benchmarks from local files",
    "plot": "draw loss, gradient norm, throughput and memory of one or more runs",
    "attention": "compare context-parallel algorithms on a mask, and draw who computes what",
    "features": "list the features: flag, level, devices, conflicts",
    "ops": "list the fused operators: what runs on this device, and why not something faster",
    "patches": "list what is changed in Megatron, and check it against a Megatron version",
    "doctor": "say what works on this machine, and why not",
}


# The order of mindspeed --help.
GROUPS: dict[str, tuple[str, ...]] = {
    "begin": ("quickstart", "doctor"),
    "data": ("corpus", "tokenizer", "preprocess"),
    "train": ("pretrain", "finetune", "models", "recipes", "plot"),
    "weights": ("convert", "export", "verify", "merge-lora"),
    "use": ("generate", "chat", "serve", "evaluate"),
    "look inside": ("attention", "features", "ops", "patches"),
}

_format_for_developers = warnings.formatwarning
_READ_ONLY = ("models", "recipes", "attention", "features", "ops", "patches", "doctor")


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``mindspeed <command> ...``; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    if not argv or argv[0] in ("-h", "--help", "--version"):
        parser.parse_args(argv or ["--help"])
        return 0
    command, rest = argv[0], argv[1:]
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=3, cutoff=0.4)
        hint = f"; closest: {', '.join(near)}" if near else ""
        print(
            f"mindspeed: unknown command {command!r}{hint} (see mindspeed --help)", file=sys.stderr
        )
        return 2
    warnings.formatwarning = _warning_line
    tighten_umask()
    if command not in _READ_ONLY and "RANK" not in os.environ:  # once for the job
        warn_if_root()
    rest, debug = _without_debug(rest)
    if debug:
        os.environ[DEBUG] = "1"
    try:
        return dispatch(command, rest)
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt as error:
        print(f"mindspeed {command}: {describe(error)}", file=sys.stderr)
        return 130
    except Exception as error:
        print(f"mindspeed {command}: {describe(error)}", file=sys.stderr)
        return 1


def dispatch(command: str, rest: list[str]) -> int:
    """Run a sub-command; errors for the user are raised, not printed."""
    module = importlib.import_module(f"mindspeed.cli.{command.replace('-', '_')}")
    if getattr(module, "PASS_THROUGH", False):
        return int(module.run(rest))
    parser = Parser(
        f"mindspeed {command}",
        description=module.__doc__,
        formatter_class=HelpFormatter,
    )
    module.add_arguments(parser)
    own, flags = _split_at_dashes(rest)
    args = parser.parse_args(own)
    args.flags = flags
    return int(module.run(args))


def _without_debug(argv: list[str]) -> tuple[list[str], bool]:
    """The command line without ``--debug``, and whether it was there."""
    own = _split_at_dashes(argv)[0]
    kept = [word for word in own if word != "--debug"]
    return kept + argv[len(own) :], len(kept) < len(own)


def _split_at_dashes(argv: list[str]) -> tuple[list[str], list[str]]:
    """``a b -- c d`` -> ``a b`` for the command and ``c d``, flags that it looks at."""
    if "--" not in argv:
        return argv, []
    middle = argv.index("--")
    return argv[:middle], argv[middle + 1 :]


def _warning_line(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """A warning for the user is one line; one for developers says where it comes from."""
    if issubclass(category, SecurityWarning):
        return f"mindspeed: warning: {message}\n"
    return _format_for_developers(message, category, filename, lineno, line)


def _parser() -> argparse.ArgumentParser:
    lines = []
    for title, names in GROUPS.items():
        shown = (f"  {name:<12}{COMMANDS[name]}" for name in names if name in COMMANDS)
        lines += [f"{title}:", *shown, ""]
    parser = argparse.ArgumentParser(
        "mindspeed",
        description="Train large models with Megatron on Ascend NPU, NVIDIA GPU and plain CPU.",
        epilog="\n".join(
            [
                *lines,
                "mindspeed <command> --help tells more; --debug shows the traceback of an error",
            ]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="mindspeed <command> [options]",
    )
    parser.add_argument("--version", action="version", version=f"mindspeed {__version__}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
