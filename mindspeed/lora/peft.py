"""Files of the ``peft`` package, read without it (written: :mod:`~mindspeed.lora.peft_write`).

    adapter_config.json          {"peft_type": "LORA", "r": 16, "lora_alpha": 32, ...}
    adapter_model.safetensors    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight ...

PEFT knows Hugging Face's layers, where q, k and v are three; the family's mapping table says which
rows of a Megatron layer they are. Experts are one module each, or, as transformers 5 has them, one
parameter of three dimensions for all (``target_parameters``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mindspeed.errors import CheckpointError
from mindspeed.files import check_path
from mindspeed.lora.config import WHOLE, LoraConfig
from mindspeed.lora.hf_names import (
    family_with,
    part_of,
    rows_in_layer,
    whole_parts,
)
from mindspeed.lora.peft_blocks import Block, divided, unfused
from mindspeed.models.finite import check_finite
from mindspeed.models.shape import Shape
from mindspeed.models.table import Parameter
from mindspeed.parsing import read_json
from mindspeed.ranges import ABOVE_ZERO, POSITIVE

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# What transformers 5 calls the experts of a layer, and its parameters our layers.
EXPERTS = "mlp.experts"
EXPERT_LAYERS = {"gate_up_proj": "linear_fc1", "down_proj": "linear_fc2"}
FUSED = re.compile(r"(.*\.layers\.(\d+)\.mlp\.experts)(\.base_layer)?")
_MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_ENDS = {"embed_tokens": "embedding.word_embeddings", "lm_head": "output_layer"}
# What peft offers beyond a plain adapter, with the values that mean "no".
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "layers_to_transform": (None,),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "megatron_config": (None,),
}


@dataclass(frozen=True)
class PeftFiles:
    """A PEFT directory in memory.

    Attributes:
        folder: Where it is.
        config: Options of the adapter.
        pairs: Hugging Face module -> its A and B, or those of its parts.
        experts: Layer and parameter that holds all its experts -> the same of each expert.
        whole: Hugging Face module that is saved whole -> its weight.
    """

    folder: Path
    config: LoraConfig
    pairs: Mapping[str, tuple[Block, ...]]
    experts: Mapping[tuple[int, str], list[tuple[Block, ...]]]
    whole: Mapping[str, torch.Tensor]


def read_config(folder: str | Path) -> dict[str, Any]:
    """``adapter_config.json`` of a plain LoRA adapter.

    Raises:
        CheckpointError: It is damaged, or uses more than plain LoRA.
    """
    path = Path(folder) / CONFIG
    values = read_json(path, str(path), CheckpointError)
    if problem := _problem(values):
        raise CheckpointError(f"{path}: {problem}")
    for name, allowed in _PLAIN.items():
        if name in values and values[name] not in allowed:
            raise CheckpointError(
                f"{path}: {name} = {values[name]!r} is not supported; only plain LoRA adapters are"
            )
    return values


def _problem(values: Any) -> str | None:
    """Errors in the numbers of an ``adapter_config.json``."""
    if not isinstance(values, dict):
        return "a JSON object is expected"
    for name, limits in {"r": POSITIVE, "lora_alpha": ABOVE_ZERO}.items():
        pattern = values.get("rank_pattern" if name == "r" else "alpha_pattern") or {}
        if not isinstance(pattern, dict):
            return f"{name}: patterns are a JSON object of modules and numbers"
        for number in (values.get(name), *pattern.values()):
            if isinstance(number, bool) or not isinstance(number, int | float):
                return f"{name} must be a number, not {number!r:.60}"
            if wrong := limits.problem(number):
                return f"{name} {wrong}"
            if name == "r" and number != int(number):
                return f"r must be a whole number, not {number}"
    dropout = values.get("lora_dropout") or 0.0
    if isinstance(dropout, bool) or not isinstance(dropout, int | float):
        return f"lora_dropout must be a number, not {dropout!r:.60}"
    for name in ("target_modules", "modules_to_save", "exclude_modules"):
        named = values.get(name) or []
        if not isinstance(named, str) and not (
            isinstance(named, list) and all(isinstance(one, str) for one in named)
        ):
            return f"{name} must be names of modules, not {named!r:.60}"
    return None


def read(folder: str | Path) -> PeftFiles:
    """Read a PEFT directory.

    Raises:
        CheckpointError: Files are missing, damaged or more than a plain adapter.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = Path(folder)
    values = read_config(folder)
    try:
        tensors = load_file(check_path(folder / WEIGHTS, "input"))
    except (FileNotFoundError, SafetensorError) as error:
        raise CheckpointError(f"{folder}/{WEIGHTS} cannot be read: {error}") from error
    halves: dict[str, dict[str, torch.Tensor]] = {}
    whole = {}
    for key, tensor in tensors.items():
        if tensor.dim() != 2 or not tensor.is_floating_point():
            raise CheckpointError(
                f"{folder}/{WEIGHTS}: {key} is {tensor.dtype} {list(tensor.shape)}; weights of an "
                "adapter are matrices of floating-point numbers"
            )
        check_finite(tensor, key, folder / WEIGHTS)
        module, _, half = key.removeprefix(PREFIX).removesuffix(".weight").rpartition(".lora_")
        if half in ("A", "B"):
            halves.setdefault(module, {})[half] = tensor.float()
        elif half.startswith("embedding_"):
            raise CheckpointError(
                f"{folder}/{WEIGHTS}: {module} has an adapter of embeddings, which is not "
                "supported; merge it with peft, or train them whole (modules_to_save)"
            )
        elif key.rpartition(".")[0].rpartition(".")[2] in _ENDS:
            whole[key.removeprefix(PREFIX).removesuffix(".weight")] = tensor.float()
        elif not key.endswith(".base_layer.weight"):  # the base model's, next to its adapter
            raise CheckpointError(f"{folder}/{WEIGHTS}: cannot use the tensor {key}")
    pairs, experts = {}, {}
    try:
        for module, pair in halves.items():
            if set(pair) != {"A", "B"}:
                raise CheckpointError(f"{module} has no A and B of rank {values['r']}")
            if found := FUSED.fullmatch(module):
                name = _fused_parameter(found, f"{found[1]}.base_layer" in halves, values)
                experts[int(found[2]), name] = unfused(
                    f"{found[1]}.{name}", pair["A"], pair["B"], values
                )
            else:
                pairs[module] = divided(module, pair["A"], pair["B"], values)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    targets = {_target(module, block) for module, blocks in pairs.items() for block in blocks}
    for (_, name), found_experts in experts.items():
        targets |= {f"experts.{block.name or name}" for block in found_experts[0]}
    config = LoraConfig(
        target_modules=tuple(sorted(targets)),
        r=values["r"],
        alpha=values["lora_alpha"],
        dropout=values.get("lora_dropout") or 0.0,
        modules_to_save=tuple(sorted({module.rpartition(".")[2] for module in whole})),
        use_rslora=bool(values.get("use_rslora")),
    )
    return PeftFiles(folder, config, pairs, experts, whole)


