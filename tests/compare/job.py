"""Trainings that record, with a planted fault, on the ranks of a pool."""

from __future__ import annotations

import functools
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.compare.faults import FAULTS, SITUATIONS
from tests.support.trainer_job import SETUP, command

NOISE = (1, 2, 3)
LEFT_OUT = {
    "@tied": ("--untie-embeddings-and-output-weights",),
    "@latent": ("--num-query-groups=2",),
}
"""Words among a job's flags, and what each takes out of those of the tiny model."""


def train(flags: str, fault: str = "") -> str | None:
    """Train on this rank; returns the error of a run that was refused."""
    from mindspeed.cli.pretrain import _prepare
    from mindspeed.errors import MindSpeedError
    from mindspeed.training.model import gpt_model
    from mindspeed.training.pretrain import pretrain

    planted = {**FAULTS, **SITUATIONS}[fault] if fault else None

    def provider(*given: Any) -> Any:
        if planted is not None and planted.before is not None:
            planted.before()
        model = gpt_model(*given)
        if planted is not None:
            planted.plant(model, int(os.environ["RANK"]))
        return model

    try:
        words = command(shlex.split(flags))
        for mark in LEFT_OUT.keys() & set(words):
            words = [one for one in words if one not in (mark, *LEFT_OUT[mark])]
        pretrain(_prepare(words, int(os.environ["WORLD_SIZE"])), provider)
    except MindSpeedError as error:
        return f"{type(error).__name__}: {error}"
    return None


class Runs:
    """Recordings of one job, which begin with the same weights.

    Args:
        ranks: of the pool.
        folder: for weights and recordings.
        model: flags of every run.
        recorded: flags of every run that records.
        samples: of a step.
        trusted: flags of the trusted run only.
    """

    def __init__(
        self,
        ranks: Callable[..., Any],
        folder: Path,
        model: str = "",
        recorded: str = "",
        samples: int = 4,
        trusted: str = "",
    ) -> None:
        self._ranks, self.folder, self._model, self._recorded = ranks, folder, model, recorded
        self._count, self._samples, self._own = 0, samples, trusted

    @functools.cached_property
    def _weights(self) -> str:
        path = self.folder / "weights"
        self._train(1, f"{self._model} --train-iters 1 --lr 0 --save {path}")
        return f"--load {path} --finetune --no-load-optim --no-load-rng"

    def _train(self, world: int, flags: str, fault: str = "") -> None:
        given = dict(setup=SETUP, backend=None, timeout=120)
        self.errors = self._ranks(world, train, flags, fault, **given)
        ends = fault in SITUATIONS or fault == "not a number"
        assert ends or set(self.errors) == {None}, self.errors

    def record(self, world: int, flags: str, fault: str = "", at: str = "") -> Path:
        """A recording of a run; its directory."""
        self._count += 1
        path = self.folder / (at or f"run-{self._count}")
        job = f"{self._model} --global-batch-size {self._samples} --train-iters 1 {self._recorded}"
        self._train(world, f"{job} {self._weights} {flags} --record {path}", fault)
        return path

    @functools.cached_property
    def trusted(self) -> Path:
        """The run of one rank, and three more with noise."""
        for number in NOISE:
            self.record(1, f"{self._own} --record-noise {number}", at=f"a/noise-{number}")
        return self.record(1, self._own, at="a")

    @functools.cached_property
    def whole(self) -> Path:
        """A whole recording of the run of one rank."""
        return self.record(1, f"{self._own} --record-level full", at="full")

    @functools.cached_property
    def full(self) -> tuple[Path, str]:
        """The same, with three runs with noise beside, and the flags that force a run to it."""
        path = self.whole
        forced = f"--record-forced {path}"
        for number in NOISE:
            at = f"full/forced-noise-{number}"
            self.record(1, f"{self._own} {forced} --record-noise {number}", at=at)
        return path, forced

    def compare_forced(self, world: int, flags: str, fault: str = "") -> Any:
        """Compare a run with the values of the one of one rank."""
        from mindspeed.compare.recording import read
        from mindspeed.compare.walk import compare

        path, forced = self.full
        other = self.record(world, f"{flags} {forced}", fault)
        noise = [read(path / f"forced-noise-{number}") for number in NOISE]
        return compare(read(path), read(other), noise)

    def compare(self, other: Path, noise: bool = True) -> Any:
        """Compare a recording with the trusted one, whose noise was measured or not."""
        from mindspeed.compare.recording import read
        from mindspeed.compare.walk import compare

        a, runs = self._read
        return compare(a, read(other), runs if noise else ())

    @functools.cached_property
    def _read(self) -> Any:
        from mindspeed.compare.recording import read

        return read(self.trusted), [read(self.trusted / f"noise-{n}") for n in NOISE]
