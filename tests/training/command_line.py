"""Parses command lines inside a rank, where Megatron is imported behind the adaptor."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def parsed(flags: list[str], recipe: str | None = None, ranks: int = 1) -> dict[str, Any]:
    """What a command line resolves to: values, or the error; and the dumped recipe."""
    import tempfile

    from mindspeed.errors import MindSpeedError
    from mindspeed.training.arguments import build_parser
    from mindspeed.training.recipe import dump, parse_with_recipe
    from mindspeed.training.resolve import resolve

    with tempfile.TemporaryDirectory() as folder:
        if recipe is not None:
            path = Path(folder) / "recipe.yaml"
            path.write_text(recipe)
            flags = ["--config", str(path), *flags]
        parser = build_parser()
        try:
            args = parse_with_recipe(flags, parser)
            text = dump(args, parser)
            resolve(args, ranks)
        except MindSpeedError as error:
            return {"error": str(error).replace(f"{folder}/", "")}
    return {"error": None, "values": vars(args), "recipe": text}


def parse_all(cases: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """:func:`parsed` for many command lines in one process."""
    return [parsed(*case) for case in cases]


def range_report() -> dict[str, Any]:
    """Numbers of the trainer's parser without a range, and bad ones that a door lets through."""
    from mindspeed.errors import MindSpeedError
    from mindspeed.ranges import range_of, whole_number
    from mindspeed.training.arguments import build_parser, parse
    from mindspeed.training.flag_types import layer_pattern, pair
    from mindspeed.training.megatron_flags import MEGATRON_RANGES
    from mindspeed.training.recipe import recipe_words, section_of

    parser = build_parser()
    plain = (int, float, whole_number, pair, layer_pattern)
    flags = {action.dest: action for action in parser._actions}
    numbers = {name: range_of(action) for name, action in flags.items() if range_of(action)}
    sections = section_of(parser)
    found: dict[str, Any] = {
        "numbers": len(numbers),
        "undeclared": [n for n, a in flags.items() if a.type in plain and not a.choices],
        "stale": sorted(set(MEGATRON_RANGES) - set(flags)),
        "defaults": [n for n, limits in numbers.items() if limits.problem(flags[n].default)],
        "command line": [],
        "recipe": [],
        "Python": [],
    }

    def lets_through(door: str, name: str, value: object) -> None:
        try:
            if door == "Python":
                parser.set_defaults(**{name: value})
                parse([], parser)
            elif door == "recipe":
                if name in sections:
                    parse(recipe_words({sections[name][0]: {name: value}}, parser), parser)
                else:
                    return
            else:
                parse([f"{flags[name].option_strings[0]}={value}"], parser)
        except MindSpeedError as error:
            assert "\n" not in str(error), error
            return
        finally:
            parser.set_defaults(**{name: None})
        found[door].append((name, value))

    for name, limits in numbers.items():
        wrong = (limits.low - 1, limits.high + 1, limits.low * 2 - 3, float("nan"), float("inf"))
        for value in wrong:
            if limits.problem(value):
                for door in ("command line", "recipe", "Python"):
                    lets_through(door, name, value)
    return found
