"""Final values of parsed flags: derived values and contradictions.

:func:`resolve` fills in everything that Megatron-LM derives (data-parallel size, feed-forward size,
virtual pipeline size, data types, batch sizes ...) under Megatron-LM's names, and collects every
contradiction before any process group exists. The namespace it completes is also what a checkpoint
stores, so Megatron-LM finds the names it looks for.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mindspeed.attention.sequence_sharding import indivisible
from mindspeed.errors import ConfigError
from mindspeed.features import registry
from mindspeed.models import model_extras
from mindspeed.optimizer.rules import NAMES
from mindspeed.training.resolve_parallel import parallel
from mindspeed.training.resolve_run import data, duration, iterations_of, output


@dataclass(frozen=True)
class Settings:
    """Resolved settings of a job.

    Attributes:
        args: final values under Megatron-LM's names; a checkpoint stores this namespace.
        recipe: the values as a recipe (YAML), written next to the checkpoints.
    """

    args: argparse.Namespace
    recipe: str


def assume_inputs(args: argparse.Namespace) -> bool:
    """Fill in inputs that a dry run may omit; returns whether its data are only a name.

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
        recipe: the same values as a recipe, kept next to checkpoints.
        training: a model is trained; otherwise it only runs forward, and duration, schedule and
            data are neither required nor checked.

    Raises:
        ConfigError: one line per problem, each naming the flags and what to change.
    """
    parallelism = list(_derived(args)) or parallel(args, world_size)
    problems = [*_required(args, training), *parallelism]
    if not problems:
        _shape(args)
        _precision(args)
        _tokenizer(args)
        problems = [*_batch(args), *_model(args), *output(args)]
        if training:
            problems += [*_experts(args), *_optimizer(args), *duration(args), *data(args)]
    if problems:
        raise ConfigError("\n".join(problems))
    if training and args.train_iters is None:
        args.train_iters = iterations_of(args)
    return Settings(args, recipe)


def _derived(args: argparse.Namespace) -> Iterator[str]:
    try:
        vars(args).update(registry.derived(vars(args)))
    except ConfigError as error:
        yield from str(error).splitlines()


def _required(args: argparse.Namespace, training: bool) -> Iterator[str]:
    shape = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
    for name in (*shape, "lr") if training else shape:
        if getattr(args, name) is None:
            yield f"--{name.replace('_', '-')} is missing"
    if training and (args.train_iters is None) == (args.train_samples is None):
        yield "give one of --train-iters and --train-samples"


def _shape(args: argparse.Namespace) -> None:
    """Derived sizes, by Megatron-LM's rules."""
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
        if args.grad_reduce_in_bf16:
            args.accumulate_allreduce_grads_in_fp32 = False
        elif args.main_grads_dtype == torch.float32:
            args.accumulate_allreduce_grads_in_fp32 = True
    if args.weight_decay_incr_style == "constant":
        args.start_weight_decay = args.end_weight_decay = args.weight_decay


