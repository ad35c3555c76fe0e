"""Entry point of the ``mindspeed`` command: finds and runs the sub-command, reports errors.

A sub-command module has ``HELP`` and either ``add_arguments(parser)`` with ``run(args)``, or
``PASS_THROUGH = True`` with ``run(argv)`` if it takes Megatron's flags. It is imported only when it
is used, so that ``mindspeed --help`` is fast. Words after ``--`` are in ``args.flags``.

Every error is reported here (in a rank of a job: in :mod:`mindspeed.training.fail_together`) as one
message, with the page of the documentation that explains what it complains about; ``--debug``,
after any command, adds the traceback.
"""

from __future__ import annotations

import argparse
import atexit
import difflib
import gc
import importlib
import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Sequence

from mindspeed import __version__
from mindspeed.errors import (
    DEBUG,
    CheckpointError,
    DataError,
    MindSpeedError,
    PatchError,
    PlanError,
    SecurityError,
    VersionError,
    describe,
)
from mindspeed.files import SecurityWarning, tighten_umask, warn_if_root
from mindspeed.processes import imports_of_command
from mindspeed.ranges import HelpFormatter, Parser

COMMANDS: dict[str, str] = {
    "quickstart": "from raw text to a fine-tuned, evaluated model on this machine, in minutes",
    "corpus": "write small training data from this Python's documentation",
    "tokenizer": "train a byte-level BPE tokenizer",
    "preprocess": "tokenize texts and conversations into Megatron's data sets",
    "data": "show samples of a data set with their trained tokens, and figures of lengths",
    "pretrain": "pretrain a model",
    "finetune": "fine-tune a model on conversations: all weights, or LoRA adapters",
    "dpo": "train a model on pairs of answers: DPO, IPO, KTO, ORPO, SimPO",
    "reward": "train a reward model on pairs of answers",
    "models": "list the models for --model",
    "recipes": "list the recipes for --config, or print one",
    "convert": "convert weights between Hugging Face and Megatron",
    "export": "write a trained model for transformers",
    "merge-lora": "merge an adapter into its base model, or write it for peft",
    "verify": "compare a checkpoint's files with their digests, or its logits with transformers",
    "generate": "continue a text with a trained model",
    "chat": "chat with a model",
    "serve": "serve a model with OpenAI's API",
    "evaluate": "score a model on benchmarks from local files",
    "plot": "plot loss, gradient norm, throughput and memory of one or more runs",
    "profile": "the earlier name of explain --timeline",
    "attention": "compare and draw context-parallel algorithms on an attention mask",
    "pipeline": "compare and draw pipeline schedules: bubble, memory, messages",
    "moe": "compare and draw programs of mixture-of-experts layers: bytes, exposed time, memory",
    "plan": "plan a job without a device: memory of every rank, FLOPs, messages, the best layout",
    "check": "check before a run that every gradient is summed over the right ranks",
    "compare": "find the first tensor in which two recorded trainings differ",
    "calibrate": "measure devices and links of this machine for plan --cluster",
    "explain": "explain a job: where bytes, FLOPs, messages and bubbles are, and what would help",
    "features": "list the features: flag, level, devices, conflicts",
    "ops": "list the fused operators: implementation on this device, why not others",
    "patches": "list the patches of Megatron, and check them against a Megatron version",
    "doctor": "check this machine: versions, devices, packages; what each door still lacks",
    "completion": "print a script that completes commands, flags and values in a shell",
}


# The order of mindspeed --help.
GROUPS: dict[str, tuple[str, ...]] = {
    "start": ("quickstart", "doctor", "completion"),
    "data": ("corpus", "tokenizer", "preprocess", "data"),
    "train": ("pretrain", "finetune", "dpo", "reward", "models", "recipes", "plot"),
    "weights": ("convert", "export", "verify", "merge-lora"),
    "inference": ("generate", "chat", "serve", "evaluate"),
    "plan": ("plan", "check", "explain", "calibrate", "profile", "attention", "pipeline", "moe"),
    "inspect": ("compare", "features", "ops", "patches"),
}

STORY = """\
the whole way on this machine    mindspeed quickstart
your conversations, your model   mindspeed finetune --load hf:DIR --data FILE --save OUT
then talk to it                  mindspeed chat --load OUT
"""
"""What comes before the list where no command is given."""

_format_for_developers = warnings.formatwarning
_READ_ONLY = (
    "models",
    "recipes",
    "attention",
    "pipeline",
    "moe",
    "plan",
    "explain",
    "compare",
    "check",
    "features",
    "ops",
    "patches",
    "doctor",
    "completion",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``mindspeed <command> ...``; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    if not argv:
        print(STORY)
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
    atexit.register(gc.freeze)  # the interpreter's last collections would take two seconds
    warnings.formatwarning = _warning_line
    tighten_umask()
    if command not in _READ_ONLY and "RANK" not in os.environ:  # once per job
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
        if page := page_of(error):
            print(f"  read docs/{page}", file=sys.stderr)
        return 1


def dispatch(command: str, rest: list[str]) -> int:
    """Run a sub-command; errors for the user are raised, not printed."""
    with imports_of_command():
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
    """The command line without ``--debug``, and whether it was given."""
    own = _split_at_dashes(argv)[0]
    kept = [word for word in own if word != "--debug"]
    return kept + argv[len(own) :], len(kept) < len(own)


def _split_at_dashes(argv: list[str]) -> tuple[list[str], list[str]]:
    """``a b -- c d`` -> ``a b`` for the command and ``c d``, flags that it inspects."""
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
    """Warnings for users are one line; those for developers keep their source location."""
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
                "mindspeed <command> --help shows its flags; --debug adds tracebacks to errors",
            ]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="mindspeed <command> [options]",
    )
    parser.add_argument("--version", action="version", version=f"mindspeed {__version__}")
    return parser


if __name__ == "__main__":
    sys.exit(main())


OF_ERRORS: dict[type[MindSpeedError], str] = {
    VersionError: "installation.md#versions",
    PatchError: "adaptor.md",
    CheckpointError: "training.md#checkpoints",
    DataError: "data.md#what-it-reads",
    PlanError: "planner.md",
    SecurityError: "security.md",
}
"""Kind of error -> page."""


def page_of(error: BaseException) -> str | None:
    """The page about the first flag of a feature in a message, else about that kind of error."""
    if not isinstance(error, MindSpeedError):
        return None
    flags = re.findall(r"--[a-z0-9][\w-]*", str(error))
    if flags:
        pages = _pages_of_flags()
        if found := next((pages[flag] for flag in flags if flag in pages), None):
            return found
    return next((page for kind, page in OF_ERRORS.items() if isinstance(error, kind)), None)


def _pages_of_flags() -> dict[str, str]:
    """Flags of this package's features, those of Megatron's left out -> page."""
    from mindspeed.features.registry import all_features, origin_of
    from mindspeed.flags import flags_of
    from mindspeed.plugins import BUILT_IN

    return {
        option: feature.page
        for feature in all_features()
        if origin_of(feature.name) == BUILT_IN
        for item in flags_of(feature)
        if not item.megatron
        for option in (item.option, *item.aliases)
    }
