"""Recorded routing: tokens of each expert, and the experts of some tokens, layer by layer.

    recorded = read("routing")               # a folder with a file of each rank of a run
    recorded.check(experts=64, topk=8, layers=[1, 2, 3])
    recorded.layers[3].tokens                # rows of each expert
    recorded.question(3, ranks=8, node=8)    # what a placement is searched for

A file is JSON:

    {"format": 1, "files": 16, "position": 3, "positions": 16, "experts": 64, "topk": 8,
     "layers": {"3": {"tokens": [120, ...], "chosen": [[5, 17], ...]}}}

``position`` is the rank's place among those with other tokens of the same layers.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed.errors import ConfigError
from mindspeed.files import atomic_write_text, make_dirs
from mindspeed.json_fields import ANYTHING, Allowed, ListOf, MapOf, Whole, check
from mindspeed.moe.load.placement import MANY_EXPERTS, PlacementTask, Token
from mindspeed.parsing import read_json

_MOST = 16384
_FIELDS: Mapping[str, Allowed] = {
    "format": Whole(1, 1),
    "files": Whole(1, 1 << 20),
    "position": Whole(0),
    "positions": Whole(1, 1 << 20),
    "experts": Whole(1, _MOST),
    "topk": Whole(1, _MOST),
    "layers": MapOf(ANYTHING),
}
_TOKENS_OF_SEARCH = {True: 512, False: 4096}
"""Tokens that a search reads, with many experts or few."""


@dataclass
class LayerRouting:
    """One layer.

    Attributes:
        tokens: rows of each expert.
        chosen: for some tokens their position and their experts.
    """

    tokens: list[int]
    chosen: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)


@dataclass
class RecordedRouting:
    """Routing of a run.

    Attributes:
        name: of the folder or file, for messages.
        positions: ranks with other tokens of the same layers.
    """

    name: str
    experts: int
    topk: int
    positions: int
    layers: dict[int, LayerRouting] = field(default_factory=dict)

    def check(self, experts: int, topk: int, layers: Collection[int] | None = None) -> None:
        """Refuse the routing of another model.

        Args:
            experts: of a layer of the model.
            topk: experts of a token.
            layers: numbers of the layers with experts; None: not known.

        Raises:
            ConfigError: says what differs.
        """
        given = {"experts": self.experts, "experts of a token": self.topk}
        for what, expected in (("experts", experts), ("experts of a token", topk)):
            if given[what] != expected:
                raise ConfigError(
                    f"{self.name} has {given[what]} {what}, the model {expected}: it was recorded "
                    "with another model; record this one with --moe-record-routing"
                )
        if layers is not None and set(self.layers) != set(layers):
            raise ConfigError(
                f"{self.name} has the layers {_shown(self.layers)}, the model has experts in "
                f"{_shown(layers)}: record this model with --moe-record-routing"
            )

    def question(self, layer: int, ranks: int, node: int, once: bool = True) -> PlacementTask:
        """The placement of a layer's experts.

        Args:
            layer: its number.
            ranks: that share the experts.
            node: ranks of a node.
            once: as for :class:`PlacementTask`.
        """
        found = self.layers[layer]
        tokens: Sequence[Token] = ()
        if ranks > node:
            most = _TOKENS_OF_SEARCH[self.experts > MANY_EXPERTS]
            few = found.chosen[:: max(1, len(found.chosen) // most)]
            tokens = [(self.rank_of(position, ranks), chosen, 1) for position, chosen in few]
        return PlacementTask(found.tokens, ranks, node, tokens, once)

    def rank_of(self, position: int, ranks: int) -> int:
        """The expert-parallel rank that holds the tokens of a position."""
        if ranks > self.positions:
            return position * ranks // self.positions
        return position % ranks


def _shown(layers: Collection[int]) -> str:
    numbers = sorted(layers)
    return ", ".join(map(str, numbers[:8])) + (" ..." if len(numbers) > 8 else "")


def write(
    folder: Path,
    rank: int,
    position: tuple[int, int],
    sizes: tuple[int, int, int],
    layers: Mapping[int, LayerRouting],
) -> Path:
    """Write the file of one rank.

    Args:
        folder: of all ranks' files.
        rank: of this file, in the job.
        position: of its tokens, and number of positions.
        sizes: files of the job, experts of a layer, experts of a token.
        layers: by number; positions in them are not written.
    """
    make_dirs(folder)
    files, experts, topk = sizes
    data = {
        "format": 1,
        "files": files,
        "position": position[0],
        "positions": position[1],
        "experts": experts,
        "topk": topk,
        "layers": {
            str(number): {"tokens": one.tokens, "chosen": [chosen for _, chosen in one.chosen]}
            for number, one in sorted(layers.items())
        },
    }
    path = folder / f"rank-{rank}.json"
    atomic_write_text(path, json.dumps(data, separators=(",", ":")) + "\n")
    return path


def read(path: Path) -> RecordedRouting:
    """Read a folder with the files of all ranks, or one file.

    Raises:
        ConfigError: a file is missing, is none of these, or does not belong to the others.
    """
    files = sorted(path.glob("rank-*.json")) if path.is_dir() else [path]
    if not files:
        raise ConfigError(f"{path} has no rank-*.json, which --moe-record-routing writes")
    found: RecordedRouting | None = None
    expected = 0
    for file in files:
        values = _checked(file)
        sizes = values["experts"], values["topk"], values["positions"]
        if found is None:
            found, expected = RecordedRouting(str(path), *sizes), values["files"]
        elif (found.experts, found.topk, found.positions) != sizes or values["files"] != expected:
            raise ConfigError(f"{file} is of another run than {files[0]}: keep one run in a folder")
        for number, layer in values["layers"].items():
            _add(found, int(number), layer, values["position"])
    assert found is not None
    if path.is_dir() and len(files) != expected:
        raise ConfigError(f"{path} has {len(files)} of the {expected} files of its run")
    return found


def _checked(file: Path) -> dict[str, Any]:
    where = str(file)
    values = read_json(file, where)
    if not isinstance(values, dict) or set(values) != set(_FIELDS):
        raise ConfigError(f"{where} is no file of --moe-record-routing")
    check(values, _FIELDS, where, ConfigError)
    experts, topk = values["experts"], values["topk"]
    layer_fields: dict[str, Allowed] = {
        "tokens": ListOf(Whole(0)),
        "chosen": ListOf(ListOf(Whole(0, experts - 1))),
    }
    for number, layer in values["layers"].items():
        here = f"{where}: layer {number}"
        if not number.isdigit() or not isinstance(layer, dict) or set(layer) != set(layer_fields):
            raise ConfigError(f"{here} is no layer with tokens and chosen")
        check(layer, layer_fields, here, ConfigError)
        if len(layer["tokens"]) != experts or any(len(one) > topk for one in layer["chosen"]):
            raise ConfigError(f"{here} does not have {experts} experts and {topk} of a token")
    return values


def _add(found: RecordedRouting, number: int, layer: Mapping[str, Any], position: int) -> None:
    had = found.layers.setdefault(number, LayerRouting([0] * found.experts))
    had.tokens = [a + b for a, b in zip(had.tokens, layer["tokens"], strict=True)]
    had.chosen += [(position, tuple(chosen)) for chosen in layer["chosen"]]
