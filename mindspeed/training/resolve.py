"""From parsed flags to final values: what follows from what, and what cannot be.

:func:`resolve` fills in everything that Megatron-LM derives (data-parallel size, feed-forward size,
virtual pipeline size, data types, batch sizes ...) under Megatron-LM's names, and collects every
contradiction before any process group exists. The namespace it completes is also what a checkpoint
stores, so Megatron-LM finds the names it looks for.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch

from mindspeed import device
from mindspeed.checkpoint.directory import tracked
from mindspeed.errors import ConfigError
from mindspeed.features.context_parallel import indivisible
from mindspeed.lora import flags as lora_flags
from mindspeed.models.hf_load import is_hf
from mindspeed.training import zero
from mindspeed.training.options import (
    CheckpointOptions,
    DataOptions,
    LoggingOptions,
    OptimizerOptions,
    TrainingOptions,
)
from mindspeed.training.sinks import missing_packages

OPTIMIZERS = ("adam", "sgd")


@dataclass(frozen=True)
class Settings:
    """Final values: the trainer's own sections typed, and the whole namespace for Megatron."""

    training: TrainingOptions
    data: DataOptions
    optimizer: OptimizerOptions
    checkpoint: CheckpointOptions
    logging: LoggingOptions
    args: argparse.Namespace
    recipe: str


def model_parallel_size(args: argparse.Namespace) -> int:
    """Ranks that hold one copy of the model."""
    return (
        args.tensor_model_parallel_size
        * args.pipeline_model_parallel_size
        * args.context_parallel_size
    )


def default_ranks(args: argparse.Namespace) -> int:
    """Ranks where neither a launcher nor ``--nproc`` says how many.

    Those of ``--devices`` for ``--dry-run`` and where this machine has as many, else as few as can
    hold the model.
    """
    smallest = model_parallel_size(args)
    if args.devices is None:
        return smallest
    return args.devices if args.dry_run or device.current().count() >= args.devices else smallest


def assume_inputs(args: argparse.Namespace) -> bool:
    """Name inputs that a dry run leaves out; returns whether its data are only a name.

    The vocabulary is the model's where there is no tokenizer.
    """
    if args.tokenizer_type is None and args.tokenizer_model is None and args.vocab_size:
        args.tokenizer_type = "NullTokenizer"
    if args.lora_target_modules and args.load is None:
        args.load = "MODEL"
    given = (args.data_path, args.train_data_path, args.data_args_path, args.mock_data)
    if any((*given, args.train_weighted_split_paths)):
        return False
    args.data_path = ("DATA",)
    return True


def resolve(
    args: argparse.Namespace, world_size: int, recipe: str = "", *, training: bool = True
) -> Settings:
    """Complete ``args`` in place and check them.

    Args:
        args: parsed flags (:func:`mindspeed.training.arguments.parse`).
        world_size: number of ranks.
        recipe: the same values as a recipe, kept beside checkpoints.
        training: a model is trained; otherwise it only runs forward, and duration, schedule and
            data are neither asked for nor checked.

    Raises:
        ConfigError: one line per problem, each naming the flags and what to change.
    """
    problems = [*_required(args, training), *_parallel(args, world_size)]
    if not problems:
        _shape(args)
        _precision(args)
        problems = [*_batch(args), *_model(args), *_output(args)]
        if training:
            problems += [*_experts(args), *_optimizer(args), *_duration(args), *_data(args)]
    if problems:
        raise ConfigError("\n".join(problems))
    return Settings(
        training=_typed(TrainingOptions, args),
        data=_typed(DataOptions, args),
        optimizer=_typed(OptimizerOptions, args),
        checkpoint=_typed(CheckpointOptions, args),
        logging=_typed(LoggingOptions, args),
        args=args,
        recipe=recipe,
    )


def _typed(options: type, args: argparse.Namespace) -> Any:
    return options(**{field.name: getattr(args, field.name) for field in fields(options)})


def _required(args: argparse.Namespace, training: bool) -> Iterator[str]:
    shape = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
    for name in (*shape, "lr") if training else shape:
        if getattr(args, name) is None:
            yield f"--{name.replace('_', '-')} is missing"
    if training and (args.train_iters is None) == (args.train_samples is None):
        yield "give one of --train-iters and --train-samples"


