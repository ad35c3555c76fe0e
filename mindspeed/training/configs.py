"""Megatron Core's configuration objects of resolved flags.

Each builder copies the fields its class declares from the namespace and adds what Megatron-LM's
training script derives: activation functions, data types, the pipeline's point-to-point mode.
"""

from __future__ import annotations

import argparse
import dataclasses
import traceback
import warnings
from functools import partial
from typing import Any

import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from mindspeed.adaptor.versions import at_least
from mindspeed.adaptor.versions.trainer import optimizer_config_class
from mindspeed.errors import ConfigError, MindSpeedError
from mindspeed.pipeline.placed_stages import layout_of
from mindspeed.tensor_parallel.unaligned.sizes import sizes_of
from mindspeed.training.arguments import namespace_name


def transformer_config(args: argparse.Namespace) -> TransformerConfig:
    """The model's configuration."""
    config_class = MLATransformerConfig if args.multi_latent_attention else TransformerConfig
    values = _fields_of(config_class, args)
    values.update(_activation(args))
    values["deallocate_pipeline_outputs"] = True
    values["pipeline_dtype"] = args.params_dtype
    values["batch_p2p_comm"] = not args.overlap_p2p_comm
    if at_least("0.15"):
        values["inference_sampling_seed"] = args.seed
        values["cuda_graph_scope"] = []  # whole layers; the class's own default is deprecated
    if not args.group_query_attention:
        values["num_query_groups"] = None
    if args.unaligned_linear:
        values.update(_uneven(args))
    if (layout := layout_of(vars(args))) is not None:
        values["pipeline_model_parallel_layout"] = layout
    if args.rope_type is None:
        values.pop("rope_type", None)
    for name in ("cp_comm_type", "moe_router_load_balancing_type", "moe_aux_loss_coeff"):
        value = values[name]
        if isinstance(value, list | tuple) and len(value) == 1:
            values[name] = value[0]
    variant = values.get("experimental_attention_variant")
    if variant is None or args.context_parallel_size == 1:
        return config_class(**values)
    # Megatron's gated delta net of 0.16 and 0.17 has no context parallelism; this library's has.
    config_class(**values | {"context_parallel_size": 1})  # all its other checks
    config = config_class(**values | {"experimental_attention_variant": None})
    config.experimental_attention_variant = variant
    return config


def check(args: argparse.Namespace) -> None:
    """Check final values with Megatron Core's classes, before any process group exists.

    Raises:
        ConfigError: one of them refuses the values.
    """
    builders = (transformer_config, partial(ddp_config, num_parameters=1), optimizer_config)
    for build in builders:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the run itself warns
                build(args)
        except MindSpeedError:
            raise
        except Exception as error:  # asserts, ValueError and more, some of them without a message
            place = traceback.extract_tb(error.__traceback__)[-1]
            reason = " ".join(str(error).split()) or f"{place.line} does not hold"
            raise ConfigError(f"Megatron Core refuses these flags: {reason}") from error


def ddp_config(args: argparse.Namespace, num_parameters: int) -> DistributedDataParallelConfig:
    """Gradient reduction. Buckets matter only when the reduction is overlapped."""
    values = _fields_of(DistributedDataParallelConfig, args)
    values["grad_reduce_in_fp32"] = args.accumulate_allreduce_grads_in_fp32
    if args.ddp_num_buckets is not None:
        values["bucket_size"] = num_parameters // args.ddp_num_buckets
    elif args.ddp_bucket_size is None:
        # Large enough per rank of a wide data-parallel group to be bandwidth-bound.
        values["bucket_size"] = max(40_000_000, 1_000_000 * args.data_parallel_size)
    if not args.overlap_grad_reduce:
        values["bucket_size"] = None
    return DistributedDataParallelConfig(**values)


def optimizer_config(args: argparse.Namespace) -> OptimizerConfig:
    """The optimizer's configuration; for Muon also that of the Adam that it is chained with."""
    config_class = optimizer_config_class(args.optimizer)
    return config_class(**_fields_of(config_class, args))


def _fields_of(config_class: type, args: argparse.Namespace) -> dict[str, Any]:
    values = {}
    for field in dataclasses.fields(config_class):
        name = namespace_name(field.name)
        if field.init and hasattr(args, name):
            values[field.name] = getattr(args, name)
    return values


def _uneven(args: argparse.Namespace) -> dict[str, int]:
    """Heads and query groups that do not divide; each rank replaces them by its own."""
    sizes = sizes_of(vars(args))
    return {} if sizes is None else {**sizes.counts(args.tensor_model_parallel_size)}


def _activation(args: argparse.Namespace) -> dict[str, Any]:
    if args.swiglu:
        return {
            "activation_func": F.silu,
            "gated_linear_unit": True,
            "bias_activation_fusion": args.bias_swiglu_fusion,
        }
    values: dict[str, Any] = {"bias_activation_fusion": args.bias_gelu_fusion}
    if args.squared_relu:
        from megatron.core.activations import squared_relu

        values["activation_func"] = squared_relu
    elif args.openai_gelu:
        tanh_gelu = partial(F.gelu, approximate="tanh")
        values.update(activation_func=tanh_gelu, bias_activation_fusion=False)
    elif args.geglu:
        tanh_gelu = partial(F.gelu, approximate="tanh")
        values.update(activation_func=tanh_gelu, gated_linear_unit=True)
        values["bias_activation_fusion"] = False
    elif args.quick_geglu:
        from megatron.core.fusions.fused_bias_geglu import quick_gelu

        values.update(activation_func=quick_gelu, gated_linear_unit=True)
    return values
