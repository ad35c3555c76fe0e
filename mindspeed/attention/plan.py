"""A distributed attention as data: who fetches which keys when, and multiplies what.

A plan has stages. Before the work of a stage, keys and values arrive (``fetch``); in the backward
pass, gradients of keys and values leave after it (``give``). Queries may travel instead
(``queries``): then partial results go back to their owner after the work. Everything is written in
positions of the sequence, so that a plan can be drawn, priced
(:mod:`~mindspeed.attention.figures`), proven (:mod:`~mindspeed.attention.check`) and run
(:mod:`~mindspeed.attention.executor`) without knowing which algorithm made it. Planners use
integers only and no hidden order: all ranks make the same plan of the same mask, without
communication.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mindspeed.attention.layout import Layout, Range, Ranges
from mindspeed.attention.mask import Mask, Region

OWN = -1
"""Buffer of a rank's own rows."""


def kept(stage: int) -> int:
    """Buffer of the backward pass: what arrived in this stage of the forward pass."""
    return -2 - stage


class Move(NamedTuple):
    """Rows of keys and values, or of their gradients, that go from one rank to another.

    Attributes:
        src: The rank that sends.
        dst: The rank that receives.
        ranges: Positions.
        buffer: Where the sender has them: ``OWN``, ``kept(stage)``, or the stage of this pass in
            which they arrived. Gradients are always those that the sender has gathered so far.
    """

    src: int
    dst: int
    ranges: Ranges
    buffer: int = OWN


@dataclass(frozen=True)
class Stage:
    """One step of all ranks.

    Attributes:
        fetch: Keys and values that arrive before the work.
        work: For each rank the parts of the mask that it computes.
        give: Gradients of keys and values that leave after the work; they are added to what the
            receiver has.
        posted: The stage at whose start the fetch is posted; -1 for the stage before this one.
        values_only: Only values arrive: the keys were kept since the forward pass.
        queries: Queries that arrive before the work, from their owners and with the fetch. What
            was computed of them returns after it: in the forward pass partial outputs with their
            log-sum-exp; in the backward pass queries bring gradients of the output along, and
            gradients of queries return.
    """

    fetch: tuple[Move, ...]
    work: tuple[tuple[Region, ...], ...]
    give: tuple[Move, ...] = ()
    posted: int = -1
    values_only: bool = False
    queries: tuple[Move, ...] = ()

    def arriving(self, rank: int) -> tuple[Move, ...]:
        """Keys and values that a rank receives, in the order in which they lie in the buffer."""
        return arriving(self.fetch, rank)

    def asked(self, rank: int) -> tuple[Move, ...]:
        """Queries that a rank receives, in the order in which they lie in the buffer."""
        return arriving(self.queries, rank)


def arriving(moves: Iterable[Move], rank: int) -> tuple[Move, ...]:
    """What a rank receives of an exchange: source by source."""
    return tuple(sorted((m for m in moves if m.dst == rank), key=operator.attrgetter("src")))


def leaving(moves: Iterable[Move], rank: int) -> tuple[Move, ...]:
    """What a rank sends of an exchange: destination by destination."""
    return tuple(sorted((m for m in moves if m.src == rank), key=operator.attrgetter("dst")))


def last_use(stages: Sequence[Stage], rank: int) -> list[int]:
    """For each stage, the last stage at which what arrived then is worked on or sent on."""
    last = list(range(len(stages)))
    for stage in stages:
        for move in stage.fetch:
            if move.src == rank and move.buffer >= 0:
                last[move.buffer] = max(last[move.buffer], stage.posted)
    return last


@dataclass(frozen=True)
class Plan:
    """Attention of one sequence by all ranks of a context-parallel group.

    Attributes:
        algorithm: Name for messages and pictures.
        mask: What is computed.
        layout: Who owns which tokens.
        forward: Stages of the forward pass.
        backward: Stages of the backward pass.
        kept: Stages of the forward pass whose keys and values stay until the backward pass.
        kept_keys: Stages of the forward pass whose keys, but not their values, stay.
    """

    algorithm: str
    mask: Mask
    layout: Layout
    forward: tuple[Stage, ...]
    backward: tuple[Stage, ...]
    kept: tuple[int, ...] = ()
    kept_keys: tuple[int, ...] = ()

    @property
    def ranks(self) -> int:
        """Size of the group."""
        return self.layout.ranks

    @functools.cached_property
    def digest(self) -> str:
        """Equal on all ranks, or they have made different plans."""
        parts = (self.layout, self.forward, self.backward, self.kept, self.kept_keys)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    @functools.cached_property
    def derived(self) -> dict[Any, Any]:
        """What is computed from this plan once, by whom it is needed."""
        return {}


def work_on(mask: Mask, queries: Iterable[Range], keys: Sequence[Range]) -> tuple[Region, ...]:
    """The parts of a mask with these queries and keys, in ascending order of the queries."""
    return tuple(sorted(_cropped(mask, queries, keys)))


def _cropped(mask: Mask, queries: Iterable[Range], keys: Sequence[Range]) -> Iterator[Region]:
    for q0, q1 in queries:
        for region in mask.regions_of(q0, q1):
            for k0, k1 in keys:
                if k0 < region.k1 and region.k0 < k1 and (part := region.crop(q0, q1, k0, k1)):
                    yield part
