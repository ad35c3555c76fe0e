"""What the actions of a pipeline schedule cost, in any unit of time and memory."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from mindspeed.errors import ConfigError
from mindspeed.pipeline.schedule.actions import Action
from mindspeed.pipeline.schedule.pairs import pair_seconds
from mindspeed.pipeline.schedule.plan import Plan
from mindspeed.ranges import Range, number


@dataclass(frozen=True)
class Costs:
    """Times of one micro-batch through ALL stages of one rank; a stage takes 1/v of them.

    Attributes:
        forward: tF.
        input_gradient: tI.
        weight_gradient: tW; a whole backward takes tI + tW.
        recompute: tR; as forward by default.
        exchange: one collective of all layers of a rank that a pair hides: a forward has two of
            them and a backward two more.
        layers: of a rank, for the length of a pair.
        rows_again: the experts of a backward get their rows by a collective more, beside their
            input gradients (zero memory, level0).
        latency: from the end of an action to the arrival of its message on another rank.
        reduction: data-parallel reduction of all gradients of one rank.
        transfer: copy of what a pending W keeps to the host or back, of all stages of one rank.
        stage_shares: the part of a rank's time and activations that each stage takes; 1/v each by
            default.
        weight_share: part of the activations that a pending W keeps.
        input_share: part of the activations that a forward with ``Fc`` keeps.
    """

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0
    recompute: float | None = None
    latency: float = 0.0
    reduction: float = 0.0
    transfer: float = 0.0
    stage_shares: tuple[float, ...] | None = None
    weight_share: float = 1.0
    input_share: float = 0.0
    exchange: float = 0.0
    layers: int = 1
    rows_again: bool = False

    def share(self, plan: Plan, stage: int) -> float:
        """The part of its rank's time and activations that ``stage`` takes."""
        if self.stage_shares is not None:
            return self.stage_shares[stage]
        return 1.0 / plan.placement.chunks

    def seconds(self, plan: Plan, action: Action) -> float:
        """Duration of ``action`` on its rank; actions in the background take 0."""
        if action.microbatch is None:
            return 0.0
        return (
            self._rank_time(action.op)
            * self.share(plan, action.stage)
            * plan.size(action.microbatch)
        )

    def pair_seconds(self, plan: Plan, forward: Action, backward: Action) -> float:
        """Duration of two actions at the same time; the longer stage decides where they differ."""
        assert forward.microbatch is not None and backward.microbatch is not None
        share = max(self.share(plan, one.stage) for one in (forward, backward))
        size = max(plan.size(one.microbatch or 0) for one in (forward, backward))
        weight = self.weight_gradient if backward.op == "B" else 0.0
        times = self.forward, self.input_gradient, weight, self.exchange
        layers = max(1, round(self.layers * share))
        return pair_seconds(*(time * share * size for time in times), layers, self.rows_again)

    @property
    def forward_alone(self) -> float:
        """Time of a forward of a rank, with the collectives that no pair hides."""
        return self.forward + 2 * self.exchange

    @property
    def input_gradient_alone(self) -> float:
        """The same of input gradients."""
        again = max(0.0, self.exchange - self.input_gradient / 2) if self.rows_again else 0.0
        return self.input_gradient + 2 * self.exchange + again

    @property
    def work(self) -> float:
        """Time of a micro-batch on a rank, without collectives that may be hidden."""
        return self.forward + self.input_gradient + self.weight_gradient

    def _rank_time(self, op: str) -> float:
        again = self.forward if self.recompute is None else self.recompute
        return {
            "F": self.forward_alone,
            "Fc": self.forward_alone,
            "R": again + 2 * self.exchange,
            "B": self.input_gradient_alone + self.weight_gradient,
            "I": self.input_gradient_alone,
            "W": self.weight_gradient,
        }.get(op, 0.0)


def parse_costs(text: str) -> Costs:
    """``31,33,28,2,150``: F, I and W of a rank, then latency and reduction.

    Raises:
        ConfigError: the text is no such list; says what is expected.
    """
    words = text.split(",")
    times = [number(Range(0, 1e12, above=place < 2)) for place in range(5)]
    try:
        if not 3 <= len(words) <= 5:
            raise ValueError
        found = [read(word.strip()) for read, word in zip(times, words, strict=False)]
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise ConfigError(
            f"--pipeline-costs {text}: 3 to 5 numbers with commas are expected: forward, input "
            "gradients, weight gradients, latency, reduction, as in 31,33,28,2,150"
        ) from error
    forward, input_gradient, weight_gradient, latency, reduction = (*found, 0.0, 0.0)[:5]
    return Costs(forward, input_gradient, weight_gradient, latency=latency, reduction=reduction)
