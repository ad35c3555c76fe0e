"""The recording of a training job: which steps, and what happens at which seam.

    step        around a step of a trainer: its number
    schedule    the forward and backward of all micro-batches, recorded if the step is
    optimizer   its step: a recorded step ends after it

Between recorded steps the model has no hooks.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mindspeed.adaptor.training_steps import TrainingSteps
from mindspeed.compare.collectives import CollectiveRecorder, expected_bytes
from mindspeed.compare.forced import ForcedValues
from mindspeed.compare.megatron import MegatronHooks
from mindspeed.compare.megatron_modules import layers_of_rank, named_modules
from mindspeed.compare.megatron_operators import OperatorHooks
from mindspeed.compare.megatron_optimizer import learning_rate
from mindspeed.compare.names import COLLECTIVES
from mindspeed.compare.noise import Noise
from mindspeed.compare.recorder import BYTES_OF_PIECE, BYTES_OF_SAMPLE, RunRecorder, write_job
from mindspeed.errors import ConfigError
from mindspeed.files import make_dirs


@dataclass(frozen=True)
class RecordOptions:
    """What a job records.

    Attributes:
        directory: Of the recording.
        steps: Numbers of steps, from 0.
        micro_batches: Numbers in a step; empty: all.
        what: Kinds of tensors.
        noise: Number of this run with noise; 0 for a run without.
        level: ``summary``, ``sample`` or ``full``.
        forced: Recording whose values replace this run's; None for a run of its own.
        operators: Modules whose operators are recorded.
        by_sample: Digests of each sample.
    """

    directory: Path
    steps: tuple[int, ...]
    micro_batches: tuple[int, ...]
    what: tuple[str, ...]
    noise: int
    level: str = "summary"
    forced: Path | None = None
    operators: tuple[str, ...] = ()
    by_sample: bool = False


class JobRecording:
    """Records chosen steps of this rank.

    Args:
        options: What to record.
        job: Arguments of the job, for messages of a comparison.
    """

    def __init__(self, options: RecordOptions, job: Mapping[str, Any]) -> None:
        self._options, self._job = options, job
        self._steps = TrainingSteps()
        self._hooks: MegatronHooks | None = None
        self._recorder: RunRecorder | None = None
        self._collectives: CollectiveRecorder | None = None
        self._ends_with_optimizer = False

    @contextlib.contextmanager
    def around_step(self, iteration: int) -> Iterator[None]:
        """Number the step that runs, at the seam ``step``."""
        self._steps.announce(iteration)
        yield

    def with_schedule(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the schedule, at its seam."""
        return self._steps.watched(function, self._step)

    def _step(self, function: Callable[..., Any], given: dict[str, Any]) -> Any:
        number = self._steps.number
        if self._hooks is None:
            self._check_size(given)
        if number not in self._options.steps:
            return function(**given)
        hooks, options = self._prepared(), self._options
        inner = function
        if options.operators:
            operators = OperatorHooks(
                options.directory,
                dist.get_rank(),
                options.operators,
                options.micro_batches,
                self._job if options.level == "full" else None,
            )
            inner = operators.around(function, number, lambda: hooks.micro_batch)
        if COLLECTIVES in options.what:
            self._collectives = CollectiveRecorder(
                number,
                named_modules(given["model"]),
                lambda: hooks.micro_batch,
                hooks.rounds,
            )
            inner = self._watched(inner)
        result = hooks.around(inner, number, given)
        hooks.gradients()
        assert self._recorder is not None
        self._recorder.write_if_not_finite()
        if not self._ends_with_optimizer:
            self._end()
        return result

    def with_optimizer(self, optimizer: Any) -> Any:
        """Watch the optimizer, at its seam."""
        step = optimizer.step
        self._ends_with_optimizer = True

        @functools.wraps(step)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._recorder is None or self._recorder.step is None:
                return step(*args, **kwargs)
            rate = learning_rate(optimizer)
            result = self._watched(step)(*args, **kwargs)
            self._prepared().optimizer(optimizer, rate, result[1])
            self._end()
            return result

        optimizer.step = run
        return optimizer

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose collectives are recorded, if they are in this step; then written."""
        collectives = self._collectives
        if collectives is None:
            return function

        def run(*args: Any, **kwargs: Any) -> Any:
            with collectives.watching():
                result = function(*args, **kwargs)
            collectives.write(self._options.directory, dist.get_rank())
            return result

        return run

    def _check_size(self, given: Mapping[str, Any]) -> None:
        """Say what the recording will take, before the first step.

        Raises:
            ConfigError: The disk has less.
        """
        options, ranks = self._options, dist.get_world_size()
        pieces, values = self._prepared().expected(given)
        size = pieces * BYTES_OF_PIECE + (values if options.level == "full" else 0)
        size += pieces * BYTES_OF_SAMPLE if options.level != "summary" else 0
        if COLLECTIVES in options.what:
            batches = len(options.micro_batches) or given["num_microbatches"]
            size += expected_bytes(layers_of_rank(given["model"]), batches, ranks)
        make_dirs(options.directory)
        free = shutil.disk_usage(options.directory).free
        total = size * ranks * len(options.steps)
        text = (
            f"--record {options.directory}: about {total / 1e6:,.0f} MB, {size / 1e6:.1f} MB a step"
        )
        if dist.get_rank() == 0:
            print(f"{text} and rank", flush=True)
        if total > free:
            raise ConfigError(
                f"{text} and rank, and {free / 1e6:,.0f} MB are free: fewer --record-steps, "
                "--record-micro-batches or --record-what"
            )

    def _prepared(self) -> MegatronHooks:
        """The hooks of this rank, once its groups exist."""
        if self._hooks is None:
            options, rank = self._options, dist.get_rank()
            self._recorder = RunRecorder(
                options.directory, rank, dist.get_world_size(), options.level
            )
            noise = Noise(options.noise) if options.noise else None
            forced = None
            if options.forced is not None:
                forced = functools.partial(ForcedValues, options.forced)
            self._hooks = MegatronHooks(
                self._recorder,
                options.what,
                options.micro_batches,
                noise,
                forced,
                options.by_sample,
            )
            if rank == 0:
                write_job(options.directory, self._job)
        return self._hooks

    def _end(self) -> None:
        self._collectives = None
        if self._recorder is not None:
            self._recorder.end()
