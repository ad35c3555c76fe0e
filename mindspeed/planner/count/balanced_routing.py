"""Route tokens to experts by a fixed rule, so that loads are known without values.

Balanced: numbers of tokens differ by at most one between experts; the k experts of a token are
drawn at random, so as many of them share a rank as with a uniform router. With ``imbalance`` f > 1
the experts of the first expert-parallel rank get f times the mean, the others share the rest; where
tokens choose groups of experts first, within the groups of that rank. All ranks route equally.

The rule sets the logits of the routers; everything after them is unchanged: scores, top-k, groups,
capacity, drops, padding. FakeTensors get the values (:mod:`known_values`), real tensors are
overwritten, so a real job can route by the same rule.

    with planned_rank(args, rank) as own: ...                # one rank on FakeTensors
    with balanced_routing(args): count_here(args, rank)      # real ranks
"""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

from mindspeed.errors import ConfigError
from mindspeed.job import MixtureOfExperts, Parallel
from mindspeed.journal import Journal
from mindspeed.planner.count.fake_world import fake_world
from mindspeed.planner.count.known_values import KnownValues, assume, share_bytes
from mindspeed.planner.count.planned_tensors import PlannedTensors
from mindspeed.planner.expert_loads import loads_of

MARGIN = 64.0
"""Logit of chosen experts; that of others is 0. Noise of gates does not change the choice."""
MOST_BLOCKS = 128
"""Maximum number of draws for the tokens of a rank."""