def _tokenizer(args: argparse.Namespace) -> None:
    """A checkpoint is also opened from another directory than that of the training."""
    for name in ("tokenizer_model", "vocab_file", "merge_file"):
        path = getattr(args, name, None)
        if path and os.path.exists(path):
            setattr(args, name, os.path.abspath(path))


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
    if args.cpu_offloading_num_layers:
        args.cpu_offloading = True  # as in Megatron-LM
    tp, heads = args.tensor_model_parallel_size, args.num_attention_heads
    if args.fp16 and args.bf16:
        yield "--fp16 and --bf16 exclude each other"
    if args.kv_channels is None:
        yield (
            f"--hidden-size {args.hidden_size} is not divisible by "
            f"--num-attention-heads {heads}; set --kv-channels"
        )
    aligned = not args.unaligned_linear  # else the feature says so
    if aligned and heads % tp:
        yield f"--num-attention-heads {heads} is not divisible by tensor parallel size {tp}"
    groups = args.num_query_groups
    if args.group_query_attention and heads % groups:
        yield f"--num-attention-heads {heads} is not divisible by --num-query-groups {groups}"
    elif aligned and args.group_query_attention and groups % tp and tp % groups:
        yield f"--num-query-groups {groups}, tensor parallel size {tp}: one must divide the other"
    if args.multi_latent_attention and args.group_query_attention:
        yield "--multi-latent-attention and --num-query-groups exclude each other"
    cp = args.context_parallel_size
    if args.optimization_level < 2 and cp > 1 and args.seq_length % (2 * cp):
        yield f"context parallel: {indivisible(args.seq_length, cp)}"  # above, the feature says so
    if aligned and args.sequence_parallel and args.seq_length % tp:
        yield f"--seq-length {args.seq_length} is not divisible by {tp} (--sequence-parallel)"
    if args.position_embedding_type == "rope" and not args.multi_latent_attention:
        rotated = int((args.kv_channels or 2) * args.rotary_percent)
        if rotated < 2 or rotated % 2:
            yield (
                f"--position-embedding-type rope rotates pairs: {rotated} of --kv-channels "
                f"{args.kv_channels} (--rotary-percent {args.rotary_percent}) is no even number"
            )
    if args.recompute_granularity == "full" and (args.recompute_num_layers or 0) > args.num_layers:
        yield f"--recompute-num-layers {args.recompute_num_layers} of {args.num_layers} layers"
    if args.max_position_embeddings < args.seq_length:
        yield f"--max-position-embeddings is smaller than --seq-length {args.seq_length}"
    if (variant := args.experimental_attention_variant) not in (None, "gated_delta_net"):
        yield (
            f"--experimental-attention-variant {variant}: this trainer builds the attention of the "
            "other flags; train such a model with pretrain_gpt.py of Megatron-LM, or leave it out"
        )
    if variant == "gated_delta_net" and cp > 1 and args.linear_num_value_heads < tp * cp:
        yield (
            f"--linear-num-value-heads {args.linear_num_value_heads} over {tp} tensor-parallel and "
            f"{cp} context-parallel ranks is less than one: lower --context-parallel-size"
        )
    if sum((args.swiglu, args.squared_relu, args.quick_geglu, args.geglu)) > 1:
        yield "give one of --swiglu, --squared-relu, --quick-geglu and --geglu"
    yield from model_extras.problems(args)


def _experts(args: argparse.Namespace) -> Iterator[str]:
    """Megatron checks these too, but only in the first step, with a traceback per rank."""
    tp = args.tensor_model_parallel_size
    if args.num_experts and args.moe_router_topk > args.num_experts:
        count = args.num_experts
        yield f"--moe-router-topk {args.moe_router_topk} is more than --num-experts {count}"
    if args.num_experts and tp > 1 and not args.sequence_parallel:
        yield (
            f"--num-experts {args.num_experts} with --tensor-model-parallel-size {tp} needs "
            "--sequence-parallel: add it, or spread the experts with --expert-model-parallel-size"
        )


def _optimizer(args: argparse.Namespace) -> Iterator[str]:
    if args.optimizer == "fused_adam":  # the original suite's name; every Adam here is fused
        args.optimizer = "adam"
    if args.optimizer not in NAMES:
        yield f"--optimizer {args.optimizer}: choose one of {', '.join(NAMES)}"
    if "muon" in args.optimizer:
        yield from _muon(args)
    if args.accumulate_allreduce_grads_in_fp32 and args.main_grads_dtype != torch.float32:
        yield "--main-grads-dtype bf16 excludes --accumulate-allreduce-grads-in-fp32: drop one"


def _muon(args: argparse.Namespace) -> Iterator[str]:
    """Combinations that Megatron's Muon does not support."""
    for name in (
        "use_distributed_optimizer",
        "overlap_grad_reduce",
        "overlap_param_gather",
        "use_megatron_fsdp",
        "optimizer_cpu_offload",
        "fp16",
    ):
        if getattr(args, name):
            yield f"--optimizer {args.optimizer} excludes --{name.replace('_', '-')}: drop one"
    if importlib.util.find_spec("emerging_optimizers") is None:
        yield (
            f"--optimizer {args.optimizer} needs a package next to NVIDIA's Transformer Engine: "
            "pip install git+https://github.com/NVIDIA-NeMo/Emerging-Optimizers@v0.1.0, or set "
            "MINDSPEED_TE=substitute"
        )
