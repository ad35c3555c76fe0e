"""Duration, schedule, data and files of a run: derived values and contradictions."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mindspeed.checkpoint.contents import model_at
from mindspeed.checkpoint.find import saved_args
from mindspeed.checkpoint.options import CheckpointOptions
from mindspeed.errors import MindSpeedError
from mindspeed.flags import read
from mindspeed.job import Batch
from mindspeed.lora import flags as lora_flags
from mindspeed.lora.config import HEAD
from mindspeed.models.hf_load import is_hf
from mindspeed.preference.losses import SMOOTHED, PreferenceLoss
from mindspeed.preference.options import PreferenceOptions
from mindspeed.storage.directory import tracked
from mindspeed.training.options import (
    DataOptions,
    LoggingOptions,
    LoraOptions,
    OptimizerOptions,
    TrainingOptions,
)
from mindspeed.training.sinks import missing_packages


def duration(args: argparse.Namespace) -> Iterator[str]:
    """Complete duration, learning rate and logging; yields contradictions."""
    training, rates = read(TrainingOptions, args), read(OptimizerOptions, args)
    lr, smallest, first = args.lr, args.min_lr, rates.lr_warmup_init
    unit, other = _units(training)
    for name in (f"lr_decay_{other}", f"lr_warmup_{other}"):
        if getattr(rates, name):
            yield f"--{name.replace('_', '-')} needs --train-{other}, not --train-{unit}"
    if rates.lr_warmup_fraction is not None and (rates.lr_warmup_iters or rates.lr_warmup_samples):
        yield "--lr-warmup-fraction excludes --lr-warmup-iters and --lr-warmup-samples"
    yield from _schedule(training, rates)
    if smallest is not None and smallest > lr:
        yield f"--min-lr {smallest} is larger than --lr {lr}"
    if first > lr:
        yield f"--lr-warmup-init {first} is larger than --lr {lr}"
    if rates.weight_decay_incr_style != "constant" and rates.start_weight_decay is None:
        yield "--weight-decay-incr-style needs --start-weight-decay and --end-weight-decay"
    if training.eval_interval is None:
        args.eval_iters = 0


def _units(training: TrainingOptions) -> tuple[str, str]:
    """The unit that the schedule of a run is given in, and the other one."""
    return ("iters", "samples") if training.train_iters is not None else ("samples", "iters")


def iterations_of(args: argparse.Namespace) -> int:
    """Iterations that ``--train-samples`` make, with batch ramp-up."""
    batch, samples = Batch.of(args), args.train_samples
    iterations = consumed = 0
    if batch.ramp_up is not None:
        size = _ramped(args, batch, *batch.ramp_up)
        while consumed <= min(batch.ramp_up[2], samples):
            size.update(consumed, consistency_check=False)
            consumed += size.get_current_global_batch_size()
            iterations += 1
    return int(iterations + max(0, samples - consumed) // batch.whole)


def _ramped(args: argparse.Namespace, batch: Batch, start: int, increment: int, last: int) -> Any:
    """Megatron's batch sizes while they grow, for ``last`` samples."""
    from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

    decrease, quiet = args.decrease_batch_size_if_needed, -1
    return RampupBatchsizeNumMicroBatchesCalculator(
        batch.whole, batch.micro, batch.data_parallel, decrease, quiet, start, increment, last
    )


def _schedule(training: TrainingOptions, rates: OptimizerOptions) -> Iterator[str]:
    """Check that warm-up and the last phase fit into the decay."""
    unit, _ = _units(training)
    duration = getattr(training, f"train_{unit}")
    given, warmup, last = (
        getattr(rates, f"{name}_{unit}") for name in ("lr_decay", "lr_warmup", "lr_wsd_decay")
    )
    decay = duration if given is None else given
    flag = f"--{'train' if given is None else 'lr-decay'}-{unit} {decay}"
    if warmup >= decay:
        yield (
            f"--lr-warmup-{unit} {warmup} must be less than {flag}, the length of the learning "
            "rate schedule: shorten the warm-up or lengthen the schedule"
        )
    if rates.lr_decay_style != "WSD":
        return
    if last is None:
        yield f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}"
    elif last > decay:
        yield f"--lr-wsd-decay-{unit} {last} is more than {flag}"