@dataclass(frozen=True)
class Balance:
    """Assumed loads of experts.

    Attributes:
        experts: experts E of a layer.
        topk: experts k of a token.
        ranks: expert-parallel ranks.
        imbalance: load of the first rank over the mean, >= 1.
        groups: groups of equally many experts.
        group_topk: number of groups that contain the experts of a token.
    """

    experts: int
    topk: int
    ranks: int = 1
    imbalance: float = 1.0
    groups: int = 1
    group_topk: int = 1

    @classmethod
    def of(cls, args: argparse.Namespace, imbalance: float = 1.0) -> Balance:
        """Build the assumption from final values.

        Raises:
            ConfigError: the imbalance is not possible.
        """
        moe, ranks = MixtureOfExperts.of(args), Parallel.of(args).expert
        found = cls(moe.count, moe.topk, ranks, imbalance, moe.groups, moe.group_topk)
        if not 1 <= imbalance <= found.most:
            raise ConfigError(
                f"an imbalance of {imbalance:g} is not possible: with {moe.count} experts on "
                f"{ranks} ranks, {moe.topk} to a token, in {moe.groups} groups it is from 1 to "
                f"{found.most:g}"
            )
        return found

    @property
    def most(self) -> float:
        """The largest load of a rank over the mean that the choice of experts allows."""
        if self._whole_groups:
            return min(self.ranks, self.groups / self.group_topk)
        within = self.ranks / self.groups
        return min(within, self.experts / self.groups / (self.topk / self.group_topk))

    @property
    def _whole_groups(self) -> bool:
        """Whether a rank has all experts of its groups."""
        return self.groups > 1 and self.ranks <= self.groups

    def choice(self, tokens: int) -> torch.Tensor:
        """The experts of each of a rank's tokens, int64 ``[tokens, topk]``."""
        if self.groups == 1:
            return _spread(tokens, self.topk, self.loads)
        size, each = self.experts // self.groups, self.topk // self.group_topk
        hot_groups = max(1, self.groups // self.ranks)
        whole = self._whole_groups
        group = _spread(
            tokens,
            self.group_topk,
            lambda n: _hot(
                n * self.group_topk, self.groups, hot_groups, self.imbalance if whole else 1.0
            ),
        )
        found = torch.empty(tokens, self.group_topk, each, dtype=torch.int64)
        for index in range(self.groups):
            mine = group == index
            count = int(mine.sum())
            factor = self.imbalance if index == 0 and not whole else 1.0
            local = size if whole else self.experts // self.ranks
            loads = functools.partial(_hot_of, each, size, local, factor)
            found[mine] = index * size + _spread(count, each, loads)
        return found.view(tokens, -1)

    def loads(self, tokens: int) -> torch.Tensor:
        """Tokens of each expert among the first ``tokens``, int64 ``[experts]``."""
        ranks, local, slots = self.ranks, self.experts // self.ranks, tokens * self.topk
        if self.imbalance == 1:  # what does not divide is spread over the ranks
            return _even(slots, self.experts).view(local, ranks).t().reshape(-1)
        hot = round(slots * self.imbalance / ranks)
        cold = _even(slots - hot, self.experts - local).view(local, ranks - 1)
        return torch.cat([_even(hot, local), cold.t().reshape(-1)])


def _hot_of(each: int, parts: int, hot: int, factor: float, tokens: int) -> torch.Tensor:
    return _hot(tokens * each, parts, hot, factor)


def _hot(slots: int, parts: int, hot: int, factor: float) -> torch.Tensor:
    """Slots of each part, int64 ``[parts]``; the first ``hot`` get ``factor`` times the mean."""
    if factor == 1:
        return _even(slots, parts)
    first = round(slots * factor * hot / parts)
    return torch.cat([_even(first, hot), _even(slots - first, parts - hot)])


def _even(slots: int, parts: int) -> torch.Tensor:
    """Slots of each part, int64 ``[parts]``; none of them falls when there are more slots."""
    return torch.div(slots + parts - 1 - torch.arange(parts), parts, rounding_mode="floor")


def _spread(tokens: int, topk: int, loads: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """Draw different parts for each token, int64 ``[tokens, topk]``.

    Args:
        topk: parts of a token.
        loads: tokens of each part among the first n tokens, int64 ``[parts]``.
    """
    found, random = [], torch.Generator().manual_seed(tokens)
    before = loads(0)
    block = max(len(before), -(-tokens // MOST_BLOCKS))
    for start in range(0, tokens, block):
        count = min(block, tokens - start)
        after = loads(start + count)
        order = torch.randperm(len(before), generator=random)
        # Slots of one part are consecutive, so that they belong to different tokens.
        slots = order.repeat_interleave((after - before)[order])
        found.append(slots.view(topk, count).t())
        before = after
    return torch.cat(found) if found else torch.empty(0, topk, dtype=torch.int64)


@functools.lru_cache(maxsize=16)
def logits_of(balance: Balance, tokens: int) -> torch.Tensor:
    """Logits ``[tokens, experts]``, fp32, largest for the experts of each token."""
    chosen = balance.choice(tokens)
    return torch.zeros(tokens, balance.experts).scatter_(1, chosen, MARGIN)


@contextlib.contextmanager
def balanced_routing(args: argparse.Namespace, imbalance: float = 1.0) -> Iterator[None]:
    """Make the routers of this process choose by the rule inside the block."""
    if not MixtureOfExperts.of(args).count:
        yield
        return
    journal = Journal()
    try:
        _patch(Balance.of(args, imbalance), journal)
        yield
    finally:
        journal.undo()


@contextlib.contextmanager
def assumed_routing(args: argparse.Namespace, imbalance: float = 1.0) -> Iterator[None]:
    """Give values to FakeTensors that the routing determines, inside the block."""
    if not MixtureOfExperts.of(args).count:
        yield
        return
    with balanced_routing(args, imbalance), KnownValues():
        yield


@contextlib.contextmanager
def planned_rank(args: argparse.Namespace, rank: int) -> Iterator[argparse.Namespace]:
    """Make this process a global rank of the job, on FakeTensors; yields a copy of its values."""
    imbalance = loads_of(args).imbalance(Parallel.of(args).expert)
    with fake_world(args, rank) as own, PlannedTensors(), assumed_routing(own, imbalance):
        yield own


def _patch(balance: Balance, journal: Journal) -> None:
    from mindspeed.adaptor import watched_calls
    from mindspeed.moe.deepspeed.megatron import RouterForward
    from mindspeed.moe.dispatch.window import WindowDispatcher

    router_class, moe_utils = watched_calls.routing()

    def set_logits(logits: torch.Tensor) -> torch.Tensor:
        with no_dispatch():
            values = logits_of(balance, logits.numel() // balance.experts)
        assume(logits, values)
        return logits

    route, gate_logits, gate_scores = (
        router_class.routing,
        RouterForward._logits,
        RouterForward._scores,
    )

    def routing(router: Any, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(router.expert_bias, FakeTensor):  # updates of a step are far below the margin
            with no_dispatch():
                zero = torch.zeros(balance.experts)
            assume(router.expert_bias, zero)
        return route(router, set_logits(logits), *args, **kwargs)

    def scores(gate: Any, logits: torch.Tensor, gates: torch.Tensor) -> list[torch.Tensor]:
        found = gate_scores(gate, logits, gates)
        for score in found:
            if isinstance(score, FakeTensor):
                set_logits(score)
        return found

    measure, headers = WindowDispatcher.measure, WindowDispatcher._headers
    loads: list[torch.Tensor] = []

    def measured(dispatcher: Any, chunk: Any) -> None:
        loads[:] = [chunk.values["load"]]
        measure(dispatcher, chunk)
        loads.clear()

    def headers_of(dispatcher: Any, rows: torch.Tensor) -> torch.Tensor:
        found = headers(dispatcher, rows)
        if loads and isinstance(found, FakeTensor):  # written into rows without known values
            share_bytes(loads[0], found)
        return found

    owner = "planner"
    journal.set(router_class, "routing", routing, owner=owner)
    journal.set(
        RouterForward, "_logits", lambda *given: set_logits(gate_logits(*given)), owner=owner
    )
    journal.set(RouterForward, "_scores", scores, owner=owner)
    journal.set(WindowDispatcher, "measure", measured, owner=owner)
    journal.set(WindowDispatcher, "_headers", headers_of, owner=owner)
    # Tensors that they collect over micro-batches and layers must not outlive this block.
    journal.set(moe_utils.MoEAuxLossAutoScaler, "main_loss_backward_scale", None, owner=owner)
    journal.set(moe_utils, "_MOE_LAYER_WISE_LOGGING_TRACKER", {}, owner=owner)
