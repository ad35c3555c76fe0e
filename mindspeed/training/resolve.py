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
from mindspeed.flags import read
from mindspeed.models import model_extras
from mindspeed.models.model_config import ModelConfig
from mindspeed.optimizer.rules import NAMES
from mindspeed.training.options import ModelOptions, OptimizerOptions, TrainingOptions
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
    model, hidden, heads = read(ModelOptions, args), args.hidden_size, args.num_attention_heads
    groups = model.num_query_groups
    args.group_query_attention = model.group_query_attention or groups is not None
    args.num_query_groups = groups or 1
    if args.ffn_hidden_size is None:
        args.ffn_hidden_size = int(4 * hidden * 2 / 3 / 64) * 64 if model.swiglu else 4 * hidden
    if args.kv_channels is None and hidden % heads == 0:
        args.kv_channels = hidden // heads
    if args.num_experts and args.moe_ffn_hidden_size is None:
        args.moe_ffn_hidden_size = args.ffn_hidden_size
    if model.max_position_embeddings is None:
        args.max_position_embeddings = args.seq_length
    rotary = model.use_rotary_position_embeddings or model.position_embedding_type == "rope"
    if rotary:
        args.position_embedding_type = "rope"
    else:
        args.apply_rope_fusion = False
    args.add_position_embedding = True
    if args.add_bias_linear:
        args.add_qkv_bias = True
    else:
        args.bias_gelu_fusion = False
    granularity, method, layers = _recomputation(model)
    if granularity is not None:
        args.recompute_granularity = granularity
    if method is not None:
        args.recompute_method = method
        args.recompute_num_layers = args.recompute_num_layers or layers
    if args.apply_query_key_layer_scaling:
        args.attention_softmax_in_fp32 = True


def _recomputation(model: ModelOptions) -> tuple[str | None, str | None, int]:
    """What the older flags stand for: granularity, method and number of layers.

    Granularity or method are None where they say nothing of it.
    """
    policy = model.checkpoint_policy
    if policy == "block":
        return "full", "block", model.checkpoint_block_layer
    if policy == "full" or (policy is None and model.checkpoint_activations):
        return "full", "uniform", 1
    return "selective" if policy == "custom" or model.recompute_activations else None, None, 0


def _precision(args: argparse.Namespace) -> None:
    rates, half = read(OptimizerOptions, args), args.bf16
    args.params_dtype = torch.bfloat16 if half else torch.float16 if args.fp16 else torch.float32
    if args.fp16 and not args.loss_scale:  # a loss not finite is how dynamic scaling works
        args.check_for_nan_in_loss_and_grad = False
    if half and (rates.grad_reduce_in_bf16 or args.main_grads_dtype == torch.float32):
        args.accumulate_allreduce_grads_in_fp32 = not rates.grad_reduce_in_bf16
    if rates.weight_decay_incr_style == "constant":
        args.start_weight_decay = args.end_weight_decay = args.weight_decay


def _tokenizer(args: argparse.Namespace) -> None:
    """A checkpoint is also opened from another directory than that of the training."""
    for name in ("tokenizer_model", "vocab_file", "merge_file"):
        path = getattr(args, name, None)
        if path and os.path.exists(path):
            setattr(args, name, os.path.abspath(path))


def _batch(args: argparse.Namespace) -> Iterator[str]:
    training, dp = read(TrainingOptions, args), args.data_parallel_size
    micro, steps = training.micro_batch_size, training.gradient_accumulation_steps
    whole, per_step = training.global_batch_size, micro * dp
    if whole is None:
        whole = args.global_batch_size = per_step * (steps or 1)
    elif steps is not None and whole != per_step * steps:
        yield (
            f"--global-batch-size {whole} is not --micro-batch-size {micro} x "
            f"data-parallel size {dp} x --gradient-accumulation-steps {steps}: drop one of them"
        )
    if whole % per_step and not training.decrease_batch_size_if_needed:
        yield (
            f"--global-batch-size {whole} is not divisible by "
            f"--micro-batch-size {micro} x data-parallel size {dp} = {per_step}"
        )
    if training.rampup_batch_size is not None:
        ramp = args.rampup_batch_size = [int(value) for value in training.rampup_batch_size]
        if len(ramp) != 3:
            yield "--rampup-batch-size takes START INCREMENT SAMPLES"
        elif ramp[0] % per_step or ramp[1] % per_step:
            yield f"--rampup-batch-size {ramp[0]} {ramp[1]}: both must be divisible by {per_step}"
        elif (whole - ramp[0]) % ramp[1]:
            yield f"--rampup-batch-size: {ramp[0]} + n x {ramp[1]} never is --global-batch-size"
        if training.train_samples is None:
            yield "--rampup-batch-size needs --train-samples instead of --train-iters"