def _parallel(args: argparse.Namespace, world_size: int) -> Iterator[str]:
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    cp, ep = args.context_parallel_size, args.expert_model_parallel_size
    size = model_parallel_size(args)
    args.world_size = world_size
    args.data_parallel_size = max(1, world_size // size)
    if world_size % size:
        yield (
            f"{world_size} ranks cannot be divided by tensor {tp} x pipeline {pp} x context {cp} "
            f"= {size} parallel ranks: start a multiple of {size} processes or change "
            "--tensor-model-parallel-size, --pipeline-model-parallel-size, --context-parallel-size"
        )
    if args.expert_tensor_parallel_size is None:
        args.expert_tensor_parallel_size = tp
    if ep > 1 and not args.num_experts:
        yield "--expert-model-parallel-size needs --num-experts"
    elif ep > 1 and args.num_experts % ep:
        yield f"--num-experts {args.num_experts} is not divisible by expert parallel size {ep}"
    expert_size = args.expert_tensor_parallel_size * pp * ep
    if args.num_experts and world_size % expert_size:
        yield (
            f"{world_size} ranks cannot be divided by expert tensor "
            f"{args.expert_tensor_parallel_size} x expert {ep} x pipeline {pp} = {expert_size}"
        )
    if tp == 1:
        args.sequence_parallel = False
    if args.fold_mode is not None:
        args.overlap_grad_reduce = True
    yield from zero.complete(args)
    if args.overlap_param_gather and not args.use_distributed_optimizer:
        yield "--overlap-param-gather needs --use-distributed-optimizer"
    if args.overlap_param_gather and not args.overlap_grad_reduce:
        yield "--overlap-param-gather needs --overlap-grad-reduce"
    yield from _pipeline(args)


def _pipeline(args: argparse.Namespace) -> Iterator[str]:
    pp, layers = args.pipeline_model_parallel_size, args.num_layers or 0
    per_stage = args.num_layers_per_virtual_pipeline_stage
    chunks = args.num_virtual_stages_per_pipeline_rank
    if args.num_layer_list is not None:
        yield from _layer_list(args)
    layout = args.pipeline_model_parallel_layout
    if sum(value is not None for value in (per_stage, chunks, layout)) > 1:
        yield (
            "give one of --num-layers-per-virtual-pipeline-stage, "
            "--num-virtual-stages-per-pipeline-rank and --pipeline-model-parallel-layout"
        )
    if layout is not None:
        from megatron.core.transformer.pipeline_parallel_layer_layout import (
            PipelineParallelLayerLayout as Layout,
        )

        stages = Layout.get_num_stages_from_str(layout)
        if stages % pp:
            yield f"--pipeline-model-parallel-layout has {stages} stages, not a multiple of {pp}"
        chunks = stages // pp
    counted = layers + args.account_for_embedding_in_pipeline_split
    counted += args.account_for_loss_in_pipeline_split
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    if layout is None and first is None and last is None and counted % pp:
        yield f"{counted} layers cannot be divided by --pipeline-model-parallel-size {pp}"
    if per_stage is not None:
        if counted // pp % per_stage:
            yield f"{counted // pp} layers per stage are not divisible by {per_stage}"
        chunks = counted // pp // per_stage
    args.virtual_pipeline_model_parallel_size = chunks if chunks and chunks > 1 else None
    if args.virtual_pipeline_model_parallel_size is None:
        args.overlap_p2p_comm = args.align_param_gather = False
    elif pp == 1:
        yield "the interleaved schedule needs --pipeline-model-parallel-size of at least 2"


def _layer_list(args: argparse.Namespace) -> Iterator[str]:
    """``5,6,5`` is the layout ``Et*5|t*6|t*5L``."""
    pp, given = args.pipeline_model_parallel_size, args.num_layer_list
    if not all(part.strip().isdigit() for part in given.split(",")):
        yield f"--num-layer-list {given}: whole numbers with commas are expected, such as 5,6,6,5"
        return
    counts = [int(part) for part in given.split(",")]
    if len(counts) != pp or sum(counts) != args.num_layers:
        yield (
            f"--num-layer-list {given} has {len(counts)} stages and {sum(counts)} layers: there "
            f"are {pp} stages (--pipeline-model-parallel-size) and {args.num_layers} layers"
        )
    elif args.pipeline_model_parallel_layout is not None:
        yield "give one of --num-layer-list and --pipeline-model-parallel-layout"
    else:
        stages = "|".join("t" * count for count in counts)
        args.pipeline_model_parallel_layout = f"E{stages}L"


def _shape(args: argparse.Namespace) -> None:
    """Sizes that follow from others; Megatron-LM's rules."""
    if args.num_query_groups is not None:
        args.group_query_attention = True
    args.num_query_groups = args.num_query_groups or 1
    if args.ffn_hidden_size is None:
        gated = args.swiglu
        args.ffn_hidden_size = (
            int(4 * args.hidden_size * 2 / 3 / 64) * 64 if gated else 4 * args.hidden_size
        )
    if args.kv_channels is None and args.hidden_size % args.num_attention_heads == 0:
        args.kv_channels = args.hidden_size // args.num_attention_heads
    if args.num_experts and args.moe_ffn_hidden_size is None:
        args.moe_ffn_hidden_size = args.ffn_hidden_size
    if args.max_position_embeddings is None:
        args.max_position_embeddings = args.seq_length
    if args.use_rotary_position_embeddings:
        args.position_embedding_type = "rope"
    if args.position_embedding_type != "rope":
        args.apply_rope_fusion = False
    args.add_position_embedding = True
    if args.add_bias_linear:
        args.add_qkv_bias = True
    else:
        args.bias_gelu_fusion = False
    if args.recompute_activations:
        args.recompute_granularity = "selective"
    if args.checkpoint_policy == "custom":
        args.recompute_granularity = "selective"
    elif args.checkpoint_policy == "block":
        args.recompute_granularity, args.recompute_method = "full", "block"
        args.recompute_num_layers = args.recompute_num_layers or args.checkpoint_block_layer
    elif args.checkpoint_activations or args.checkpoint_policy == "full":
        args.recompute_granularity, args.recompute_method = "full", "uniform"
        args.recompute_num_layers = args.recompute_num_layers or 1
    if args.apply_query_key_layer_scaling:
        args.attention_softmax_in_fp32 = True


def _precision(args: argparse.Namespace) -> None:
    args.params_dtype = torch.float32
    if args.fp16:
        args.params_dtype = torch.float16
        if not args.loss_scale:  # a loss that is not finite is how dynamic scaling works
            args.check_for_nan_in_loss_and_grad = False
    if args.bf16:
        args.params_dtype = torch.bfloat16
        args.accumulate_allreduce_grads_in_fp32 = not args.grad_reduce_in_bf16
    if args.weight_decay_incr_style == "constant":
        args.start_weight_decay = args.end_weight_decay = args.weight_decay


def _batch(args: argparse.Namespace) -> Iterator[str]:
    micro, dp = args.micro_batch_size, args.data_parallel_size
    steps = args.gradient_accumulation_steps
    if args.global_batch_size is None:
        args.global_batch_size = micro * dp * (steps or 1)
    elif steps is not None and args.global_batch_size != micro * dp * steps:
        yield (
            f"--global-batch-size {args.global_batch_size} is not --micro-batch-size {micro} x "
            f"data-parallel size {dp} x --gradient-accumulation-steps {steps}: drop one of them"
        )
    per_step = micro * dp
    if args.global_batch_size % per_step and not args.decrease_batch_size_if_needed:
        yield (
            f"--global-batch-size {args.global_batch_size} is not divisible by "
            f"--micro-batch-size {micro} x data-parallel size {dp} = {per_step}"
        )
    ramp = args.rampup_batch_size
    if ramp is not None:
        ramp = args.rampup_batch_size = [int(value) for value in ramp]
        if len(ramp) != 3:
            yield "--rampup-batch-size takes START INCREMENT SAMPLES"
        elif ramp[0] % per_step or ramp[1] % per_step:
            yield f"--rampup-batch-size {ramp[0]} {ramp[1]}: both must be divisible by {per_step}"
        elif (args.global_batch_size - ramp[0]) % ramp[1]:
            yield f"--rampup-batch-size: {ramp[0]} + n x {ramp[1]} never is --global-batch-size"
        if args.train_samples is None:
            yield "--rampup-batch-size needs --train-samples instead of --train-iters"


def _model(args: argparse.Namespace) -> Iterator[str]:
    tp, heads = args.tensor_model_parallel_size, args.num_attention_heads
    if args.fp16 and args.bf16:
        yield "--fp16 and --bf16 exclude each other"
    if args.kv_channels is None:
        yield (
            f"--hidden-size {args.hidden_size} is not divisible by "
            f"--num-attention-heads {heads}; set --kv-channels"
        )
    if heads % tp:
        yield f"--num-attention-heads {heads} is not divisible by tensor parallel size {tp}"
    groups = args.num_query_groups
    if args.group_query_attention and heads % groups:
        yield f"--num-attention-heads {heads} is not divisible by --num-query-groups {groups}"
    elif args.group_query_attention and groups % tp and tp % groups:
        yield f"--num-query-groups {groups}, tensor parallel size {tp}: one must divide the other"
    if args.multi_latent_attention and args.group_query_attention:
        yield "--multi-latent-attention and --num-query-groups exclude each other"
    cp = args.context_parallel_size
    if args.optimization_level < 2 and cp > 1 and args.seq_length % (2 * cp):
        yield indivisible(args.seq_length, cp)  # above, the feature says so
    if args.sequence_parallel and args.seq_length % tp:
        yield f"--seq-length {args.seq_length} is not divisible by {tp} (--sequence-parallel)"
    if args.auto_recompute_device_size is not None:
        if args.recompute_granularity is not None:
            yield (
                "--auto-recompute-device-size chooses what is recomputed: drop "
                "--checkpoint-activations, --checkpoint-policy and --recompute-..."
            )
        if args.auto_recompute_device_size < 1:
            yield f"--auto-recompute-device-size {args.auto_recompute_device_size}: MiB are needed"
    if args.max_position_embeddings < args.seq_length:
        yield f"--max-position-embeddings is smaller than --seq-length {args.seq_length}"
    yield from _graphs(args)
    if sum((args.swiglu, args.squared_relu, args.quick_geglu)) > 1:
        yield "give one of --swiglu, --squared-relu and --quick-geglu"


def _experts(args: argparse.Namespace) -> Iterator[str]:
    """Megatron says so too, but only in the first step, as a traceback of every rank."""
    tp = args.tensor_model_parallel_size
    if args.num_experts and tp > 1 and not args.sequence_parallel:
        yield (
            f"--num-experts {args.num_experts} with --tensor-model-parallel-size {tp} needs "
            "--sequence-parallel: add it, or spread the experts with --expert-model-parallel-size"
        )


def _optimizer(args: argparse.Namespace) -> Iterator[str]:
    if args.optimizer == "fused_adam":  # the original suite's name; every Adam here is fused
        args.optimizer = "adam"
    if args.optimizer not in OPTIMIZERS:
        yield f"--optimizer {args.optimizer}: choose one of {', '.join(OPTIMIZERS)}"


def _graphs(args: argparse.Namespace) -> Iterator[str]:
    here = device.current().name
    off = {"cuda_graph_impl": "none", "enable_cuda_graph": False, "external_cuda_graph": False}
    for name, value in off.items():
        if here != "cuda" and getattr(args, name) != value:
            yield f"--{name.replace('_', '-')} needs an NVIDIA GPU, this device is {here}: drop it"


def _duration(args: argparse.Namespace) -> Iterator[str]:
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
    if args.log_interval < 1:
        yield f"--log-interval {args.log_interval} must be at least 1"


def _schedule(args: argparse.Namespace) -> Iterator[str]:
    """Warm-up and last phase must fit into the decay."""
    unit = "iters" if args.train_iters is not None else "samples"
    duration, given, warmup, last = (
        getattr(args, f"{name}_{unit}")
        for name in ("train", "lr_decay", "lr_warmup", "lr_wsd_decay")
    )
    decay = duration if given is None else given
    flag = f"--{'train' if given is None else 'lr-decay'}-{unit} {decay}"
    if decay < 1:
        yield f"{flag} must be at least 1"
    elif warmup >= decay:
        yield (
            f"--lr-warmup-{unit} {warmup} must be less than {flag}, the length of the learning "
            "rate schedule: shorten the warm-up or lengthen the schedule"
        )
    if args.lr_warmup_fraction is not None and not 0 <= args.lr_warmup_fraction < 1:
        yield f"--lr-warmup-fraction {args.lr_warmup_fraction} must be at least 0 and less than 1"
    if args.lr_decay_style != "WSD":
        return
    if last is None:
        yield f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}"
    elif not 0 < last <= decay:
        yield f"--lr-wsd-decay-{unit} {last} must be between 1 and {flag}"


