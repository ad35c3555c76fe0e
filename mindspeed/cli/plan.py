"""Plan a training job without a device: will it fit, what does it send, which layout is best.

    mindspeed plan qwen3-8b --on 16xh100
    mindspeed plan models/my-model --on 64x910b --for lora --seq-length 8192
    mindspeed plan --cluster h100 --devices 64 --model llama3-8b --bf16 --seq-length 8192 \\
        --global-batch-size 256 --out plan
    mindspeed plan --check --cluster ascend-910b --config my.yaml --nproc 64
    mindspeed plan --check --memory-limit 60GiB -- --model llama3-8b --bf16 --seq-length 8192

With a model first - a name of ``mindspeed models``, or a folder with a config.json - it answers for
pretraining, full fine-tuning and LoRA: does it fit, how fast, with which flags. What is not said is
assumed and printed. Without a model it searches the best layouts of the job that the flags
describe, and ``--check`` counts one configuration. Takes all flags of ``mindspeed pretrain``, or
behind ``--``; there may also stand an unmodified script of Megatron-LM and its flags
(``-- pretrain_gpt.py FLAGS``). The real program of a rank runs on FakeTensors: bytes, FLOPs and
messages are counted, not estimated; times are a model of the cluster. Data need not exist.

The status is 0 if a candidate or the configuration fits, 3 if not, 1 or 2 after an error, and 130
after Ctrl-C or 143 after SIGTERM, which print the best until then.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from mindspeed.errors import ConfigError
from mindspeed.features.registry import options
from mindspeed.planner.expert_loads import BALANCED, ExpertLoads, expert_loads
from mindspeed.planner.layout import OPTIMIZERS, Recompute, expert_programs
from mindspeed.planner.search.space import SEARCHED, Space
from mindspeed.ranges import MAX_RANKS, HelpFormatter, Parser, whole

HELP = "plan a job without a device: memory of every rank, FLOPs, messages, the best layout"
PASS_THROUGH = True

_UNITS = {"": 2**30, "GiB": 2**30, "MiB": 2**20, "GB": 10**9, "MB": 10**6}


def run(argv: Sequence[str]) -> int:
    """Run the command; flags that are not its own are those of ``mindspeed pretrain``."""
    parser = job_parser("plan", __doc__)
    add_arguments(parser)
    model = argv[0] if argv and not argv[0].startswith("-") else None
    own, flags = read(parser, argv if model is None else argv[1:])
    use_machine(own)
    own.devices = own.devices if own.on is None else (own.on[1],)
    if own.plot is not None:
        from mindspeed.cli.plot import check_format, figure_class

        check_format("--plot", own.plot)
        figure_class()
    if model is not None:
        from mindspeed.cli.plan_question import run_question

        _refuse_with_model(own, model)
        return run_question(own, model, flags)
    if own.purposes:
        raise ConfigError("--for belongs to a model: mindspeed plan qwen3-8b --on 16xh100")
    if own.plan_activations is not None or own.plan_pipeline:
        from mindspeed.cli.plan_check import run_activations, run_pipeline

        _refuse_with_features(own)
        return (run_pipeline if own.plan_pipeline else run_activations)(own, flags)
    if own.check:
        from mindspeed.cli.plan_check import run_check

        _refuse_with_check(own)
        own.devices = own.devices[0] if own.devices else None
        return run_check(own, flags)
    if own.whole:
        raise ConfigError("--whole belongs to --check: it counts one configuration")
    from mindspeed.cli.plan_search import run_search

    return run_search(own, flags)


def _refuse_with_model(own: argparse.Namespace, model: str) -> None:
    for name in ("check", "whole", "plan_activations", "plan_pipeline", "measure", "plot"):
        if getattr(own, name) not in (None, False):
            raise ConfigError(
                f"--{name.replace('_', '-')} is for a job by its flags: mindspeed plan "
                f"--model {model} ..."
            )
    if own.cluster is None or not own.devices or len(own.devices) > 1:
        raise ConfigError(f"on which devices? mindspeed plan {model} --on 16xh100")


def _refuse_with_check(own: argparse.Namespace) -> None:
    for name in ("fix", "search", "out", "top", "cache", "measure", "launch", "html"):
        if getattr(own, name):
            raise ConfigError(f"--{name} belongs to a search; --check counts one configuration")
    if own.devices and len(own.devices) > 1:
        raise ConfigError("--check counts one configuration: give one number of --devices")


def _refuse_with_features(own: argparse.Namespace) -> None:
    name = "--plan-pipeline" if own.plan_pipeline else "--plan-activations"
    others = ["check", "whole", "fix", "search", "top", "cache", "plot", "memory_limit"]
    others += ["measure", "launch", "html"]
    others += ["plan_activations", "out", "json", "jobs"] if own.plan_pipeline else []
    for other in others:
        if getattr(own, other) not in (None, False):
            raise ConfigError(f"--{other.replace('_', '-')} has no effect with {name}: remove it")
    if own.devices and len(own.devices) > 1:
        raise ConfigError(f"{name} plans one configuration: give one number of --devices")


def job_parser(command: str, description: str | None) -> Parser:
    """A parser for the flags of a command that also takes those of a job.

    Args:
        command: its name.
        description: the text of ``--help``.
    """
    return Parser(
        f"mindspeed {command}",
        description=description,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
        epilog="All other flags are those of mindspeed pretrain.",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--check", action="store_true", help="count one configuration, the one of the flags")
    add(
        "--plan-activations",
        type=memory_size,
        metavar="SIZE",
        help="choose what is kept and what is recomputed, as --adaptive-recompute-device-size does",
    )
    add(
        "--plan-pipeline",
        action="store_true",
        help="write --automated-pipeline-file for a job with --automated-pipeline",
    )
    add_job_arguments(parser)
    add(
        "--whole",
        action="store_true",
        help="with --check: count all layers and micro-batches of every pipeline rank, instead of "
        "composing them from small runs",
    )
    add(
        "--devices",
        type=device_counts,
        metavar="N,..",
        help="ranks to plan for; several numbers are planned in turn (default: --nproc)",
    )
    add(
        "--for",
        dest="purposes",
        type=lambda text: text.split(","),
        metavar="NAME,..",
        help="with a model: pretrain, finetune, lora (default: all)",
    )
    _search_arguments(parser)
    add("--launch", metavar="WORDS", help="of torchrun, for the commands that are printed")
    add("--cache", type=Path, metavar="DIR", help="of counts, for later searches")
    add("--out", type=Path, metavar="DIR", help="write the plan, flags and recipes here")
    add(
        "--html",
        type=Path,
        metavar="FILE",
        help="write one page with all layouts, what uses memory and time, and what-if questions",
    )
    add(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw memory by rank, and the front of time and memory: .png, .svg or .pdf",
    )


def _search_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the search: layouts that are tried, and how."""
    add = parser.add_argument
    add("--top", type=whole(1, 1000), metavar="N", help="candidates (default: 5)")
    add(
        "--fix",
        type=fixed,
        metavar="NAME=VALUE,..",
        help=f"search with this value only; names: {', '.join(DIMENSIONS)}",
    )
    add(
        "--search",
        type=dimensions,
        metavar="NAME,..",
        help="search these only; the others are as the flags of the job say (default: "
        f"{','.join(SEARCHED)}; also: {','.join(one for one in DIMENSIONS if one not in SEARCHED)}"
        "). The result lists the values that were tried",
    )
    add(
        "--measure",
        choices=("mixed", "black"),
        help="then start candidates here, a few steps each: mixed until the fastest is sure, black "
        "all of them",
    )


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of every command that plans."""
    add = parser.add_argument
    add(
        "--on",
        type=_machine,
        metavar="NxNAME",
        help="--devices N --cluster NAME: 16xh100, 8xh100+8xa100",
    )
    add("--cluster", metavar="NAME", help="devices and links: a preset, or FILE.json")
    add(
        "--memory-limit",
        type=memory_size,
        metavar="SIZE",
        help="for the tensors of a rank, such as 60GiB (default: that of --cluster)",
    )
    add(
        "--expert-imbalance",
        type=_loads,
        default=BALANCED,
        metavar="X",
        help="tokens of the busiest expert-parallel rank over the mean, as 1.25, or FILE.json with "
        "the tokens of each expert (default: equal, and intervals reach to 1.25)",
    )
    add("--jobs", type=whole(1, 1024), metavar="N", help="processes (default: one for each core)")
    add("--json", action="store_true", help="print JSON")


def use_machine(own: argparse.Namespace) -> None:
    """Set ``--cluster`` by ``--on``.

    Raises:
        ConfigError: both are given, or ``--on`` and ``--devices``.
    """
    if own.on is None:
        return
    for name in ("cluster", "devices"):
        if getattr(own, name) is not None:
            raise ConfigError(f"--on says it: remove --{name}")
    own.cluster = own.on[0]


def _loads(text: str) -> ExpertLoads:
    try:
        return expert_loads(text)
    except ConfigError as error:
        reason = str(error).removeprefix(f"--expert-imbalance {text}: ")
        raise argparse.ArgumentTypeError(f"{text}: {reason}") from None


def _machine(text: str) -> tuple[str, int]:
    from mindspeed.planner.cluster import machine_of

    try:
        return machine_of(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix(f"--on {text}: ")) from None


def read(parser: Parser, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The flags of a command and those of the job, which may stand behind ``--``.

    Raises:
        ConfigError: flags of the job are on both sides.
    """
    argv = list(argv)
    if "--" not in argv:
        return parser.parse_known_args(argv)
    middle = argv.index("--")
    own, rest = parser.parse_known_args(argv[:middle])
    if rest:
        raise ConfigError(
            f"{parser.prog}: {rest[0]} is no flag of this command; flags of the job stand behind --"
        )
    return own, argv[middle + 1 :]


