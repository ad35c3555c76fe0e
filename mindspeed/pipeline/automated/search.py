"""The search for layers of each rank, recomputed layers, schedule and sizes of micro-batches.

``memory``: every rank must stay below (1 - ratio) of the fullest rank of the default, an even
division without recomputation. Recomputation only costs time, so each rank gets the fewest
recomputed layers with which it fits; among all divisions and schedules the fastest is taken. With
recomputation only schedules of whole backwards are: a weight gradient that waits would keep what
was not kept before.

``perf``: no rank may need more than the fullest one of the default (or a given limit); the fastest
division, schedule and sizes of micro-batches are taken.

A rank has at most one layer more or fewer than the average, two from 8 layers on. All divisions are
priced where they are few; else single layers move from rank to rank as long as that helps. The
search is deterministic: ties go to less memory, then to fewer changes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mindspeed.errors import ConfigError
from mindspeed.pipeline.automated.profile import Profile
from mindspeed.pipeline.automated.stages import Price, StageChoice, price_of, stages_of
from mindspeed.pipeline.layout import Layers, evenly
from mindspeed.pipeline.schedule.costs import Costs
from mindspeed.pipeline.schedule.size_search import search_sizes

Mode = Literal["memory", "perf"]
MOST_DIVISIONS = 300
WHOLE, SPLIT = ("1f1b", "interleaved"), ("zb-h1", "nanopipe")
"""Schedules without and with virtual stages, of whole backwards, and of split ones."""
_SAME = 1e-9  # relative difference of times that are equal


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        mode: of the search.
        choice: the best one.
        before: price of the default.
        after: price of the choice.
        default: even division, no recomputation.
        limit: bytes that no rank may exceed.
    """

    mode: Mode
    choice: StageChoice
    before: Price
    after: Price
    default: StageChoice
    limit: float


def search(
    profile: Profile,
    mode: Mode = "memory",
    *,
    ratio: float = 0.2,
    module: str = "layer",
    kinds: Sequence[str] | None = None,
    memory_limit: float | None = None,
) -> Found:
    """The best choice for a profile.

    Args:
        profile: what was measured.
        mode: what is looked for.
        ratio: in memory mode, part of the default's peak that is to be saved.
        module: what recomputed layers compute again.
        kinds: schedules to try; default: Megatron's own, and the one with split backwards.
        memory_limit: bytes of a rank; default: as the mode says.

    Raises:
        ConfigError: no choice stays within the limit (says how far one gets), or the mode does not
            exist for this job.
    """
    if not 0 < ratio <= 1:
        raise ConfigError(f"--save-memory-ratio {ratio} must be above 0 and at most 1")
    if mode == "perf" and profile.chunks > 1:
        raise ConfigError(
            f"--automated-pipeline-perf does not go with {profile.chunks} virtual stages per rank: "
            "sizes of micro-batches are searched for 1F1B; remove the virtual stages, or use "
            "--automated-pipeline"
        )
    if mode == "memory" and any(module not in layer.recompute for layer in profile.layers):
        raise ConfigError(f"the profile does not say what recomputing {module} saves")
    kinds = tuple(kinds or (WHOLE + SPLIT)[profile.chunks > 1 :: 2])
    even = evenly(len(profile.layers), profile.ranks, profile.chunks)
    own = "1f1b" if profile.chunks == 1 else "interleaved"
    default = StageChoice(even, (0,) * profile.ranks, module, own)
    before = price_of(profile, default)
    limit = memory_limit
    if limit is None:
        limit = before.peak * (1 - ratio if mode == "memory" else 1)
    run = _Search(profile, default, limit, recompute=mode == "memory")
    for kind in kinds:
        run.all_divisions(kind)
    if mode == "perf" and profile.micro_batch_size > 1:
        run.sizes()
    if run.best is None:
        raise ConfigError(
            f"no division of the layers fits: {limit:,.0f} bytes are allowed on a rank, the least "
            f"that was found are {run.least:,.0f} (the default needs {before.peak:,.0f}); choose a "
            "smaller --save-memory-ratio or another --recompute-type"
        )
    price, choice = run.best
    return Found(mode, choice, before, price, default, limit)