def _heads(args: argparse.Namespace, model: ModelOptions) -> Iterator[str]:
    tp, heads = args.tensor_model_parallel_size, args.num_attention_heads
    if args.kv_channels is None:
        yield (
            f"--hidden-size {args.hidden_size} is not divisible by "
            f"--num-attention-heads {heads}; set --kv-channels"
        )
    aligned = not args.unaligned_linear  # else the feature says so
    if aligned and heads % tp:
        yield f"--num-attention-heads {heads} is not divisible by tensor parallel size {tp}"
    groups = model.num_query_groups or 1
    grouped = model.group_query_attention
    if grouped and heads % groups:
        yield f"--num-attention-heads {heads} is not divisible by --num-query-groups {groups}"
    elif aligned and grouped and groups % tp and tp % groups:
        yield f"--num-query-groups {groups}, tensor parallel size {tp}: one must divide the other"
    if args.multi_latent_attention and grouped:
        yield "--multi-latent-attention and --num-query-groups exclude each other"


def _model(args: argparse.Namespace) -> Iterator[str]:
    if args.cpu_offloading_num_layers:
        args.cpu_offloading = True  # as in Megatron-LM
    if args.fp16 and args.bf16:
        yield "--fp16 and --bf16 exclude each other"
    model = read(ModelOptions, args)
    yield from _heads(args, model)
    tp, channels = args.tensor_model_parallel_size, args.kv_channels
    latent = args.multi_latent_attention
    length, cp = args.seq_length, args.context_parallel_size
    if args.optimization_level < 2 and cp > 1 and length % (2 * cp):
        yield f"context parallel: {indivisible(length, cp)}"  # above, the feature says so
    if not args.unaligned_linear and args.sequence_parallel and length % tp:
        yield f"--seq-length {length} is not divisible by {tp} (--sequence-parallel)"
    if model.position_embedding_type == "rope" and not latent:
        rotated = int((channels or 2) * model.rotary_percent)
        if rotated < 2 or rotated % 2:
            yield (
                f"--position-embedding-type rope rotates pairs: {rotated} of --kv-channels "
                f"{channels} (--rotary-percent {model.rotary_percent}) is no even number"
            )
    layers, again = args.num_layers, args.recompute_num_layers or 0
    if args.recompute_granularity == "full" and again > layers:
        yield f"--recompute-num-layers {again} of {layers} layers"
    if args.max_position_embeddings < length:
        yield f"--max-position-embeddings is smaller than --seq-length {length}"
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
    if sum((model.swiglu, model.squared_relu, model.quick_geglu, model.geglu)) > 1:
        yield "give one of --swiglu, --squared-relu, --quick-geglu and --geglu"
    ranks, fused_router = args.context_parallel_size, args.moe_router_fusion
    yield from model_extras.problems(read(ModelConfig, args), ranks, fused_router=fused_router)


def _experts(args: argparse.Namespace) -> Iterator[str]:
    """Megatron checks these too, but only in the first step, with a traceback per rank."""
    tp, count, chosen = args.tensor_model_parallel_size, args.num_experts, args.moe_router_topk
    if count and chosen > count:
        yield f"--moe-router-topk {chosen} is more than --num-experts {count}"
    if count and tp > 1 and not args.sequence_parallel:
        yield (
            f"--num-experts {count} with --tensor-model-parallel-size {tp} needs "
            "--sequence-parallel: add it, or spread the experts with --expert-model-parallel-size"
        )


def _optimizer(args: argparse.Namespace) -> Iterator[str]:
    name = args.optimizer
    if name == "fused_adam":  # the original suite's name; every Adam here is fused
        name = args.optimizer = "adam"
    if name not in NAMES:
        yield f"--optimizer {name}: choose one of {', '.join(NAMES)}"
    if "muon" in name:
        yield from _muon(args, name)
    if args.accumulate_allreduce_grads_in_fp32 and args.main_grads_dtype != torch.float32:
        yield "--main-grads-dtype bf16 excludes --accumulate-allreduce-grads-in-fp32: drop one"


def _muon(args: argparse.Namespace, optimizer: str) -> Iterator[str]:
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
            yield f"--optimizer {optimizer} excludes --{name.replace('_', '-')}: drop one"
    if importlib.util.find_spec("emerging_optimizers") is None:
        yield (
            f"--optimizer {optimizer} needs a package next to NVIDIA's Transformer Engine: "
            "pip install git+https://github.com/NVIDIA-NeMo/Emerging-Optimizers@v0.1.0, or set "
            "MINDSPEED_TE=substitute"
        )