def _output(args: argparse.Namespace) -> Iterator[str]:
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
    if args.keep_last is not None and args.keep_last < 1:
        yield f"--keep-last {args.keep_last} must be at least 1"
    yield from lora_flags.complete(args)
    if args.use_checkpoint_args and args.load is None:
        yield "--use-checkpoint-args needs --load"
    if args.tensorboard_log_interval < 1:
        yield f"--tensorboard-log-interval {args.tensorboard_log_interval} must be at least 1"
    yield from missing_packages(args)
    args.consumed_train_samples = args.consumed_valid_samples = args.skipped_train_samples = 0


def _data(args: argparse.Namespace) -> Iterator[str]:
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
    args.calculate_per_token_loss = True
    if args.mock_data:
        yield "--is-instruction-dataset reads files: give --data-path instead of --mock-data"
    if args.reset_position_ids or args.reset_attention_mask or args.eod_mask_loss:
        yield (
            "--reset-position-ids, --reset-attention-mask and --eod-mask-loss are for plain text: "
            "with --is-instruction-dataset drop them"
        )
    if args.pad_to_multiple_of < 1:
        yield f"--pad-to-multiple-of {args.pad_to_multiple_of} must be at least 1"
    if args.length_grouped and args.pack_sequences:
        yield "give one of --length-grouped and --pack-sequences: packed rows are full already"
    if args.length_grouped and args.dataloader_type != "single":
        yield "--length-grouped needs --dataloader-type single: cyclic shuffles the groups apart"
    if args.length_grouped and args.data_path and len(args.data_path) > 1:
        yield "--length-grouped needs one data set: blending mixes the groups"
