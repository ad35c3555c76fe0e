"""Duration, schedule, data and files of a run: derived values and contradictions."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mindspeed.checkpoint.contents import model_at
from mindspeed.checkpoint.find import saved_args
from mindspeed.errors import MindSpeedError
from mindspeed.flags import read
from mindspeed.job import Batch
from mindspeed.lora import flags as lora_flags
from mindspeed.lora.config import HEAD
from mindspeed.models.hf_load import is_hf
from mindspeed.preference.losses import SMOOTHED, PreferenceLoss
from mindspeed.storage.directory import tracked
from mindspeed.training.options import LoggingOptions
from mindspeed.training.sinks import missing_packages


def duration(args: argparse.Namespace) -> Iterator[str]:
    """Complete duration, learning rate and logging; yields contradictions."""
    if args.train_iters is not None:
        for name in ("lr_decay_samples", "lr_warmup_samples"):
            if getattr(args, name):
                yield f"--{name.replace('_', '-')} needs --train-samples, not --train-iters"
    else:
        for name in ("lr_decay_iters", "lr_warmup_iters"):
            if getattr(args, name):
                yield f"--{name.replace('_', '-')} needs --train-iters, not --train-samples"
    if args.lr_warmup_fraction is not None and (args.lr_warmup_iters or args.lr_warmup_samples):
        yield "--lr-warmup-fraction excludes --lr-warmup-iters and --lr-warmup-samples"
    yield from _schedule(args)
    if args.min_lr is not None and args.min_lr > args.lr:
        yield f"--min-lr {args.min_lr} is larger than --lr {args.lr}"
    if args.lr_warmup_init > args.lr:
        yield f"--lr-warmup-init {args.lr_warmup_init} is larger than --lr {args.lr}"
    if args.weight_decay_incr_style != "constant" and args.start_weight_decay is None:
        yield "--weight-decay-incr-style needs --start-weight-decay and --end-weight-decay"
    if args.eval_interval is None:
        args.eval_iters = 0


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


def _schedule(args: argparse.Namespace) -> Iterator[str]:
    """Check that warm-up and the last phase fit into the decay."""
    unit = "iters" if args.train_iters is not None else "samples"
    duration, given, warmup, last = (
        getattr(args, f"{name}_{unit}")
        for name in ("train", "lr_decay", "lr_warmup", "lr_wsd_decay")
    )
    decay = duration if given is None else given
    flag = f"--{'train' if given is None else 'lr-decay'}-{unit} {decay}"
    if warmup >= decay:
        yield (
            f"--lr-warmup-{unit} {warmup} must be less than {flag}, the length of the learning "
            "rate schedule: shorten the warm-up or lengthen the schedule"
        )
    if args.lr_decay_style != "WSD":
        return
    if last is None:
        yield f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}"
    elif last > decay:
        yield f"--lr-wsd-decay-{unit} {last} is more than {flag}"


def preferences(args: argparse.Namespace) -> Iterator[str]:
    """Complete the reference model; yields what pairs of answers cannot be trained with."""
    if args.objective == "next_token":
        return
    if not args.is_instruction_dataset:
        yield f"--objective {args.objective} reads pairs: use mindspeed dpo or mindspeed reward"
    if not args.pack_sequences and args.micro_batch_size % 2:
        yield (
            f"--micro-batch-size {args.micro_batch_size}: a pair is two sequences of a "
            "micro-batch, so make it even, or use --pack-sequences"
        )
    for name in ("keep_last_token", "mtp_num_layers", "z_loss_weight", "calculate_per_token_loss"):
        if getattr(args, name):
            yield f"--{name.replace('_', '-')} is not for pairs of answers: leave it out"
    if args.objective == "reward":
        yield from _base_of_rewards(args)
    if args.objective == "preference":
        yield from _reference(args)
    elif lora_flags.asked(args):
        args.lora_modules_to_save = tuple(dict.fromkeys((*args.lora_modules_to_save, HEAD)))
        if args.lora_export:
            yield "--lora-export: PEFT's files have no place for the head of a reward model yet"


def _base_of_rewards(args: argparse.Namespace) -> Iterator[str]:
    """A checkpoint of a model of the next token has no head, and Megatron no place to begin one."""
    if args.load is None or is_hf(args.load) or tracked(args.load) is None:
        return
    saved = saved_args(args.load, args.ckpt_step)
    if getattr(saved, "objective", "next_token") != "reward":
        yield (
            f"--load {args.load} is a model of the next token, without a head: write it with "
            f"mindspeed export --hf --load {args.load} --output DIR, and give --load hf:DIR"
        )


def _reference(args: argparse.Namespace) -> Iterator[str]:
    loss = PreferenceLoss.from_args(args)
    if loss.label_smoothing and loss.kind not in SMOOTHED:
        yield f"--label-smoothing: only with --loss-type {', '.join(SMOOTHED)}"
    if not loss.needs_reference:
        for name in ("reference_load", "precompute_reference"):
            if getattr(args, name):
                yield f"--loss-type {loss.kind} needs no reference: drop --{name.replace('_', '-')}"
        return
    adapters = lora_flags.asked(args)
    if not adapters or args.reference_load:
        args.reference_load = args.reference_load or args.load
    elif args.lora_modules_to_save:
        yield (
            "--lora-modules-to-save changes the model beside its adapters: name the reference with "
            "--reference-load"
        )
    elif args.lora_init.startswith(("pissa", "olora")):
        yield (
            f"--lora-init {args.lora_init} changes the weights under the adapters: name the "
            "reference with --reference-load"
        )
    elif args.lora_load and args.lora_load != args.save:
        yield (
            f"--lora-load {args.lora_load}: without its adapters the model is no reference for it; "
            "merge it first (mindspeed merge-lora), or name the reference with --reference-load"
        )


def output(args: argparse.Namespace) -> Iterator[str]:
    """Complete what a run loads and writes; yields contradictions."""
    yield from preferences(args)
    if args.auto_resume:
        if args.save is None:
            yield "--auto-resume needs --save"
        elif lora_flags.asked(args):  # the base model stays, the adapters continue
            pass
        elif args.load is None:
            args.load = args.save
        elif tracked(args.save) is not None and (args.finetune or is_hf(args.load)):
            args.load, args.finetune = args.save, False  # the run has begun: continue it
    if args.save_interval is not None and args.save is None:
        yield "--save-interval needs --save"
    for name in ("save", "tensorboard_dir", "config_logger_dir"):
        path: str | None = getattr(args, name, None)
        if path is None or (path == "" and name == "config_logger_dir"):  # its default
            continue
        if problem := _no_directory(path):
            yield f"--{name.replace('_', '-')} {path}: {problem}"
    if args.metrics_file is not None and os.path.isdir(args.metrics_file):
        yield f"--metrics-file {args.metrics_file} is a directory: name a file"
    yield from lora_flags.complete(args)
    if args.load is not None:
        try:
            model_at(args.load, args.ckpt_step)
        except MindSpeedError as error:
            yield str(error)
    if args.use_checkpoint_args and args.load is None:
        yield "--use-checkpoint-args needs --load"
    yield from missing_packages(read(LoggingOptions, args))


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
    splits = ("train", "valid", "test")
    per_split = [getattr(args, f"{split}_data_path") for split in splits]
    parts = [getattr(args, f"{split}_weighted_split_paths") for split in splits]
    sources = {
        "--mock-data": args.mock_data,
        "--data-path": args.data_path,
        "--data-args-path": args.data_args_path,
        "--train-data-path": any(per_split),
        "--train-weighted-split-paths": any(parts),
    }
    given = [name for name, value in sources.items() if value]
    if len(given) != 1:
        chosen = f"not {' and '.join(given)}" if given else "none is given"
        yield f"give one of {', '.join(sources)}; {chosen}"
    if args.split is None and not any(per_split + parts):
        args.split = "969, 30, 1"
    for name in ("reset_attention_mask", "reset_position_ids", "pack_sequences"):
        if getattr(args, name) and args.optimization_level < 2:
            yield f"--{name.replace('_', '-')} needs --optimization-level 2"
    if not args.shuffle and args.dataloader_type != "single":
        yield "--no-shuffle needs --dataloader-type single: cyclic reads in random order"
    if not args.shuffle and args.length_grouped:
        yield "give one of --no-shuffle and --length-grouped, which mixes the groups"
    if args.tokenizer_type is None:
        yield "--tokenizer-type is missing (HuggingFaceTokenizer, NullTokenizer, ...)"
    yield from _conversations(args)


def _conversations(args: argparse.Namespace) -> Iterator[str]:
    """Flags of ``--is-instruction-dataset``."""
    given = [
        f"--{name.replace('_', '-')}"
        for name in ("pack_sequences", "length_grouped")
        if getattr(args, name)
    ]
    if not args.is_instruction_dataset:
        if given:
            yield f"{' and '.join(given)}: only with --is-instruction-dataset"
        return
    # The mean over trained tokens of the whole batch: micro-batches with few do not count more.
    args.calculate_per_token_loss = args.objective == "next_token"
    if args.mock_data:
        yield "--is-instruction-dataset reads files: give --data-path instead of --mock-data"
    if args.reset_position_ids or args.reset_attention_mask or args.eod_mask_loss:
        yield (
            "--reset-position-ids, --reset-attention-mask and --eod-mask-loss are for plain text: "
            "with --is-instruction-dataset drop them"
        )
    if args.length_grouped and args.pack_sequences:
        yield "give one of --length-grouped and --pack-sequences: packed sequences are full already"
    if args.length_grouped and args.dataloader_type != "single":
        yield "--length-grouped needs --dataloader-type single: cyclic shuffles the groups apart"
    if args.length_grouped and args.data_path and len(args.data_path) > 1:
        yield "--length-grouped needs one data set: blending mixes the groups"
