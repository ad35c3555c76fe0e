"""Slots of experts: a permutation for each layer, in a file.

    slots = slots_of(place, ranks=8)         # [slot of expert 0, of expert 1, ...]
    write(path, ranks=8, layers={3: slots})
    read(path).of(layer=3, experts=64, ranks=8)

Slot ``rank * E / ranks + i`` is the i-th local expert of a rank. Experts keep their numbers in the
router, in losses and in checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed.errors import ConfigError
from mindspeed.files import atomic_write_text
from mindspeed.json_fields import Allowed, ListOf, MapOf, Whole, check
from mindspeed.parsing import read_json

_FIELDS: Mapping[str, Allowed] = {
    "experts": Whole(1, 16384),
    "ranks": Whole(1, 16384),
    "layers": MapOf(ListOf(Whole(0, 16383))),
}


def slots_of(place: Sequence[int], ranks: int) -> list[int]:
    """Slot of each expert: those of a rank in ascending order.

    Args:
        place: the rank of each expert.
        ranks: number of ranks.
    """
    local = len(place) // ranks
    taken, slots = [0] * ranks, []
    for rank in place:
        slots.append(rank * local + taken[rank])
        taken[rank] += 1
    return slots


def nearest(place: Sequence[int], before: Sequence[int], ranks: int) -> list[int]:
    """Slots of a placement that move few experts: ranks are alike, so they may change names.

    Args:
        place: the rank of each expert.
        before: slot of each expert now.
        ranks: number of ranks.
    """
    local = len(place) // ranks
    shared = [[0] * ranks for _ in range(ranks)]
    for wanted, slot in zip(place, before, strict=True):
        shared[wanted][slot // local] += 1
    pairs = sorted(
        ((wanted, now) for wanted in range(ranks) for now in range(ranks)),
        key=lambda pair: -shared[pair[0]][pair[1]],
    )
    name: dict[int, int] = {}
    for wanted, now in pairs:
        if wanted not in name and now not in name.values():
            name[wanted] = now
    free = [set(range(rank * local, (rank + 1) * local)) for rank in range(ranks)]
    slots = [-1] * len(place)
    for stays in (True, False):
        for expert, wanted in enumerate(place):
            rank = name[wanted]
            if stays == (before[expert] // local == rank):
                slots[expert] = before[expert] if stays else min(free[rank])
                free[rank].remove(slots[expert])
    return slots


def inverse(slots: Sequence[int]) -> list[int]:
    """Expert of each slot."""
    found = [0] * len(slots)
    for expert, slot in enumerate(slots):
        found[slot] = expert
    return found


def check_permutation(slots: Sequence[int], where: str) -> None:
    """Refuse a map that is no permutation.

    Raises:
        ConfigError: a slot has two experts.
    """
    if sorted(slots) == list(range(len(slots))):
        return
    twice = sorted({slot for slot in slots if slots.count(slot) > 1})
    what = f"slot {twice[0]} has several experts" if twice else f"slot {max(slots)} does not exist"
    raise ConfigError(
        f"{where} is no permutation of the {len(slots)} slots: {what}; "
        "mindspeed moe plan --routing DIR --placement FILE writes one"
    )


@dataclass(frozen=True)
class ExpertSlots:
    """Slots of the experts of each layer.

    Attributes:
        name: of the file, for messages.
        experts: of a layer.
        ranks: that the placement was made for.
        layers: slot of each expert, by number of the layer.
    """

    name: str
    experts: int
    ranks: int
    layers: Mapping[int, tuple[int, ...]]

    def of(self, layer: int) -> tuple[int, ...]:
        """Slots of a layer; a layer that the file does not name has its experts in order."""
        return self.layers.get(layer, tuple(range(self.experts)))


def write(path: Path, ranks: int, layers: Mapping[int, Sequence[int]]) -> None:
    """Write a file that :func:`read` reads."""
    experts = len(next(iter(layers.values())))
    data = {
        "experts": experts,
        "ranks": ranks,
        "layers": {str(layer): list(slots) for layer, slots in sorted(layers.items())},
    }
    atomic_write_text(path, json.dumps(data) + "\n")


def read(path: Path, experts: int, ranks: int) -> ExpertSlots:
    """Read a file of placements.

    Args:
        path: the file.
        experts: of a layer of the model.
        ranks: expert-parallel ranks of the job.

    Raises:
        ConfigError: it is none, is of another job, or a map is no permutation.
    """
    where = f"--moe-expert-placement {path}"
    values = read_json(path, where)
    if not isinstance(values, dict) or set(values) != set(_FIELDS):
        raise ConfigError(f"{where}: it is no file with {', '.join(_FIELDS)}")
    check(values, _FIELDS, where, ConfigError)
    for name, expected in (("experts", experts), ("ranks", ranks)):
        if values[name] != expected:
            raise ConfigError(
                f"{where}: it is for {values[name]} {name}, the job has {expected}: plan this job "
                "with mindspeed moe plan --routing DIR --placement FILE"
            )
    layers: dict[int, tuple[int, ...]] = {}
    for number, slots in values["layers"].items():
        if not number.isdigit() or len(slots) != experts:
            raise ConfigError(f"{where}: layer {number} does not have {experts} slots")
        check_permutation(slots, f"{where}: layer {number}")
        layers[int(number)] = tuple(slots)
    return ExpertSlots(str(path), experts, ranks, layers)
