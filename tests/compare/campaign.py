"""Plants faults in random layouts and says what a comparison makes of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.compare.faults import FAULTS
from tests.compare.job import Runs
from tests.compare.layouts import JOBS, Layout, chosen
from tests.compare.pairs import SAMPLES, Pair


@dataclass(frozen=True)
class Outcome:
    """What a comparison says of a planted fault.

    Attributes:
        fault: Its name.
        layout: In which it was planted.
        seed: Of weights and data.
        found: Name of the tensor; empty if the runs are called equal.
        verdict: Where the fault is, in the comparison's words.
        right: The guilty tensor is named.
    """

    fault: str
    layout: Layout
    seed: int
    found: str
    verdict: str
    right: bool

    @property
    def kind(self) -> str:
        """``right``, ``missed``, ``wrong``."""
        return "right" if self.right else "wrong" if self.found else "missed"


class Campaign:
    """Planted faults, each in a layout at random.

    Args:
        ranks: Runs a function on ranks.
        folder: Of weights and recordings.
        seed: Chooses layouts, weights and data.
        dtype: ``fp32`` or ``bf16``.
        weights: How many sets of weights and data there are.
        samples: Of a step of a job with a fault; four data ranks, and two with stages, which divide
            micro-batches, too, have :data:`SAMPLES`.
    """

    def __init__(
        self,
        ranks: Callable[..., Any],
        folder: Path,
        seed: int = 0,
        dtype: str = "fp32",
        weights: int = 3,
        samples: int = SAMPLES,
    ) -> None:
        self._ranks, self._folder, self._seed = ranks, folder, seed
        self._dtype, self._weights, self._samples = dtype, weights, samples
        self._runs: dict[tuple[str, int, str, str, int], Runs] = {}
        self._pairs: dict[Pair, Path] = {}

    def layout(self, fault: str, most: int = 4) -> tuple[Layout, int]:
        """Where a fault is planted, and the seed of weights and data."""
        planted = FAULTS[fault]
        return chosen(f"{self._seed}/{fault}", planted.job, planted.needs, self._weights, most)

    def outcome(self, fault: str, forced: bool = False, most: int = 4) -> Outcome:
        """Plant a fault on so many ranks at most, and compare."""
        layout, seed = self.layout(fault, most)
        many = "dp4" in layout.tags or {"dp", "pp"} <= layout.tags
        samples = SAMPLES if many else self._samples
        runs = self.runs(FAULTS[fault].job, seed, samples=samples)
        if forced:
            result = runs.compare_forced(layout.ranks, layout.flags, fault)
        else:
            result = runs.compare(runs.record(layout.ranks, layout.flags, fault))
        first = result.first
        found, verdict = (str(first.name), first.verdict) if first else ("", "")
        right = is_named(fault, first, kinds=self._dtype == "fp32")
        return Outcome(fault, layout, seed, found, verdict, right)

    def equal(self, pair: Pair, forced: bool = False) -> Any:
        """Compare a run with one that differs in nothing but its layout."""
        runs, layout = self._runs_of(pair), pair.layout
        if forced:
            return runs.compare_forced(layout.ranks, layout.flags)
        return runs.compare(self._recorded(pair))

    def equal_without_noise(self, pair: Pair) -> Any:
        """The same, without runs that show how large the noise is."""
        return self._runs_of(pair).compare(self._recorded(pair), noise=False)

    def _runs_of(self, pair: Pair) -> Runs:
        return self.runs(pair.job, 1234, pair.model, pair.recorded, pair.samples)

    def _recorded(self, pair: Pair) -> Path:
        """A pair's recording, which is made once."""
        if pair not in self._pairs:
            layout = pair.layout
            self._pairs[pair] = self._runs_of(pair).record(layout.ranks, layout.flags)
        return self._pairs[pair]

    def runs(
        self, job: str, seed: int, model: str = "", recorded: str = "", samples: int = SAMPLES
    ) -> Runs:
        """Recordings of a job, with more flags of the model and of what is recorded."""
        key = (job, seed, model, recorded, samples)
        if key not in self._runs:
            given, dtype = JOBS[job], "--bf16" * (self._dtype == "bf16")
            self._runs[key] = Runs(
                self._ranks,
                self._folder / f"job-{len(self._runs)}",
                f"{given.flags} {model} --seed {seed} {dtype}",
                f"{given.recorded} {recorded}",
                samples,
                given.trusted,
            )
        return self._runs[key]


def is_named(fault: str, first: Any, *, kinds: bool = True) -> bool:
    """Whether the first difference is at the guilty module, or at the very tensor."""
    return first is not None and any(
        _within(first.name.module, module)
        and (not kinds or (first.name.when == when and first.name.what.endswith(what)))
        for when, module, what in FAULTS[fault].expected
    )


def _within(module: str, guilty: str) -> bool:
    """Whether it is this module, or inside of one that ends with ``.*``."""
    inner = guilty.endswith(".*") and f"{module}.".startswith(guilty[:-1])
    return not guilty or module == guilty or inner