def preferences(args: argparse.Namespace) -> Iterator[str]:
    """Complete the reference model; yields what pairs of answers cannot be trained with."""
    objective, micro = args.objective, args.micro_batch_size
    if objective == "next_token":
        return
    if not args.is_instruction_dataset:
        yield f"--objective {objective} reads pairs: use mindspeed dpo or mindspeed reward"
    if not args.pack_sequences and micro % 2:
        yield (
            f"--micro-batch-size {micro}: a pair is two sequences of a "
            "micro-batch, so make it even, or use --pack-sequences"
        )
    for name in ("keep_last_token", "mtp_num_layers", "z_loss_weight", "calculate_per_token_loss"):
        if getattr(args, name):
            yield f"--{name.replace('_', '-')} is not for pairs of answers: leave it out"
    if objective == "reward":
        yield from _base_of_rewards(read(CheckpointOptions, args))
    if objective == "preference":
        yield from _reference(args)
    elif lora_flags.asked(args):
        adapters = read(LoraOptions, args)
        args.lora_modules_to_save = tuple(dict.fromkeys((*adapters.lora_modules_to_save, HEAD)))
        if adapters.lora_export:
            yield "--lora-export: PEFT's files have no place for the head of a reward model yet"


def _base_of_rewards(files: CheckpointOptions) -> Iterator[str]:
    """A checkpoint of a model of the next token has no head, and Megatron no place to begin one."""
    load = files.load
    if load is None or is_hf(load) or tracked(load) is None:
        return
    saved = saved_args(load, files.ckpt_step)
    if getattr(saved, "objective", "next_token") != "reward":
        yield (
            f"--load {load} is a model of the next token, without a head: write it with "
            f"mindspeed export --hf --load {load} --output DIR, and give --load hf:DIR"
        )


def _reference(args: argparse.Namespace) -> Iterator[str]:
    options = read(PreferenceOptions, args)
    loss = PreferenceLoss.of(options)
    if loss.label_smoothing and loss.kind not in SMOOTHED:
        yield f"--label-smoothing: only with --loss-type {', '.join(SMOOTHED)}"
    if not loss.needs_reference:
        for name in ("reference_load", "precompute_reference"):
            if getattr(options, name):
                yield f"--loss-type {loss.kind} needs no reference: drop --{name.replace('_', '-')}"
        return
    adapters = read(LoraOptions, args)
    if not lora_flags.asked(args) or options.reference_load:
        args.reference_load = options.reference_load or args.load
    elif adapters.lora_modules_to_save:
        yield (
            "--lora-modules-to-save changes the model beside its adapters: name the reference with "
            "--reference-load"
        )
    elif adapters.lora_init.startswith(("pissa", "olora")):
        yield (
            f"--lora-init {adapters.lora_init} changes the weights under the adapters: name the "
            "reference with --reference-load"
        )
    elif adapters.lora_load and adapters.lora_load != args.save:
        yield (
            f"--lora-load {adapters.lora_load}: without its adapters the model is no reference for "
            "it; merge it first (mindspeed merge-lora), or name the reference with --reference-load"
        )


def output(args: argparse.Namespace) -> Iterator[str]:
    """Complete what a run loads and writes; yields contradictions."""
    yield from preferences(args)
    yield from _resume(args, read(CheckpointOptions, args))
    files, logging = read(CheckpointOptions, args), read(LoggingOptions, args)
    if files.save_interval is not None and files.save is None:
        yield "--save-interval needs --save"
    for name in ("save", "tensorboard_dir", "config_logger_dir"):
        path: str | None = getattr(args, name, None)
        if path is None or (path == "" and name == "config_logger_dir"):  # its default
            continue
        if problem := _no_directory(path):
            yield f"--{name.replace('_', '-')} {path}: {problem}"
    if logging.metrics_file is not None and os.path.isdir(logging.metrics_file):
        yield f"--metrics-file {logging.metrics_file} is a directory: name a file"
    yield from lora_flags.complete(args)
    if files.load is not None:
        try:
            model_at(files.load, files.ckpt_step)
        except MindSpeedError as error:
            yield str(error)
    if files.use_checkpoint_args and files.load is None:
        yield "--use-checkpoint-args needs --load"
    yield from missing_packages(logging)


