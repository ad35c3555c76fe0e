"""The training loop: steps, log, validation, checkpoints, and the reasons to stop.

Early stops (SIGTERM, time limits) are a vote, so that all ranks stop after the same iteration: one
all-reduce of three numbers (reason, time, how long a step takes). The slowest step also determines
the iteration of the next vote, about once a second, so that short steps have no overhead.
"""

from __future__ import annotations

import argparse
import gc
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    get_num_microbatches,
    update_num_microbatches,
)

from mindspeed import device, session
from mindspeed.built_model import TrainedModel
from mindspeed.checkpoint.options import CheckpointOptions
from mindspeed.checkpoint.save import Saver
from mindspeed.errors import ConfigError
from mindspeed.flags import read
from mindspeed.job import Batch, Schedule, Sharding, TrainState
from mindspeed.session.reached import describe
from mindspeed.training.data import Reader
from mindspeed.training.forward_step import ForwardStep, Reports, checked, sum_reports
from mindspeed.training.log import Log, mean_reports
from mindspeed.training.options import LoggingOptions, TrainingOptions
from mindspeed.training.sinks import RESERVED
from mindspeed.training.step import Trainer
from mindspeed.training.token_counts import TokenCounter

SECONDS_BETWEEN_VOTES = 1.0
MAX_STEPS_BETWEEN_VOTES = 1000


class Stopping:
    """Checked after every iteration; use as a context manager, which installs the signal handler.

    Args:
        on_signal: stop on SIGTERM.
        minutes: stop after this time.
    """

    def __init__(self, *, on_signal: bool, minutes: float | None) -> None:
        self._on_signal = on_signal and threading.current_thread() is threading.main_thread()
        self._active = on_signal or minutes is not None
        self._deadline = None if minutes is None else time.monotonic() + 60 * minutes
        self._signalled = False
        self._before: Any = None
        self._steps_to_vote = 1
        self._last_vote: float | None = None
        self._steps_since_vote = 0

    def __enter__(self) -> Stopping:
        if self._on_signal:
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._on_signal:
            signal.signal(signal.SIGTERM, self._before)

    def reason(self) -> str | None:
        """Why to stop after this iteration, the same on all ranks, or None. Collective."""
        if not self._active:
            return None
        self._steps_since_vote += 1
        if self._steps_since_vote < self._steps_to_vote:
            return None
        return self._vote()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True

    def _vote(self) -> str | None:
        now = time.monotonic()
        late = self._deadline is not None and now >= self._deadline
        step = 0.0
        if self._last_vote is not None:
            step = (now - self._last_vote) / self._steps_since_vote
        where = device.current().torch_device()
        votes = torch.tensor([self._signalled, late, step], dtype=torch.float32, device=where)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        signalled, late_somewhere, slowest = votes.tolist()
        self._last_vote, self._steps_since_vote = now, 0
        steps = SECONDS_BETWEEN_VOTES / slowest if slowest else 1
        self._steps_to_vote = int(min(max(1, steps), MAX_STEPS_BETWEEN_VOTES))
        if signalled:
            return "SIGTERM received"
        return "time is up (--exit-duration-in-mins)" if late_somewhere else None


def train(
    args: argparse.Namespace,
    model: TrainedModel,
    readers: Sequence[Reader | None],
    held_out: Mapping[str, Sequence[Reader | None]],
    state: TrainState,
    saver: Saver | None,
    counter: TokenCounter,
    forward_step: ForwardStep,
) -> TrainState:
    """Train from ``state`` to the end or an early stop.

    Args:
        args: final values.
        model: the model, its optimizer and its schedule.
        readers: training micro-batches per pipeline stage of this rank.
        held_out: the same for ``validation`` (used during training) and ``test`` (at the end).
        state: how far the run is.
        saver: writes checkpoints, or None.
        counter: counts the tokens that the training readers read.
        forward_step: computes the loss of one micro-batch.

    Returns:
        How far it came.
    """
    before = getattr(forward_step, "before", None)
    trainer = Trainer(args, model, checked(forward_step, args, RESERVED), before)
    log = Log(args, model, state.iteration, counter)
    batch, schedule = Batch.of(args), Schedule.of(args)
    options, logging = read(TrainingOptions, args), read(LoggingOptions, args)
    save_interval = read(CheckpointOptions, args).save_interval
    gathering = _ParameterGathering(args, model)
    for chunk in model.chunks:
        chunk.train()
    if options.manual_gc:
        gc.disable()
    stopping = Stopping(
        on_signal=options.exit_signal_handler, minutes=options.exit_duration_in_mins
    )
    seams = session.install().seams
    judged, reason = False, None

    def evaluated(kind: str, state: TrainState) -> TrainState:
        means = evaluate(args, model, trainer, held_out[kind])
        log.report_held_out(kind, state.iteration, means)
        return state.after_evaluation(schedule.evaluation_steps * batch.whole)

    with seams.train.around(), stopping:
        while state.iteration < schedule.iterations and reason is None:
            _ramp_up_batch(state, saver, gathering, log)
            with seams.step.around(state.iteration + 1):
                result = trainer.step(readers, state.iteration + 1)
            if not judged and not result.skipped:
                judged = True
                _judge_features(log, logging.features_in_vain)
            gathering.after_step(result.skipped)
            samples = batch.samples_of(get_num_microbatches())
            state = state.after_step(samples)
            iteration = state.iteration
            log.add(result, samples)
            if iteration % logging.log_interval == 0 or iteration == schedule.iterations:
                log.report(state)
            interval = schedule.evaluation_interval
            if "validation" in held_out and interval and iteration % interval == 0:
                with log.not_counted(), gathering.paused():
                    state = evaluated("validation", state)
            _collect_garbage(options, iteration)
            reason = stopping.reason() or _exit_interval(options, iteration)
            if saver is not None:
                saver.poll()
                if save_interval and iteration % save_interval == 0:
                    _save(saver, state, gathering, log)
    gathering.stop()
    if warning := trainer.skipped.at_end(state.iteration):
        log.message(warning)
    if "test" in held_out and reason is None:
        state = evaluated("test", state)
    if saver is not None:
        saver.finish(state)
    if reason:
        log.message(f"stopping after iteration {state.iteration}: {reason}")
    log.close(state.iteration)
    return state


