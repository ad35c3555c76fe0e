"""A distributed attention as data: which rank sends which rows to whom when, and computes what.

A plan has stages. In a stage, keys and values arrive (``kv``), every rank computes its part of the
mask (``work``), and in the backward pass gradients of keys and values leave (``dkv``). Queries may
be sent as well (``q``); then partial results return to the owner of the queries after the work.

Everything is written in positions of the sequence, so a plan can be drawn, priced
(:mod:`~mindspeed.attention.cost_metrics`), proven (:mod:`~mindspeed.attention.check`) and executed
(:mod:`~mindspeed.attention.executor`) without knowing which algorithm made it. Planners compute
with integers and deterministic order only: all ranks derive the same plan from the same mask,
without communication.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mindspeed.attention.mask import Mask, Region
from mindspeed.attention.sequence_sharding import Range, Ranges, SequenceSharding

OWN = -1
"""Buffer of the rows that a rank owns."""


def saved_buffer(stage: int) -> int:
    """Buffer of the backward pass that holds what arrived in a stage of the forward pass."""
    return -2 - stage


class Transfer(NamedTuple):
    """Rows of keys and values, of queries, or of gradients, sent from one rank to another.

    Attributes:
        src: Sending rank.
        dst: Receiving rank.
        ranges: Positions of the rows.
        buffer: Where the sender holds them: ``OWN``, ``saved_buffer(stage)``, or the stage of this
            pass in which they arrived. Gradients are always the sum that the sender has so far.
    """

    src: int
    dst: int
    ranges: Ranges
    buffer: int = OWN


@dataclass(frozen=True)
class Stage:
    """One step of all ranks.

    Attributes:
        kv: Keys and values that arrive before the work.
        work: For each rank the regions of the mask that it computes.
        dkv: Gradients of keys and values that leave after the work; the receiver adds them to its
            own.
        posted: The stage at whose start the transfers of ``kv`` and ``q`` are started, an earlier
            one; -1 where there are none.
        values_only: Only values are sent: the keys were saved in the forward pass.
        q: Queries that arrive before the work, from their owners. Results return after the work:
            in the forward pass partial outputs with their log-sum-exp; in the backward pass, where
            the gradients of the outputs are sent along with the queries, gradients of the queries.
    """

    kv: tuple[Transfer, ...]
    work: tuple[tuple[Region, ...], ...]
    dkv: tuple[Transfer, ...] = ()
    posted: int = -1
    values_only: bool = False
    q: tuple[Transfer, ...] = ()

    def kv_to(self, rank: int) -> tuple[Transfer, ...]:
        """Keys and values that a rank receives, in the order of its buffer."""
        return received_by(self.kv, rank)

    def q_to(self, rank: int) -> tuple[Transfer, ...]:
        """Queries that a rank receives, in the order of its buffer."""
        return received_by(self.q, rank)


def received_by(transfers: Iterable[Transfer], rank: int) -> tuple[Transfer, ...]:
    """The transfers to a rank, by source."""
    return tuple(sorted((t for t in transfers if t.dst == rank), key=operator.attrgetter("src")))


def sent_by(transfers: Iterable[Transfer], rank: int) -> tuple[Transfer, ...]:
    """The transfers from a rank, by destination."""
    return tuple(sorted((t for t in transfers if t.src == rank), key=operator.attrgetter("dst")))


def last_use(stages: Sequence[Stage], rank: int) -> list[int]:
    """The last stage that computes with, or sends, what arrived in a stage; one for each."""
    last = list(range(len(stages)))
    for stage in stages:
        for transfer in stage.kv:
            if transfer.src == rank and transfer.buffer >= 0:
                last[transfer.buffer] = max(last[transfer.buffer], stage.posted)
    return last


@dataclass(frozen=True)
class Plan:
    """Attention over one sequence by all ranks of a context-parallel group.

    Attributes:
        algorithm: Name for messages and pictures.
        mask: The pairs to compute.
        sharding: The positions that every rank owns.
        forward: Stages of the forward pass.
        backward: Stages of the backward pass.
        saved_kv: Stages of the forward pass whose keys and values are saved for backward.
        saved_k: Stages of the forward pass whose keys, but not their values, are saved.
    """

    algorithm: str
    mask: Mask
    sharding: SequenceSharding
    forward: tuple[Stage, ...]
    backward: tuple[Stage, ...]
    saved_kv: tuple[int, ...] = ()
    saved_k: tuple[int, ...] = ()

    @property
    def ranks(self) -> int:
        """Size of the group."""
        return self.sharding.ranks

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the plan; differs between ranks only if they made different plans."""
        parts = (self.sharding, self.forward, self.backward, self.saved_kv, self.saved_k)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    @functools.cached_property
    def derived(self) -> dict[Any, Any]:
        """Per-plan cache of what other modules compute from the plan, keyed by them."""
        return {}


def work_on(mask: Mask, queries: Iterable[Range], keys: Sequence[Range]) -> tuple[Region, ...]:
    """The regions of a mask restricted to some queries and keys, by ascending query."""
    return tuple(sorted(_cropped(mask, queries, keys)))


def _cropped(mask: Mask, queries: Iterable[Range], keys: Sequence[Range]) -> Iterator[Region]:
    for q0, q1 in queries:
        for region in mask.regions_of(q0, q1):
            for k0, k1 in keys:
                if k0 < region.k1 and region.k0 < k1 and (part := region.crop(q0, q1, k0, k1)):
                    yield part
