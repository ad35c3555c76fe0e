"""Shards of a model's weights in any layout, loaded from ``--load``."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Sequence
from typing import Any

import torch

from tests.models import model_ranks


def weights(folder: str, load: str, flags: Sequence[str] = ()) -> list[tuple[Any, ...]]:
    """(name, offset, tensor) of each local tensor after loading ``load``."""
    import torch.distributed as dist

    from mindspeed import session
    from mindspeed.checkpoint.load import load as load_checkpoint
    from mindspeed.models.families import family_of_args
    from mindspeed.models.hf_load import local_shards
    from mindspeed.models.shape import shape_of
    from mindspeed.training import setup
    from mindspeed.training.model import build

    words = (*flags, f"--load={load}", "--exit-on-missing-checkpoint")
    args = model_ranks.resolved(folder, words, dist.get_world_size())
    session.install().configure(args)
    setup.initialize(args)
    model = build(args)
    loaded = load_checkpoint(args, model)
    assert loaded is not None and loaded.state.iteration == 0
    table = local_shards(model.modules, family_of_args(args), shape_of(args))
    return [(part.parameter.name, part.start, part.data.clone()) for part in table]


def save_trained(folder: str, output: str, flags: Sequence[str] = ()) -> None:
    """Load a directory, change every weight, save as a run does."""
    import torch.distributed as dist

    from mindspeed.checkpoint.load import load as load_checkpoint
    from mindspeed.checkpoint.save import Saver
    from mindspeed.job import TrainState
    from mindspeed.training import setup
    from mindspeed.training.model import build

    words = (*flags, f"--load=hf:{folder}", f"--save={output}", "--finetune")
    args = model_ranks.resolved(folder, words, dist.get_world_size())
    setup.initialize(args)
    model = build(args)
    load_checkpoint(args, model)
    with torch.no_grad():
        for module in model.modules:
            for parameter in module.parameters():
                parameter.mul_(1.5)
    Saver(args, model, "", 1.0).save(TrainState(3), last=True)


def state_dicts(folder: str, flags: Sequence[str] = ()) -> tuple[str, list[dict[str, Any]]]:
    """Where Megatron-LM keeps this rank's file, and the states of its stages after loading."""
    from megatron.core import parallel_state

    args, model = model_ranks.loaded(folder, flags)
    where = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if args.pipeline_model_parallel_size > 1:
        where += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    if args.expert_model_parallel_size > 1:
        where += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
    states = [
        {
            name: value.clone()
            for name, value in module.state_dict().items()
            if isinstance(value, torch.Tensor) and not name.endswith("_extra_state")
        }
        for module in model.modules
    ]
    return where, states


def seed_scripts(calls: Sequence[tuple[str, Sequence[str]]]) -> list[tuple[int, str]]:
    """Exit code and standard error of each call of a function of the seed's scripts."""
    from mindspeed.cli import ckpt_convert

    results = []
    for name, words in calls:
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors):
            results.append((getattr(ckpt_convert, name)(words), errors.getvalue()))
    return results


def gpt_args() -> argparse.Namespace:
    """Values of a model that no family describes, as Megatron-LM stores them."""
    return argparse.Namespace(
        num_layers=2,
        hidden_size=8,
        ffn_hidden_size=12,
        num_attention_heads=2,
        kv_channels=4,
        group_query_attention=False,
        num_query_groups=1,
        padded_vocab_size=16,
        max_position_embeddings=6,
        position_embedding_type="learned_absolute",
        normalization="LayerNorm",
        squared_relu=True,
        swiglu=False,
        add_bias_linear=True,
        add_qkv_bias=False,
        untie_embeddings_and_output_weights=False,
        num_experts=None,
        moe_layer_freq=1,
        transformer_impl="local",
        use_distributed_optimizer=False,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
    )


def gpt_shapes() -> dict[str, tuple[int, ...]]:
    """Its tensors, in the names of Megatron's local layer spec."""
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (16, 8),
        "embedding.position_embeddings.weight": (6, 8),
        "decoder.final_layernorm.weight": (8,),
        "decoder.final_layernorm.bias": (8,),
    }
    for layer in range(2):
        prefix = f"decoder.layers.{layer}."
        for name, shape in {
            "input_layernorm": (8,),
            "pre_mlp_layernorm": (8,),
            "self_attention.linear_qkv": (24, 8),
            "self_attention.linear_proj": (8, 8),
            "mlp.linear_fc1": (12, 8),
            "mlp.linear_fc2": (8, 12),
        }.items():
            shapes[f"{prefix}{name}.weight"] = shape
            shapes[f"{prefix}{name}.bias"] = shape[:1]
    return shapes