def evaluate(
    args: argparse.Namespace,
    model: TrainedModel,
    trainer: Trainer,
    readers: Sequence[Reader | None],
) -> dict[str, float]:
    """Mean reports over ``--eval-iters`` global batches; empty on ranks without the last stage."""
    for chunk in model.chunks:
        chunk.eval()
    # All validation batches have the full size, also while the training batch still grows.
    full = Batch.of(args).micro_batches
    sums: Reports = {}
    for _ in range(Schedule.of(args).evaluation_steps):
        reports = sum_reports(trainer.evaluate(readers, full))
        sums = {name: sums.get(name, 0) + pair for name, pair in reports.items()}
    for chunk in model.chunks:
        chunk.train()
    return mean_reports([sums] if sums else [])


class _ParameterGathering:
    """Switches the overlapped parameter all-gather (``--overlap-param-gather``) on and off.

    It starts with the second step, because the first finds its parameters complete, and pauses
    while something else reads the parameters.
    """

    def __init__(self, args: argparse.Namespace, model: TrainedModel) -> None:
        self._model = model
        sharding = Sharding.of(args)
        self._wanted = sharding.distributed_optimizer and sharding.overlap_parameters
        self._on = False
        if self._wanted:
            self._param_sync_func = model.config.param_sync_func
            model.config.param_sync_func = None
            for chunk in model.chunks:
                chunk.disable_forward_pre_hook(param_sync=False)

    def after_step(self, skipped: bool) -> None:
        """Switch on after the first step that changed the parameters."""
        if self._wanted and not self._on and not skipped:
            self._start()

    def stop(self) -> None:
        """Switch off and complete the parameters."""
        if self._on:
            for chunk in self._model.chunks:
                chunk.disable_forward_pre_hook()
            self._model.config.param_sync_func = None
            self._on = False

    def paused(self) -> Any:
        """Context manager: off inside, restored afterwards."""
        return _Paused(self)

    def _start(self) -> None:
        for chunk in self._model.chunks:
            chunk.enable_forward_pre_hook()
        self._model.config.param_sync_func = self._param_sync_func
        self._on = True


class _Paused:
    def __init__(self, gathering: _ParameterGathering) -> None:
        self._gathering = gathering
        self._was_on = gathering._on

    def __enter__(self) -> None:
        self._gathering.stop()

    def __exit__(self, *_: object) -> None:
        if self._was_on:
            self._gathering._start()


def _judge_features(log: Log, in_vain_means: Literal["warn", "refuse"]) -> None:
    """Report which features the first step has reached, and flags that did nothing.

    Raises:
        ConfigError: flags did nothing, unless ``--features-in-vain warn``; on all ranks.
    """
    features = session.install().reached
    reached = features.on_all_ranks()
    if reached:
        log.message(describe(reached))
    in_vain = features.in_vain(reached)
    if in_vain and in_vain_means == "refuse":
        raise ConfigError("\n".join((*in_vain, "leave it out, or --features-in-vain warn")))
    for text in in_vain:
        log.message(f"warning: {text}")


def _save(saver: Saver, state: TrainState, gathering: _ParameterGathering, log: Log) -> None:
    with log.not_counted(), gathering.paused():
        saver.save(state)


def _ramp_up_batch(
    state: TrainState, saver: Saver | None, gathering: _ParameterGathering, log: Log
) -> None:
    """Batch ramp-up: set the size for the consumed samples; save before it changes."""
    before = get_num_microbatches()
    update_num_microbatches(state.train_samples, consistency_check=False)
    if get_num_microbatches() != before and state.iteration > 0:
        log.message(f" global batch size is now {get_current_global_batch_size()}")
        if saver is not None and saver.last_saved != state.iteration:
            _save(saver, state, gathering, log)
    update_num_microbatches(state.train_samples, consistency_check=True)


def _collect_garbage(options: TrainingOptions, iteration: int) -> None:
    interval = options.manual_gc_interval
    if options.manual_gc and interval and iteration % interval == 0:
        gc.collect()


def _exit_interval(options: TrainingOptions, iteration: int) -> str | None:
    if options.exit_interval and iteration % options.exit_interval == 0:
        return f"--exit-interval {options.exit_interval}"
    return None
