"""Pretraining from final values to the last checkpoint.

Every seam of the run is one visible call here or in :mod:`mindspeed.training.loop`: parallel
groups (``initialize``), layer spec, optimizer (``model.build``), batch (``data``), schedule and
step (``loop.train``), checkpoint (``load``, ``save``).
"""

from __future__ import annotations

import argparse
from functools import partial

import torch.distributed as dist
from megatron.core.num_microbatches_calculator import (
    init_num_microbatches_calculator,
    update_num_microbatches,
)

from mindspeed.built_model import TrainedModel
from mindspeed.checkpoint.load import load
from mindspeed.checkpoint.options import CheckpointOptions
from mindspeed.checkpoint.save import Saver
from mindspeed.flags import read
from mindspeed.job import Batch, Schedule, TrainState
from mindspeed.lora import adapted
from mindspeed.lora import flags as lora_flags
from mindspeed.pipeline.schedule.size_search import sizes_of_arguments
from mindspeed.storage import directory
from mindspeed.training import data, loop, preference, reference, resolve_data, setup
from mindspeed.training.forward_step import ForwardStep, forward_step
from mindspeed.training.model import ModelProvider, build, gpt_model, resume_adapters
from mindspeed.training.options import DataOptions, LoraOptions, TrainingOptions
from mindspeed.training.resolve import Settings
from mindspeed.training.token_counts import FixedLengthCounter, SampleCounter, training_flops


def pretrain(
    settings: Settings,
    provider: ModelProvider = gpt_model,
    forward_step: ForwardStep = forward_step,
) -> int:
    """Train a model.

    Args:
        settings: final values (:func:`mindspeed.training.initialize.prepare`).
        provider: builds one pipeline stage.
        forward_step: computes the loss of one micro-batch, in training and validation; its
            contract is in :mod:`mindspeed.training.forward_step`.

    Returns:
        The last iteration done.
    """
    setup.initialize(settings.args)
    iteration = _train(settings, provider, forward_step)
    # The readers' processes, which have our sockets, have ended.
    setup.leave_job()
    return iteration


def _train(settings: Settings, provider: ModelProvider, forward_step: ForwardStep) -> int:
    args = settings.args
    files, adapters = read(CheckpointOptions, args), read(LoraOptions, args)
    tokenizer = resolve_data.load_tokenizer(args)
    count_batches(args)
    if _is_finished(args, files):
        return Schedule.of(args).iterations
    reference.check_tokenizer(args, tokenizer)
    references = reference.precomputed(args, tokenizer, provider)
    model = build(args, provider)
    state = resume(args, model)
    sets = data.build_datasets(args, model.config, tokenizer, references)
    conversations = read(DataOptions, args).is_instruction_dataset
    counter = SampleCounter() if conversations else FixedLengthCounter(args)
    readers_of = partial(data.micro_batches, args, model.config, tokenizer=tokenizer)
    sizes = sizes_of_arguments(vars(args))
    readers = readers_of(sets.train, state.train_samples, counter=counter, sizes=sizes)
    held_out = {}
    if Schedule.of(args).evaluation_steps:
        held_out["validation"] = readers_of(sets.valid, state.valid_samples)
        if data.has_test(args):
            held_out["test"] = readers_of(sets.test, 0)
    saver = None
    if files.save:
        peft, flops = adapters.lora_export == "peft", training_flops(args, 1)
        saver = Saver(args, model, settings.recipe, flops, peft=peft)
        source = adapters.lora_load if adapted(model.chunks) else files.load
        saver.last_saved = state.iteration if source == files.save else None
    step = preference.step_of(args, model.chunks, provider) or forward_step
    done = loop.train(args, model, readers, held_out, state, saver, counter, step)
    return done.iteration


def _is_finished(args: argparse.Namespace, files: CheckpointOptions) -> bool:
    """Whether ``--auto-resume`` finds the checkpoint of the last iteration; says so. Collective."""
    save = files.save
    if not files.auto_resume or not (files.load == save or lora_flags.asked(args)):
        return False
    assert save is not None  # --auto-resume needs it
    answer = [False]
    if dist.get_rank() == 0:
        iterations = Schedule.of(args).iterations
        last = directory.path_of(save, iterations)
        same = directory.tracked(save) == iterations
        answer = [same and directory.problem_with(last) is None]
        if answer[0]:
            print(f" nothing left to do: {last} is the last iteration of this job", flush=True)
    dist.broadcast_object_list(answer, src=0)
    return answer[0]


def resume(args: argparse.Namespace, model: TrainedModel) -> TrainState:
    """Load what ``--load`` names; returns how far its run was."""
    if adapted(model.chunks):
        loaded = resume_adapters(args, model)
    else:
        loaded = load(args, model) if read(CheckpointOptions, args).load else None
    if loaded is None:
        return TrainState()
    update_num_microbatches(loaded.state.train_samples, consistency_check=False)
    return loaded.state


def count_batches(args: argparse.Namespace) -> None:
    """Set up Megatron's number of micro-batches per step."""
    batch = Batch.of(args)
    init_num_microbatches_calculator(
        dist.get_rank(),
        batch.ramp_up and list(batch.ramp_up),
        batch.whole,
        batch.micro,
        batch.data_parallel,
        read(TrainingOptions, args).decrease_batch_size_if_needed,
    )
