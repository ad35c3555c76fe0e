"""Names of modules in the whole model, and which of them a list of targets names.

A pipeline stage counts its layers from 0; here ``decoder.layers.7.mlp.linear_fc1`` is layer 7 of
the whole model on whichever rank it lives.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from mindspeed.lora.config import ALL_LINEAR, MEANINGS, WHOLE

_LAYER = re.compile(r"decoder\.layers\.(\d+)(?=\.|$)")
_EXPERTS = ".experts."
_EXPERT = re.compile(r"\.local_experts\.(\d+)(?=\.)")
# Grouped experts are one module; their matrices have the names that those of single experts have.
_GROUPED = re.compile(r"\.experts\.(\w+)\.(lora_(?:initial_)?[AB])\.(\d+)\.")
_MATRIX = re.compile(r"\.lora_(A|B|bias|initial_A|initial_B|magnitude)\.")
# Ends of the model rather than layers of it.
EMBEDDING, OUTPUT = "embedding.word_embeddings", "output_layer"


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


def is_adapter_weight(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return _MATRIX.search(name) is not None


def is_end(name: str) -> bool:
    """Whether a module or parameter has the vocabulary's rows, padding included."""
    return name.startswith((f"{EMBEDDING}.", f"{OUTPUT}."))


def short_name(name: str) -> str:
    """The name of a layer for users: ``linear_proj``, ``experts.linear_fc1``."""
    return ("experts." if is_expert(name) else "") + name.rpartition(".")[2]


def targeted(name: str, parts: dict[str, int], targets: tuple[str, ...]) -> set[str]:
    """The parts of a layer that a list of targets names; ``all`` for one A for all parts."""
    asked = set[str]()
    for target in targets:
        if is_expert(name) != (_EXPERTS in f".mlp.{target.removeprefix('mlp.')}"):
            continue
        target = target.removeprefix("mlp.").removeprefix("experts.")
        if target == ALL_LINEAR:
            asked |= set() if name in (EMBEDDING, OUTPUT) else set(parts)
        for module, part in MEANINGS.get(target, ((target, WHOLE),)):
            if name == module or name.endswith(f".{module}"):
                # An MLP without a gate is only the part that others call up.
                asked.add(WHOLE if part == "up" and WHOLE in parts else part)
    return asked & {*parts, WHOLE}
