"""The table of contents in docs/architecture.md is true and complete."""

from __future__ import annotations

import re

import pytest

from mindspeed.features.registry import all_features
from tests.architecture.source import PACKAGE, ROOT, room, sources

PAGE = (ROOT / "docs/architecture.md").read_text("utf-8")
MAP = PAGE[PAGE.index("## Where is ...?") : PAGE.index("An algorithm never imports")]
LAYERS = PAGE[PAGE.index("## The layers") : PAGE.index("## Where is ...?")]


def test_every_file_of_the_map_exists() -> None:
    paths = re.findall(r"`([\w/]+(?:/|\.py|\.yaml))`", MAP)
    assert len(paths) > 60
    assert [path for path in paths if not (PACKAGE / path).exists()] == []


def test_the_map_fits_on_a_page() -> None:
    rows = [line for line in MAP.splitlines() if line.startswith("| ")]
    assert len(rows) - 1 <= 40


def test_every_feature_is_in_a_room_of_the_map() -> None:
    names = {feature.__module__.removeprefix("mindspeed.") for feature in all_features()}
    rooms = {name.rpartition(".")[0].replace(".", "/") for name in names}
    assert rooms >= {"features/attention", "features/experts"}
    assert {one for one in rooms if f"`{one}/" not in MAP} == set()


def test_every_room_of_algorithms_is_on_the_map() -> None:
    algorithms = ("attention", "moe", "pipeline", "memory", "tensor_parallel", "planner")
    folders = {
        path.parent.relative_to(PACKAGE).as_posix()
        for path in sources()
        if room(path) in algorithms and path.parent.parent == PACKAGE / room(path)
    }
    assert {one for one in folders if f"`{one}/" not in MAP} == set()


def test_the_layers_name_every_room_in_the_order_of_the_contract() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    height = {
        name.strip(): number
        for number, layer in enumerate(contract["contracts"][0]["layers"])
        for name in layer.split("|")
    }
    shown = re.findall(r"(?<![\w/.])([a-z_]+)(?:/|\.py)(?=[, ]| {2})", LAYERS.partition("```")[2])
    assert set(shown) == {room(path) for path in sources()} - {"__init__", "__main__"}
    assert [height[name] for name in shown] == sorted(height[name] for name in shown)
