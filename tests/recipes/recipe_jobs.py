"""Resolves recipes and command lines inside a rank, where Megatron is behind the adaptor."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SETUP = "tests.support.warm"


def resolve_recipes(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What a dry run knows of each recipe; and whether its YAML text gives the same values."""
    return {name: _resolved(name) for name in names}


def _resolved(name: str) -> dict[str, Any]:
    from mindspeed.cli.recipes import text_of
    from mindspeed.errors import MindSpeedError

    try:
        args = _dry_run(name)
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "mine.yaml"
            copy.write_text(text_of(name))
            again = _dry_run(str(copy))
    except MindSpeedError as error:
        return {"error": str(error)}
    return {
        "error": None,
        "values": {name: value for name, value in vars(args).items() if _is_plain(value)},
        "same as its text": vars(args) | {"config": ""} == vars(again) | {"config": ""},
    }


def parameters_of(name: str) -> int:
    """Parameters of the model of a recipe."""
    from mindspeed.training.parameter_counts import count, entries_of_model

    args = _dry_run(name)
    return entries_of_model(args, count(args))


def resolve_advice(names: Sequence[str]) -> dict[str, list[tuple[str, str | None]]]:
    """What a dry run says of a recipe with each flags that it advises: flags and error."""
    from mindspeed import recipes

    lines = {name: [line for line in recipes.advice(name) if "try: " in line] for name in names}
    return {name: [_tried(name, line) for line in found] for name, found in lines.items()}


def _tried(name: str, line: str) -> tuple[str, str | None]:
    from mindspeed.cli.pretrain import _prepare
    from mindspeed.errors import MindSpeedError

    flags = line.removeprefix("try: ").partition("   (")[0]
    try:
        _prepare(["--config", name, "--dry-run", *flags.split()])
    except MindSpeedError as error:
        return flags, str(error)
    return flags, None


def gib_of(name: str) -> float:
    """GiB of the fullest rank of a recipe, as its dry run counts them."""
    from mindspeed.cli.dry_run import counted

    return counted(_dry_run(name), ["--config", name], {}).check.fullest.peak / 2**30


def layers_of_stages(layout: str, stages: int) -> list[int]:
    """Transformer layers of each pipeline stage of a layout."""
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    parsed = PipelineParallelLayerLayout.from_str(layout, stages).layout
    return [sum(layer.name == "decoder" for layer in chunks[0]) for chunks in parsed]


def _is_plain(value: Any) -> bool:
    """Whether a test process can unpickle it without Megatron."""
    return value is None or isinstance(value, bool | int | float | str | list | tuple)


def _dry_run(config: str) -> Any:
    from mindspeed.cli.pretrain import _prepare

    return _prepare(["--config", config, "--dry-run"]).args
