"""List the features: purpose, flags, level, devices, conflicts.

mindspeed features                          all
mindspeed features --explain profiling      one, with all its flags
mindspeed features --enabled -- --profile   which features these flags switch on (a dry run)
mindspeed features --live -- torchrun ...   run a command; its rank 0 prints after the first step
                                            which places of which features it has reached
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from mindspeed import device
from mindspeed.errors import ConfigError
from mindspeed.features.feature import Feature
from mindspeed.features.registry import add_arguments as add_feature_flags
from mindspeed.features.registry import all_features, conflicts_of, origin_of, resolve
from mindspeed.flags import flags_of
from mindspeed.plugins import BUILT_IN
from mindspeed.session.reached import LIVE

HELP = "list the features: flag, level, devices, conflicts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--level", type=int, choices=(0, 1, 2), help="only features of this level")
    add("--stage", choices=("stable", "prototype"), help="only features of this stage")
    add("--explain", metavar="NAME", help="describe one feature in full")
    add("--json", action="store_true", help="print JSON")
    add(
        "--enabled",
        action="store_true",
        help="list the features that the flags after -- enable, or report errors in the flags",
    )
    add(
        "--live",
        action="store_true",
        help="run the command after --, and print what its first step reached of each feature",
    )


def run(args: argparse.Namespace) -> int:
    """Print the list, one explanation, or the dry run."""
    if args.enabled:
        return _dry_run(args.flags)
    if args.live:
        if not args.flags:
            raise ConfigError(
                "--live: give a command, as in mindspeed features --live -- torchrun ..."
            )
        return subprocess.run(args.flags, env={**os.environ, LIVE: "1"}, check=False).returncode
    features = [feature for feature in all_features() if _selected(feature, args)]
    if args.explain and not features:
        names = ", ".join(feature.name for feature in all_features())
        raise ConfigError(f"no feature {args.explain!r}; there are: {names}")
    if args.json:
        print(json.dumps([describe(feature) for feature in features], indent=2))
    elif args.explain:
        _print_explanation(features[0])
    else:
        _print_table(features)
    return 0


def describe(feature: type[Feature]) -> dict[str, object]:
    """One feature as plain data."""
    return {
        "name": feature.name,
        "summary": feature.summary,
        "origin": origin_of(feature.name),
        "level": feature.level,
        "stage": feature.stage,
        "devices": list(feature.devices) or ["all"],
        "seams": list(feature.seams),
        "conflicts": conflicts_of(feature),
        "requires": list(feature.requires),
        "flags": [
            {
                "option": item.option,
                "default": item.default,
                "help": item.help,
                "aliases": list(item.aliases),
                "env": item.env,
                "declared_by": "megatron" if item.megatron else "mindspeed",
            }
            for item in flags_of(feature)
        ],
    }


def _selected(feature: type[Feature], args: argparse.Namespace) -> bool:
    return (
        (args.level is None or feature.level == args.level)
        and (args.stage is None or feature.stage == args.stage)
        and (args.explain is None or feature.name == args.explain)
    )


def _dry_run(flags: list[str]) -> int:
    parser = add_feature_flags(argparse.ArgumentParser("mindspeed features --enabled --"))
    values, others = parser.parse_known_args(flags)
    configuration = resolve(vars(values), device.current().name)
    for feature in configuration.enabled:
        print(f"{feature.name}: {feature.summary}")
    if not configuration.enabled:
        print("no feature is on")
    if others:
        print(f"left to Megatron: {' '.join(others)}")
    return 0


def _print_table(features: list[type[Feature]]) -> None:
    table = Table("level", "feature", "flags", box=SIMPLE_HEAD, padding=(0, 1, 1, 0))
    table.columns[2].min_width = 34
    for feature in sorted(features, key=lambda feature: feature.level):
        excluded = conflicts_of(feature)
        limits = [f"not with {', '.join(excluded)}"] if excluded else []
        if feature.devices:
            limits.append(f"only on {', '.join(feature.devices)}")
        if feature.stage != "stable":
            limits.append(feature.stage)
        if (origin := origin_of(feature.name)) != BUILT_IN:
            limits.append(f"from {origin}")
        table.add_row(
            str(feature.level),
            "\n".join([f"[bold]{feature.name}[/bold]", feature.summary, *limits]),
            "\n".join(item.option for item in flags_of(feature)),
        )
    console = Console()
    console.print(table)
    console.print("mindspeed features --explain NAME tells what each flag does", style="dim")


def _print_explanation(feature: type[Feature]) -> None:
    console = Console()
    console.print(f"[bold]{feature.name}[/bold]  level {feature.level}, {feature.stage}")
    console.print(feature.summary)
    console.print(f"brought by {origin_of(feature.name)}", highlight=False)
    if origin_of(feature.name) == BUILT_IN and flags_of(feature):
        console.print(f"read docs/{feature.page}", highlight=False)
    for label in ("devices", "seams", "conflicts", "requires"):
        values = getattr(feature, label)
        if values:
            console.print(f"{label}: {', '.join(values)}")
    table = Table("flag", "default", "what it does")
    for item in flags_of(feature):
        names = " ".join((item.option, *item.aliases, *([f"${item.env}"] if item.env else [])))
        table.add_row(names, str(item.default), item.help)
    console.print(table)