class _Search:
    """The best choice so far, and the smallest peak seen."""

    def __init__(
        self, profile: Profile, default: StageChoice, limit: float, recompute: bool
    ) -> None:
        self.profile, self.default, self.limit = profile, default, limit
        self.recompute = recompute
        self.best: tuple[Price, StageChoice] | None = None
        self.least = float("inf")
        self._seen: dict[StageChoice, tuple[float, ...]] = {}

    def all_divisions(self, kind: str) -> None:
        """Try the divisions with a schedule."""
        divisions = list(_divisions(self.default.layers, MOST_DIVISIONS))
        if len(divisions) < MOST_DIVISIONS:
            for counts in sorted(divisions, key=self._work):
                if self.best and self._work(counts) > self.best[0].makespan:
                    break
                self._try(counts, kind)
            return
        for start in (_counts(self.default.layers), self._balanced()):
            self._descend(start, kind)

    def sizes(self) -> None:
        """Try micro-batches of different sizes with the best division for 1F1B."""
        profile = self.profile
        start = replace(self.best[1] if self.best else self.default, kind="1f1b")
        stages = stages_of(profile, start)
        forward = sum(stage.forward for stage in stages) / profile.ranks
        backward = sum(stage.backward for stage in stages) / profile.ranks
        times = [stage.forward + stage.backward for stage in stages]
        samples = profile.num_microbatches * profile.micro_batch_size
        costs = Costs(
            forward=forward / profile.micro_batch_size,
            input_gradient=backward / profile.micro_batch_size,
            weight_gradient=0.0,
            latency=profile.latency,
            stage_shares=tuple(time / (forward + backward) for time in times),
        )
        allowed = [
            (self.limit - stage.static - stage.transient) * profile.micro_batch_size / stage.kept
            for stage in stages
            if stage.kept
        ]
        found = search_sizes(
            profile.ranks,
            1,
            profile.num_microbatches,
            samples,
            costs,
            min(allowed, default=float("inf")),
        )
        self._consider(replace(start, sizes=found))

    def _descend(self, start: tuple[int, ...], kind: str) -> None:
        current, price = start, self._try(start, kind)
        while True:
            options = [(self._try(counts, kind), counts) for counts in self._moves(current)]
            best = min(options, default=(price, current))
            if best[0] >= price:
                return
            price, current = best

    def _moves(self, counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """One layer from the rank with most work, or to the rank with least."""
        work = [self._work_of(rank, counts) for rank in range(len(counts))]
        most, least = work.index(max(work)), work.index(min(work))
        pairs = {(most, r) for r in range(len(counts))} | {(r, least) for r in range(len(counts))}
        for source, target in sorted(pairs):
            if source != target and counts[source] > 0:
                moved = list(counts)
                moved[source] -= 1
                moved[target] += 1
                yield tuple(moved)

    def _balanced(self) -> tuple[int, ...]:
        """Layers from the rank with most work to the one with least, until that is no better."""
        counts = _counts(self.default.layers)
        for _ in range(len(self.profile.layers)):
            better = min(self._moves(counts), key=self._work, default=counts)
            if self._work(better) >= self._work(counts):
                break
            counts = better
        return counts

    def _work(self, counts: tuple[int, ...]) -> float:
        """Seconds that the slowest rank computes in a step: no schedule is faster."""
        return max(self._work_of(rank, counts) for rank in range(len(counts)))

    def _work_of(self, rank: int, counts: tuple[int, ...]) -> float:
        choice = replace(self.default, layers=_layers(counts, self.profile.chunks))
        own = stages_of(self.profile, choice)[rank :: self.profile.ranks]
        return self.profile.num_microbatches * sum(one.forward + one.backward for one in own)

    def _try(self, counts: tuple[int, ...], kind: str) -> tuple[float, ...]:
        layers = _layers(counts, self.profile.chunks)
        return self._consider(replace(self.default, layers=layers, kind=kind))

    def _consider(self, choice: StageChoice) -> tuple[float, ...]:
        """Recompute as little as fits, and remember the choice if it is the best.

        Returns:
            By which choices are compared: fits, seconds, bytes.
        """
        if choice in self._seen:
            return self._seen[choice]
        price, fitting = self._fitted(choice)
        self.least = min(self.least, price.peak)
        fits = price.peak <= self.limit
        key = (0.0, price.makespan, price.peak) if fits else (1.0, price.peak, price.makespan)
        self._seen[choice] = key
        if fits and (self.best is None or _better(price, fitting, *self.best)):
            self.best = price, fitting
        return key

    def _fitted(self, choice: StageChoice) -> tuple[Price, StageChoice]:
        price = price_of(self.profile, choice)
        most = [sum(row) for row in choice.layers]
        while self.recompute and choice.kind in WHOLE:
            full = [rank for rank, peak in enumerate(price.peaks) if peak > self.limit]
            again = list(choice.recompute)
            for rank in full:
                again[rank] = self._enough(choice, rank, price)
            again = [min(number, most[rank]) for rank, number in enumerate(again)]
            if again == list(choice.recompute):
                break
            choice = replace(choice, recompute=tuple(again))
            price = price_of(self.profile, choice)
        return price, choice

    def _enough(self, choice: StageChoice, rank: int, price: Price) -> int:
        """The next number of recomputed layers with which ``rank`` may fit."""
        own = stages_of(self.profile, choice)[rank :: self.profile.ranks]
        kept = sum(stage.kept for stage in own)
        held = price.activations[rank] / kept if kept else 0.0
        for number in range(choice.recompute[rank] + 1, sum(choice.layers[rank]) + 1):
            recompute = list(choice.recompute)
            recompute[rank] = number
            stages = stages_of(self.profile, replace(choice, recompute=tuple(recompute)))
            own = stages[rank :: self.profile.ranks]
            # Not less than what is needed, so that the smallest number is not passed over.
            if sum(one.static for one in own) + (held - 1) * sum(o.kept for o in own) <= self.limit:
                return number
        return sum(choice.layers[rank])


def _better(price: Price, choice: StageChoice, best_price: Price, best: StageChoice) -> bool:
    if abs(price.makespan - best_price.makespan) > _SAME * best_price.makespan:
        return price.makespan < best_price.makespan
    if abs(price.peak - best_price.peak) > _SAME * best_price.peak:
        return price.peak < best_price.peak
    return sum(choice.recompute) < sum(best.recompute)


def _counts(layers: Layers) -> tuple[int, ...]:
    return tuple(map(sum, layers))


def _layers(counts: Sequence[int], chunks: int) -> Layers:
    """Layers of each rank, as evenly as possible on its chunks."""
    return tuple(
        tuple(count // chunks + (chunk < count % chunks) for chunk in range(chunks))
        for count in counts
    )


def _divisions(even: Layers, most: int) -> Iterator[tuple[int, ...]]:
    """Divisions near the even one, in lexical order; at most so many."""
    counts = _counts(even)
    average = sum(counts) / len(counts)
    window = 2 if average >= 8 else 1
    low = [max(int(average) - window, 0)] * len(counts)
    high = [-int(-average // 1) + window] * len(counts)

    def extend(head: tuple[int, ...], left: int) -> Iterator[tuple[int, ...]]:
        rest = len(counts) - len(head)
        if rest == 0:
            yield head
            return
        at = len(head)
        smallest = max(low[at], left - sum(high[at + 1 :]))
        largest = min(high[at], left - sum(low[at + 1 :]))
        for count in range(smallest, largest + 1):
            yield from extend((*head, count), left - count)

    yield from itertools.islice(extend((), sum(counts)), most)
