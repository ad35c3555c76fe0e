"""Names of modules in the whole model, which of them are linear layers, and what parts they have.

A pipeline stage counts its layers from 0; here ``decoder.layers.7.mlp.linear_fc1`` is layer 7 of
the whole model on whichever rank it lives.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

from mindspeed.lora.config import ALL_LINEAR, MEANINGS, WHOLE
from mindspeed.lora.experts import expert_cut_of
from mindspeed.lora.linear import Cut, cut_of

_LAYER = re.compile(r"decoder\.layers\.(\d+)(?=\.|$)")
_EXPERTS = ".experts."
_EXPERT = re.compile(r"\.local_experts\.(\d+)(?=\.)")
# Grouped experts are one module; their matrices have the names that those of single experts have.
_GROUPED = re.compile(r"\.experts\.(\w+)\.(lora_[AB])\.(\d+)\.")
# Ends of the model rather than layers of it.
_ENDS = ("output_layer", "word_embeddings")


def named_modules(chunk: Any) -> Iterator[tuple[str, Any]]:
    """All modules of a pipeline stage by their names in the whole model."""
    for local, module in chunk.named_modules():
        yield in_whole_model(chunk, local), module


def in_whole_model(chunk: Any, local: str) -> str:
    """A stage's name of a module or parameter -> its name in the whole model."""
    name = local
    if found := _LAYER.match(local):
        number = chunk.decoder.layers[int(found[1])].layer_number - 1
        name = f"decoder.layers.{number}{local[found.end() :]}"
    if _EXPERTS in name:
        first = first_expert(chunk.config)
        name = _EXPERT.sub(lambda m: f".local_experts.{first + int(m[1])}", name)
        name = _GROUPED.sub(lambda m: expert_layer("", first + int(m[3]), f"{m[1]}.{m[2]}."), name)
    return name


def expert_layer(mlp: str, expert: int, layer: str) -> str:
    """Name of a layer of an expert in the whole model, however experts are computed."""
    return f"{mlp}.experts.local_experts.{expert}.{layer}"


def first_expert(config: Any) -> int:
    """Number of this rank's first expert in the whole model."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return 0
    ranks = parallel_state.get_expert_model_parallel_world_size()
    rank: int = parallel_state.get_expert_model_parallel_rank()
    return rank * (config.num_moe_experts // ranks)


def is_expert(name: str) -> bool:
    """Whether a module or parameter belongs to experts that tokens are routed to."""
    return _EXPERTS in name


def is_end(name: str) -> bool:
    """Whether a module or parameter has the vocabulary's rows, padding included."""
    return name.startswith(tuple(f"{end}." for end in _ENDS))


def linear_layers(chunk: Any) -> Iterator[tuple[str, Any, Cut]]:
    """Linear layers that can have adapters; grouped experts are one of them."""
    for name, module in named_modules(chunk):
        cut = expert_cut_of(module) if is_expert(name) else cut_of(module)
        if cut is not None:
            yield name, module, cut


def short_name(name: str) -> str:
    """What users call a layer: ``linear_proj``, ``experts.linear_fc1``."""
    return ("experts." if is_expert(name) else "") + name.rpartition(".")[2]


def parts_of(name: str, module: Any, config: Any, cut: Cut) -> dict[str, int]:
    """Parts of a layer, with this rank's rows of each; ``{"all": rows}`` if it has one part.

    Args:
        name: Its name in the whole model.
        module: The layer.
        config: Megatron's configuration of the model.
        cut: How the layer is cut.
    """
    rows = rows_of(module)
    leaf = name.rpartition(".")[2]
    if leaf == "linear_fc1" and config.gated_linear_unit:
        return {"gate": rows // 2, "up": rows // 2}
    if leaf == "linear_qkv" and config.num_query_groups % cut.size == 0:
        head = config.kv_channels
        key = config.num_query_groups // cut.size * head
        query = config.num_attention_heads // cut.size * head
        if query + 2 * key == rows:
            return {"q": query, "k": key, "v": key}
    return {WHOLE: rows}


def rows_of(module: Any) -> int:
    """Rows of this rank's weight."""
    weight = module.weight0 if hasattr(module, "weight0") else module.weight
    return int(module.output_size_per_partition if weight is None else weight.shape[0])


def order_of(parts: dict[str, int], head: int) -> torch.Tensor | None:
    """For each row of the weight, its row when the parts stand one below the other.

    Args:
        parts: Rows of each part.
        head: Rows of one key head.
    """
    if "q" not in parts:
        return None
    groups = parts["k"] // head
    rows = torch.arange(sum(parts.values()))
    blocks = (part.view(groups, -1) for part in rows.split(tuple(parts.values())))
    return torch.cat(tuple(blocks), dim=1).flatten()


def targeted(name: str, parts: dict[str, int], targets: tuple[str, ...]) -> set[str]:
    """Which parts of a layer a list of names asks for; ``all`` for one A for all parts."""
    asked = set[str]()
    for target in targets:
        if is_expert(name) != (_EXPERTS in f".mlp.{target.removeprefix('mlp.')}"):
            continue
        target = target.removeprefix("mlp.").removeprefix("experts.")
        if target == ALL_LINEAR:
            asked |= set() if name in _ENDS else set(parts)
        for module, part in MEANINGS.get(target, ((target, WHOLE),)):
            if name == module or name.endswith(f".{module}"):
                # An MLP without a gate is only the part that others call up.
                asked.add(WHOLE if part == "up" and WHOLE in parts else part)
    return asked & {*parts, WHOLE}