def device_counts(text: str) -> tuple[int, ...]:
    """Numbers of ranks, such as ``256,512``."""
    return tuple(whole(1, MAX_RANKS)(part) for part in text.split(","))


def memory_size(text: str) -> int:
    """Bytes of a size such as ``60GiB``, ``64GB`` or ``60``, which is in GiB."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?) ?([GM]i?B)?", text.strip())
    found = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if found < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 60GiB or 64GB")
    return found


DIMENSIONS = tuple(item.name for item in fields(Space))
_NUMBERS = ("tp", "cp", "ep", "etp", "pp", "mbs", "vpp")


def fixed(text: str) -> dict[str, Any]:
    """``tp=8,recompute=full:4`` as values by dimension."""
    found = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals:
            raise argparse.ArgumentTypeError(f"{part!r} is not NAME=VALUE, such as tp=8")
        found[_known(name)] = _value(name, value)
    return found


def dimensions(text: str) -> tuple[str, ...]:
    """``tp,pp`` as names."""
    return tuple(_known(name.strip()) for name in text.split(","))


def _known(name: str) -> str:
    if name in DIMENSIONS:
        return name
    near = get_close_matches(name, DIMENSIONS, n=1, cutoff=0.4)
    hint = f"; closest: {near[0]}" if near else ""
    raise argparse.ArgumentTypeError(
        f"{name!r} is no dimension of the search{hint} (there are {', '.join(DIMENSIONS)})"
    )


def _value(name: str, text: str) -> Any:
    if name in _NUMBERS:
        if not text.isdigit() or not 0 < int(text) <= 1 << 20:
            raise argparse.ArgumentTypeError(f"{name}={text}: give a number of at least 1")
        return int(text)
    if text in ("none", "") and name not in ("recompute", "memory"):
        return None
    return _TEXTS.get(name, str)(text)


def _recompute(text: str) -> Recompute:
    """``none``, ``full``, ``full:4`` or modules such as ``core_attn+mlp``."""
    if text == "none":
        return Recompute()
    kind, _, layers = text.partition(":")
    if kind != "full":
        return Recompute(modules=tuple(text.split("+")))
    if layers and not layers.isdigit():
        raise argparse.ArgumentTypeError(f"recompute={text}: give layers, as in full:4")
    return Recompute(layers=int(layers) if layers else -1)


def _memory(text: str) -> tuple[str, ...]:
    if text == "none":
        return ()
    return tuple(sorted(_one_of("memory", options("memory"))(name) for name in text.split("+")))


def _one_of(name: str, table: Mapping[str, Any]) -> Callable[[str], str]:
    def find(text: str) -> str:
        if text.partition(":")[0] not in table:
            raise argparse.ArgumentTypeError(
                f"{name}={text}: there are {', '.join(sorted(table))}, and none"
            )
        return text

    return find


def _split(text: str) -> Any:
    if text in ("even", "ends"):
        return text
    try:
        return tuple(int(part) for part in text.split("+"))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"split={text}: give even, ends, or the layers of stages as 9+10+10+9"
        ) from None


_TEXTS: dict[str, Callable[[str], Any]] = {
    "recompute": _recompute,
    "memory": _memory,
    "split": _split,
    "cp_algorithm": lambda text: _one_of("cp_algorithm", options("cp_algorithm"))(text),
    "optimizer": _one_of("optimizer", OPTIMIZERS),
    "precision": lambda text: _one_of("precision", options("precision"))(text),
    "expert_program": lambda text: _one_of("expert_program", expert_programs())(text),
}
