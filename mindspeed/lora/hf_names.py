"""Places of the rows of an adapted layer in Hugging Face's model, by the family's mapping table."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from mindspeed.errors import CheckpointError
from mindspeed.lora.config import WHOLE
from mindspeed.lora.layers import order_of
from mindspeed.models.families import Family, families
from mindspeed.models.shape import Shape, shape_of
from mindspeed.models.table import Parameter, parameters
from mindspeed.models.weight_shards import split


def shape_of_model(chunk: Any) -> Shape:
    """Sizes of a built model; its vocabulary counts with padding.

    Args:
        chunk: A pipeline stage, without wrappers.
    """
    config = chunk.config
    padded = chunk.vocab_size
    values = {
        **vars(config),
        "num_experts": config.num_moe_experts,
        "group_query_attention": True,
        "padded_vocab_size": padded,
        "vocab_size": padded,
        "untie_embeddings_and_output_weights": not chunk.share_embeddings_and_output_weights,
        "add_dense_bias": any(n.endswith(".linear_proj.bias") for n, _ in chunk.named_parameters()),
    }
    return shape_of(argparse.Namespace(**values))


def table_of(family: Family, shape: Shape) -> dict[str, Parameter]:
    """All matrices of a model by their Megatron module."""
    return {
        parameter.name.removesuffix(".weight"): parameter
        for parameter in parameters(family.rules, shape)
        if len(parameter.shape) == 2
    }


def untied(shape: Shape) -> Shape:
    """The sizes of a model whose output layer has a weight of its own."""
    return replace(shape, has=shape.has | {"untied"})


def saved_modules(names: Collection[str], family: Family, shape: Shape) -> tuple[str, ...]:
    """Modules that are trained whole, by their names in Megatron's model (local layer spec).

    Args:
        names: Last names of modules, or more of them, as Hugging Face has them or Megatron.
        family: Of the model.
        shape: Its sizes.

    Raises:
        CheckpointError: A module of Megatron has more of Hugging Face's than are named.
    """
    found, used = dict[str, None](), set[str]()
    for parameter in parameters(family.rules, shape):
        modules = [source.rpartition(".")[0] for source in parameter.sources]
        meant = {m: next((n for n in names if f".{m}".endswith(f".{n}")), None) for m in modules}
        if all(meant.values()):
            found[parameter.name.rpartition(".")[0]] = None
            used |= {name for name in meant.values() if name}
        elif any(meant.values()):
            raise CheckpointError(
                f"{', '.join(m for m, n in meant.items() if n)} cannot be trained whole alone: it "
                f"is one module with {', '.join(m for m, n in meant.items() if not n)} "
                f"({parameter.name}); name all of them"
            )
    return (*(name for name in names if name not in used), *found)


def family_with(
    tensors: Collection[str], layers: Collection[str], shape: Shape
) -> tuple[Family, dict[str, Parameter]]:
    """The family whose models have these Hugging Face tensors, and its table.

    Args:
        tensors: Hugging Face tensors.
        layers: Megatron layers that it has, too.
        shape: Sizes of the model.

    Raises:
        CheckpointError: None has; names a module.
    """
    missing = ""
    for family in families().values():
        try:
            table = table_of(family, shape)
        except KeyError:  # a size that this model does not have
            continue
        known = {s for one in parameters(family.rules, shape) for s in one.sources}
        unknown = [name.removesuffix(".weight") for name in tensors if name not in known]
        unknown += [layer for layer in layers if layer not in table]
        if not unknown:
            return family, table
        if not missing or len(unknown) < len(tensors) + len(layers):
            missing = unknown[0]
    raise CheckpointError(f"the base model has no linear layer {missing}")


def whole_parts(layer: str, parameter: Parameter, shape: Shape) -> dict[str, int]:
    """Parts of a whole layer with their rows, as :func:`mindspeed.lora.layers.parts_of` has them.

    Args:
        layer: Its Megatron name.
        parameter: Its weight.
        shape: Sizes of the model.
    """
    leaf, rows = layer.rpartition(".")[2], parameter.shape[0]
    if leaf == "linear_qkv":
        query = shape["qkv"] - 2 * shape["key"]  # with its gate, where there is one
        return {"q": query, "k": shape["key"], "v": shape["key"]}
    if leaf == "linear_fc1" and parameter.split == "halves":
        return {"gate": rows // 2, "up": rows // 2}
    return {WHOLE: rows}


def rows_in_layer(
    parameter: Parameter, parts: Mapping[str, int], head: int
) -> dict[str, torch.Tensor]:
    """Indices of the rows of each Hugging Face module in the layer's parts.

    Args:
        parameter: The layer's weight.
        parts: Rows of each part, of the whole layer.
        head: Rows of one key head.

    Returns:
        Module -> int64 ``[rows]``: for each of its rows, its index in the concatenated parts.
    """
    total = sum(parts.values())
    order = order_of(dict(parts), head)
    numbers = torch.arange(total) if order is None else order
    found = split(numbers, parameter.segments)
    return {name.removesuffix(".weight"): rows for name, rows in found.items()}


def part_of(rows: torch.Tensor, parts: Mapping[str, int]) -> str:
    """The part that contains all these rows; ``all`` if they are in more than one.

    Args:
        rows: Row indices, int64 ``[rows]``.
        parts: Rows of each part, in the order of concatenation.
    """
    start = 0
    for name, count in parts.items():
        if bool(((rows >= start) & (rows < start + count)).all()):
            return name
        start += count
    return WHOLE


def start_of(part: str, parts: Mapping[str, int]) -> int:
    """First row of a part when the parts stand one below the other."""
    names = list(parts)
    return 0 if part == WHOLE else sum(parts[name] for name in names[: names.index(part)])
