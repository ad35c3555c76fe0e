"""Megatron's names of one parameter: two layer specs, and checkpoints of both.

With the Transformer Engine spec a norm is part of the linear layer after it, and grouped experts
are one module. A ``torch_dist`` checkpoint stacks identical layers, and experts, so it needs a key
and a position:

    local    decoder.layers.3.pre_mlp_layernorm.weight
    engine   decoder.layers.3.mlp.linear_fc1.layer_norm_weight
    key      decoder.layers.mlp.linear_fc1.layer_norm_weight, (3,)

Megatron gives a checkpoint of the local spec the engine's keys, except where the layer has experts
or latent attention; ``tests/models`` compares this module with Megatron's own state dicts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from mindspeed.models.table import Parameter

Scheme = Literal["transformer_engine", "local"]
SCHEMES: tuple[Scheme, ...] = ("transformer_engine", "local")

_INPUT = (".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
_LINEAR = (".input_layernorm.", ".self_attention.in_proj.layer_norm_")
_MLP = (".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
_LATENT = (
    (".self_attention.q_layernorm.", ".self_attention.linear_q_up_proj.layer_norm_"),
    (".self_attention.kv_layernorm.", ".self_attention.linear_kv_up_proj.layer_norm_"),
)


@dataclass(frozen=True)
class ParameterAddress:
    """Place of a parameter in a checkpoint.

    Attributes:
        key: Name of the tensor in the checkpoint.
        position: Its indices in the stacked leading dimensions: layer, expert.
        counts: Sizes of those dimensions.
    """

    key: str
    position: tuple[int, ...]
    counts: tuple[int, ...]


def module_name(parameter: Parameter, scheme: Scheme, *, grouped: bool = False) -> str:
    """Name in the state dict of an unsharded model.

    Args:
        parameter: Which one.
        scheme: The layer spec.
        grouped: With ``--moe-grouped-gemm``.
    """
    name = parameter.name
    if scheme == "transformer_engine":
        renames = _LATENT if parameter.latent else (_LINEAR if parameter.linear else _INPUT,)
        name = _rename(name, renames if parameter.moe else (*renames, _MLP))
    if grouped and parameter.expert is not None:
        name = name.replace(f".local_experts.{parameter.expert}.", ".") + str(parameter.expert)
    return name


def plain_name(name: str) -> str:
    """Name with the local layer spec of a parameter of either spec."""
    for plain, engine in (_INPUT, _LINEAR, _MLP, *_LATENT):
        name = name.replace(engine, plain)
    return name


def local_name(
    parameter: Parameter,
    scheme: Scheme,
    layer: int | None,
    expert: int | None,
    *,
    grouped: bool = False,
) -> str:
    """Name in the state dict of one rank, which counts its own layers and experts.

    Args:
        parameter: Which one.
        scheme: The layer spec.
        layer: Number of its layer in the stage.
        expert: Number of its expert on the rank.
        grouped: With ``--moe-grouped-gemm``.
    """
    name = parameter.name.replace(f".layers.{parameter.layer}.", f".layers.{layer}.", 1)
    name = name.replace(f".local_experts.{parameter.expert}.", f".local_experts.{expert}.", 1)
    return module_name(replace(parameter, name=name, expert=expert), scheme, grouped=grouped)


def address(
    parameter: Parameter, scheme: Scheme, num_layers: int, num_experts: int, *, stacked: bool
) -> ParameterAddress:
    """Key and position in a checkpoint.

    Args:
        parameter: Which one.
        scheme: The layer spec of the model that the checkpoint is for.
        num_layers: Layers of the whole model.
        num_experts: Experts of a layer.
        stacked: Layers share keys; so it is unless the model's layers differ.
    """
    if scheme == "local" and not parameter.latent:
        name = _rename(parameter.name, (_INPUT, _MLP))
    else:
        name = module_name(parameter, scheme)
    position: list[int] = []
    counts: list[int] = []
    if parameter.layer is not None and stacked:
        name = name.replace(f".layers.{parameter.layer}.", ".layers.", 1)
        position.append(parameter.layer)
        counts.append(num_layers)
    if parameter.expert is not None:
        name = name.replace(f".local_experts.{parameter.expert}.", ".experts.")
        position.append(parameter.expert)
        counts.append(num_experts)
    return ParameterAddress(name, tuple(position), tuple(counts))


def addresses(
    parameter: Parameter, num_layers: int, num_experts: int
) -> Iterator[ParameterAddress]:
    """Every key under which a checkpoint may have a parameter, likely ones first."""
    for stacked in (True, False):
        for scheme in SCHEMES:
            yield address(parameter, scheme, num_layers, num_experts, stacked=stacked)


def _rename(name: str, renames: tuple[tuple[str, str], ...]) -> str:
    for old, new in renames:
        name = name.replace(old, new)
    return name
