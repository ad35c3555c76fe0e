"""List the models for --model, with their sizes and flags.

mindspeed models                      all presets
mindspeed models --family qwen3       of one family
mindspeed models llama2-7b            one, with all its flags
mindspeed models DIR                  what DIR/config.json means
"""

from __future__ import annotations

import argparse
import json

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

HELP = "list the models for --model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", nargs="?", help="preset or Hugging Face directory: print its flags")
    add("--family", help="only models of this family")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the list, or the flags of one model."""
    from mindspeed.errors import ConfigError
    from mindspeed.models.families import families, origin_of
    from mindspeed.models.presets import model_flags, presets
    from mindspeed.plugins import BUILT_IN

    if args.model:
        flags = model_flags(args.model)
        lines = [f"--{name.replace('_', '-')} {value}" for name, value in sorted(flags.items())]
        print(json.dumps(flags) if args.json else "\n".join(lines))
        return 0
    if args.family and args.family not in families():
        raise ConfigError(f"--family {args.family} is not one of {', '.join(families())}")
    chosen = [p for p in presets().values() if args.family in (None, p.family)]
    if args.json:
        print(json.dumps({preset.name: dict(preset.flags) for preset in chosen}))
        return 0
    table = Table("model", "family", "layers", "hidden", "heads", "experts", box=SIMPLE_HEAD)
    for preset in chosen:
        flags = preset.flags
        heads = str(flags["num_attention_heads"])
        if flags.get("num_query_groups"):
            heads += f"/{flags['num_query_groups']}"
        experts = str(flags.get("num_experts", ""))
        sizes = (str(flags["num_layers"]), str(flags["hidden_size"]))
        table.add_row(preset.name, preset.family, *sizes, heads, experts)
    console = Console()
    console.print(table)
    for name in families():
        if (origin := origin_of(name)) != BUILT_IN:
            console.print(f"family {name} is brought by {origin}", highlight=False)
    return 0
