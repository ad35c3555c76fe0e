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