def _resume(args: argparse.Namespace, files: CheckpointOptions) -> Iterator[str]:
    """Set what ``--auto-resume`` loads: a run that has begun goes on from where it is."""
    if not files.auto_resume:
        return
    load, save = files.load, files.save
    if save is None:
        yield "--auto-resume needs --save"
    elif lora_flags.asked(args):  # the base model stays, the adapters continue
        return
    elif load is None or (tracked(save) is not None and (files.finetune or is_hf(load))):
        args.load, args.finetune = save, files.finetune and load is None


def _no_directory(path: str) -> str | None:
    """Why no files can be written below ``path``, which may not exist yet."""
    if not path.strip():
        return "a directory is expected"
    nearest = Path(path)
    try:
        while not nearest.exists() and nearest.parent != nearest:
            nearest = nearest.parent
    except (OSError, ValueError) as error:  # too long, a null byte
        return getattr(error, "strerror", None) or str(error)
    if not nearest.is_dir():
        return f"{nearest} is no directory"
    if not os.access(nearest, os.W_OK | os.X_OK):
        return f"{nearest} cannot be written"
    return None


def data(args: argparse.Namespace) -> Iterator[str]:
    """Complete the sources of data; yields contradictions."""
    options = read(DataOptions, args)
    splits = ("train", "valid", "test")
    per_split = [getattr(options, f"{split}_data_path") for split in splits]
    parts = [getattr(options, f"{split}_weighted_split_paths") for split in splits]
    sources = {
        "--mock-data": options.mock_data,
        "--data-path": options.data_path,
        "--data-args-path": options.data_args_path,
        "--train-data-path": any(per_split),
        "--train-weighted-split-paths": any(parts),
    }
    given = [name for name, value in sources.items() if value]
    if len(given) != 1:
        chosen = f"not {' and '.join(given)}" if given else "none is given"
        yield f"give one of {', '.join(sources)}; {chosen}"
    if options.split is None and not any(per_split + parts):
        args.split = "969, 30, 1"
    for name in ("reset_attention_mask", "reset_position_ids", "pack_sequences"):
        if getattr(options, name) and args.optimization_level < 2:
            yield f"--{name.replace('_', '-')} needs --optimization-level 2"
    if not options.shuffle and options.dataloader_type != "single":
        yield "--no-shuffle needs --dataloader-type single: cyclic reads in random order"
    if not options.shuffle and options.length_grouped:
        yield "give one of --no-shuffle and --length-grouped, which mixes the groups"
    if args.tokenizer_type is None:
        yield "--tokenizer-type is missing (HuggingFaceTokenizer, NullTokenizer, ...)"
    if options.is_instruction_dataset:
        # The mean over trained tokens of the whole batch: micro-batches with few do not count more.
        args.calculate_per_token_loss = args.objective == "next_token"
    yield from _conversations(options)


def _conversations(options: DataOptions) -> Iterator[str]:
    """Flags of ``--is-instruction-dataset``."""
    given = [
        f"--{name.replace('_', '-')}"
        for name in ("pack_sequences", "length_grouped")
        if getattr(options, name)
    ]
    if not options.is_instruction_dataset:
        if given:
            yield f"{' and '.join(given)}: only with --is-instruction-dataset"
        return
    if options.mock_data:
        yield "--is-instruction-dataset reads files: give --data-path instead of --mock-data"
    if options.reset_position_ids or options.reset_attention_mask or options.eod_mask_loss:
        yield (
            "--reset-position-ids, --reset-attention-mask and --eod-mask-loss are for plain text: "
            "with --is-instruction-dataset drop them"
        )
    if options.length_grouped and options.pack_sequences:
        yield "give one of --length-grouped and --pack-sequences: packed sequences are full already"
    if options.length_grouped and options.dataloader_type != "single":
        yield "--length-grouped needs --dataloader-type single: cyclic shuffles the groups apart"
    if options.length_grouped and options.data_path and len(options.data_path) > 1:
        yield "--length-grouped needs one data set: blending mixes the groups"
