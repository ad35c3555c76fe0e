"""List the recipes for --config, or print one to copy and edit.

mindspeed recipes                                 all
mindspeed recipes --family qwen3                  of one model family
mindspeed recipes show llama2-7b > mine.yaml      one, as a file for --config
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

HELP = "list the recipes for --config, or print one"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("action", nargs="?", choices=("list", "show"), default="list")
    add("name", nargs="?", help="name of the recipe to show")
    add("--family", help="only recipes of this model family")


def run(args: argparse.Namespace) -> int:
    """Print the list or one recipe."""
    from mindspeed.errors import ConfigError

    if args.action == "show":
        if args.name is None:
            raise ConfigError("show which recipe? mindspeed recipes show llama2-7b")
        print(text_of(args.name), end="")
        return 0
    _print_list(args.family)
    return 0


def text_of(name: str) -> str:
    """A recipe as the text of a file for ``--config``.

    Raises:
        ConfigError: there is none of that name.
    """
    from mindspeed import recipes

    if name in recipes.files():
        return recipes.path(name).read_text("utf-8")
    import mindspeed.megatron_adaptor  # noqa: F401  (before anything of Megatron)
    from mindspeed.training.arguments import build_parser
    from mindspeed.training.recipe import find, to_yaml

    sections = find(name, build_parser())
    flags = recipes.table()[name]
    head = (
        f"# {name}: {_layout(flags)}\n"
        f"# mindspeed {_command(flags)} --config FILE --data-path PREFIX --tokenizer-model DIR\n"
        f"# flags of the model: mindspeed models {flags['model']}\n"
    )
    head += "".join(f"# {line}\n" for line in recipes.advice(name))
    return head + to_yaml(sections)


def _command(flags: Mapping[str, Any]) -> str:
    return "finetune" if "lora_r" in flags else "pretrain"


def _layout(flags: Mapping[str, Any]) -> str:
    """``32 devices = TP 4 x PP 4 x DP 2``."""
    tp = flags.get("tensor_model_parallel_size", 1)
    pp = flags.get("pipeline_model_parallel_size", 1)
    ep = flags.get("expert_model_parallel_size", 1)
    devices = flags["devices"]
    experts = f", experts over {ep}" if ep > 1 else ""
    return f"{devices} devices = TP {tp} x PP {pp} x DP {devices // (tp * pp)}{experts}"


def _print_list(family: str | None) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from mindspeed import recipes
    from mindspeed.errors import ConfigError
    from mindspeed.models.families import families
    from mindspeed.models.presets import presets

    if family is not None and family not in families():
        raise ConfigError(f"--family {family} is not one of {', '.join(families())}")
    shown = Table("recipe", "layout", "type", "sequence", "batch", box=SIMPLE_HEAD)
    for name, flags in recipes.table().items():
        if family in (None, presets()[flags["model"]].family):
            precision = next((kind for kind in ("fp16", "bf16") if flags.get(kind)), "fp32")
            sizes = (str(flags["seq_length"]), str(flags["global_batch_size"]))
            shown.add_row(name, _layout(flags), precision, *sizes)
    console = Console()
    console.print(shown)
    if family is None:
        console.print("files: " + ", ".join(recipes.files()), highlight=False)