def _fused_parameter(module: re.Match[str], nested: bool, values: Mapping[str, Any]) -> str:
    """Which parameter of a layer's experts a module is about: peft wraps one into the other."""
    names = {name.rpartition(".")[2] for name in values.get("target_parameters") or ()}
    if not names or names - EXPERT_LAYERS.keys():
        raise CheckpointError(
            f"target_parameters = {values.get('target_parameters')!r} is not supported; "
            f"{' and '.join(f'{EXPERTS}.{name}' for name in EXPERT_LAYERS)} are"
        )
    if len(names) == 1:
        return names.pop()
    inner, outer = EXPERT_LAYERS
    return inner if module[3] or not nested else outer


def _target(module: str, block: Block) -> str:
    """Name of a part or layer in ``--lora-target-modules``."""
    name = block.name or module.rpartition(".")[2]
    if re.search(r"\.experts\.\d+\.", module):
        return f"experts.{_MIXTRAL.get(name, name)}"
    return name


def whole_tensors(files: PeftFiles, shape: Shape) -> dict[str, torch.Tensor]:
    """A PEFT adapter under the names of our adapter checkpoints.

    Args:
        files: The adapter.
        shape: Sizes of the base model; the vocabulary's may be the padded one.

    Returns:
        A ``[r, in]`` and B ``[rows of the part, r]`` of each part and the trained base tensors, in
        the dtypes of the files.

    Raises:
        CheckpointError: It belongs to another model; names the layer.
    """
    layers = {
        f"decoder.layers.{number}.mlp.experts.local_experts.{expert}.{EXPERT_LAYERS[name]}": blocks
        for (number, name), experts in files.experts.items()
        for expert, blocks in enumerate(experts)
    }
    try:
        _, table = family_with([*files.pairs, *files.whole], layers, shape)
        tensors: dict[str, torch.Tensor] = {}
        for layer, parameter in table.items():
            parts = whole_parts(layer, parameter, shape)
            if layer in layers:
                rows = torch.arange(parameter.shape[0])
                tensors |= _tensors(layer, layer, layers[layer], rows, parts, parameter)
            for module, rows in rows_in_layer(parameter, parts, shape["head"]).items():
                if module in files.pairs:
                    blocks = files.pairs[module]
                    tensors |= _tensors(layer, module, blocks, rows, parts, parameter)
                if module in files.whole:
                    tensors[f"{layer}.weight"] = files.whole[module]
    except CheckpointError as error:
        raise CheckpointError(f"{files.folder} is of another model: {error}") from None
    return tensors


def _tensors(
    layer: str,
    module: str,
    blocks: tuple[Block, ...],
    rows: torch.Tensor,
    parts: Mapping[str, int],
    parameter: Parameter,
) -> dict[str, torch.Tensor]:
    """A and B of one Hugging Face module by part; ``rows``: where its rows stand in the parts."""
    there = blocks[0].b.shape[0] * blocks[0].of
    end = module.rpartition(".")[2] in _ENDS  # padding has no rows in Hugging Face
    columns = blocks[0].a.shape[1]
    if columns != parameter.shape[1] or there > len(rows) or (there < len(rows) and not end):
        raise CheckpointError(
            f"{module} is {there} x {columns} there, {len(rows)} x {parameter.shape[1]} here"
        )
    found: dict[str, torch.Tensor] = {}
    for block in blocks:
        own = rows[block.start : block.start + block.b.shape[0]]
        found |= _layer_tensors(layer, block.a, block.b, own, parts)
    return found


def _layer_tensors(
    layer: str, a: torch.Tensor, b: torch.Tensor, rows: torch.Tensor, parts: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    """A and B of one Hugging Face module by part; rows that it lacks are zero."""
    part = part_of(rows, parts)
    stacked = b.new_zeros(sum(parts.values()), b.shape[1])
    stacked[rows[: b.shape[0]]] = b
    slices = zip(parts, stacked.split(tuple(parts.values())), strict=True)
    found = {f"{layer}.lora_B.{name}": rows for name, rows in slices if part in (name, WHOLE)}
    return {f"{layer}.lora_A.{part}": a, **found}
