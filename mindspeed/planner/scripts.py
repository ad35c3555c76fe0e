"""Plan a Megatron-LM script with its own model, forward step, arguments and training step.

    job = ScriptedJob("pretrain_gpt.py", ["--num-layers", "2", ...])
    step = count_step(job.settings(devices=64).args, rank=0)

The script is not changed: it runs up to its call of ``pretrain``
(:mod:`mindspeed.adaptor.script_job`), then Megatron-LM's code builds its model and runs one step of
it. Batches are synthetic, in the form of Megatron-LM's data loader: whole sequences, on the first
tensor-parallel rank.

A script and its imports stay loaded, so these functions run in child processes
(:mod:`mindspeed.planner.isolated`).
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mindspeed import device
from mindspeed.adaptor.script_job import ScriptJob
from mindspeed.built_model import TrainedModel
from mindspeed.errors import ConfigError
from mindspeed.planner.count.loop import Step
from mindspeed.planner.job import Job, Overrides, changed_words, not_planned
from mindspeed.training.arguments import add_names_of_the_trainer
from mindspeed.training.resolve import Settings

_UNKNOWN_BATCHES = {
    "sft": "the lengths of its packed conversations",
    "hybrid_context_parallel": "the lengths of its samples",
    "reset_attention_mask": "the ends of its documents",
}
"""Properties of the data on which batches depend, by option."""


class ScriptLoop:
    """The training program of a script.

    Args:
        job: the captured script; captured again in a process that unpickles this.
    """

    def __init__(self, job: ScriptJob) -> None:
        self._job: ScriptJob | None = job
        self._name = job.path, job.argv

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_job": None}  # a script's functions cannot be pickled

    @property
    def job(self) -> ScriptJob:
        """The captured script, with its arguments of ``pretrain``."""
        if self._job is None:
            self._job = ScriptJob.of(*self._name)
        return self._job

    @contextlib.contextmanager
    def started(self, args: argparse.Namespace) -> Iterator[None]:
        """Set Megatron-LM's global values, groups and seeds."""
        with self.job.ready(args):
            self.job.parallel_groups()
            yield

    def build(self, args: argparse.Namespace) -> TrainedModel:
        """Build model and optimizer with Megatron-LM from the script's model provider."""
        chunks, optimizer, schedule = self.job.build()
        self.job.prepare_training(chunks, optimizer)
        return TrainedModel(chunks[0].config, chunks, optimizer, schedule)

    def step_of(self, args: argparse.Namespace, model: TrainedModel) -> Step:
        """Make a function that runs Megatron-LM's step with the script's forward step."""
        readers = [_batches(args) for _ in model.chunks]

        def step() -> None:
            self.job.step(model.chunks, model.optimizer, model.schedule, readers)

        return step


class ScriptedJob(Job):
    """A job whose program is a Megatron-LM script.

    Raises:
        ConfigError: the script does not call Megatron-LM's ``pretrain``.
    """

    def __init__(self, path: str | Path, argv: Sequence[str]) -> None:
        self.argv = self._words = tuple(argv)
        self._script = ScriptJob.of(path, argv)
        self._parser = self._script.parser()

    def settings(self, overrides: Overrides | None = None, devices: int | None = None) -> Settings:
        """Final values of the script with some flags changed.

        Args:
            devices: number of ranks; default: the smallest that the flags allow.

        Raises:
            ConfigError: Megatron-LM or a feature refuses the flags.
        """
        words = self.flags({**not_planned(), **(overrides or {})})
        script = replace(self._script, argv=tuple(words))
        args = script.final_args(devices)
        for name, what in _UNKNOWN_BATCHES.items():
            if getattr(args, name, None):
                raise ConfigError(
                    f"--{name.replace('_', '-')}: {what} are not known before the data are read, "
                    "so the script cannot be planned with it; plan without it for an upper bound"
                )
        add_names_of_the_trainer(args)
        args.planned_loop = ScriptLoop(script)
        return self._assumed(Settings(args, ""))

    def flags(self, overrides: Overrides | None = None) -> list[str]:
        """The words after the script with some flags changed."""
        return changed_words(self._words, self._parser, overrides or {})

    def command(self, overrides: Overrides | None = None) -> str:
        """The script and its flags as shell text."""
        return shlex.join([str(self._script.path), *self.flags(overrides)])


def job_of(words: Sequence[str]) -> Job:
    """Build the job of a command line: ``SCRIPT.py FLAGS``, or flags of our trainer.

    Raises:
        ConfigError: the script does not call Megatron-LM's ``pretrain``.
    """
    if words and not words[0].startswith("-"):
        return ScriptedJob(words[0], words[1:])
    return Job(words)


def _batches(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Endless synthetic batches in the form of Megatron-LM's data loader."""
    return iter(partial(_batch, args), None)  # a generator keeps one alive


def _batch(args: argparse.Namespace) -> dict[str, Any]:
    length, where = args.seq_length, device.current().torch_device()
    shape = args.micro_batch_size, length
    tokens = torch.zeros(shape, dtype=torch.int64, device=where)
    batch = {
        "tokens": tokens,
        "labels": tokens.clone(),
        "position_ids": torch.arange(length, device=where).expand(shape),
        "loss_mask": torch.ones(shape, device=where),
    }
    if args.create_attention_mask_in_dataloader:
        square = args.micro_batch_size, 1, length, length
        batch["attention_mask"] = torch.zeros(square, dtype=torch.bool, device=where)
    return batch
