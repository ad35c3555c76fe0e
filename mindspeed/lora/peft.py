"""Files of the ``peft`` package, read and written without it.

    adapter_config.json          {"peft_type": "LORA", "r": 16, "lora_alpha": 32, ...}
    adapter_model.safetensors    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight ...

PEFT knows Hugging Face's layers, where q, k and v are three; the family's mapping table says which
rows of a Megatron layer they are. An adapter with one A for a whole layer is written with a copy
of that A for each of its Hugging Face layers, which computes the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mindspeed.errors import CheckpointError, ConfigError
from mindspeed.files import atomic_write_text, atomic_writer, check_path, make_dirs
from mindspeed.lora.config import WHOLE, LoraConfig
from mindspeed.lora.hf_names import (
    family_with,
    part_of,
    rows_in_layer,
    start_of,
    table_of,
    whole_parts,
)
from mindspeed.lora.linear import as_one
from mindspeed.lora.names import is_expert
from mindspeed.lora.peft_blocks import Block, divided, fused, unfused
from mindspeed.models.families import Family
from mindspeed.models.rows import split
from mindspeed.models.shape import Shape
from mindspeed.models.table import Parameter

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# What transformers 5 calls the experts of a layer, and its parameters our layers.
_EXPERTS = "mlp.experts"
_EXPERT_LAYERS = {"gate_up_proj": "linear_fc1", "down_proj": "linear_fc2"}
_FUSED = re.compile(r"(.*\.layers\.(\d+)\.mlp\.experts)(\.base_layer)?")
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
        CheckpointError: It is damaged, or asks for more than a plain adapter.
    """
    path = Path(folder) / CONFIG
    try:
        values: dict[str, Any] = json.loads(check_path(path, "input").read_text("utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    for name, allowed in _PLAIN.items():
        if name in values and values[name] not in allowed:
            raise CheckpointError(
                f"{path}: {name} = {values[name]!r} is not supported; only plain LoRA adapters are"
            )
    return values


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
        module, _, half = key.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".lora_")
        if half in ("A", "B"):
            halves.setdefault(module, {})[half] = tensor.float()
        elif half.startswith("embedding_"):
            raise CheckpointError(
                f"{folder}/{WEIGHTS}: {module} has an adapter of embeddings, which is not "
                "supported; merge it with peft, or train them whole (modules_to_save)"
            )
        elif key.rpartition(".")[0].rpartition(".")[2] in _ENDS:
            whole[key.removeprefix(_PREFIX).removesuffix(".weight")] = tensor.float()
        elif not key.endswith(".base_layer.weight"):  # the base model's, beside its adapter
            raise CheckpointError(f"{folder}/{WEIGHTS}: cannot use the tensor {key}")
    pairs, experts = {}, {}
    try:
        for module, pair in halves.items():
            if set(pair) != {"A", "B"}:
                raise CheckpointError(f"{module} has no A and B of rank {values['r']}")
            if found := _FUSED.fullmatch(module):
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
    if not names or names - _EXPERT_LAYERS.keys():
        raise CheckpointError(
            f"target_parameters = {values.get('target_parameters')!r} is not supported; "
            f"{' and '.join(f'{_EXPERTS}.{name}' for name in _EXPERT_LAYERS)} are"
        )
    if len(names) == 1:
        return names.pop()
    inner, outer = _EXPERT_LAYERS
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

    Raises:
        CheckpointError: It belongs to another model; names the layer.
    """
    layers = {
        f"decoder.layers.{number}.mlp.experts.local_experts.{expert}.{_EXPERT_LAYERS[name]}": blocks
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


def write(
    folder: str | Path,
    config: LoraConfig,
    tensors: Mapping[str, torch.Tensor],
    family: Family,
    shape: Shape,
    base: str = "",
) -> None:
    """Write a PEFT directory.

    Args:
        folder: Directory, made if it is missing; its files are replaced one by one.
        config: Options of the adapter.
        tensors: Whole tensors by their names in an adapter checkpoint.
        family: How the base model is called in Hugging Face.
        shape: Sizes of the base model.
        base: Name or directory of the base model.

    Raises:
        ConfigError: The family has no counterpart of a layer.
    """
    from safetensors.torch import save

    table = table_of(family, shape)
    out: dict[str, torch.Tensor] = {}
    blocks: dict[str, int] = {}
    experts: dict[tuple[str, str], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for layer, matrices in sorted(_by_layer(tensors).items(), key=lambda item: _order(item[0])):
        if layer not in table:
            raise ConfigError(f"family {family.name} has no counterpart of {layer}")
        parameter = table[layer]
        if "weight" in matrices:
            for name, weight in split(matrices["weight"], parameter.segments).items():
                out[_PREFIX + name] = weight.contiguous()
        elif is_expert(layer):
            above = parameter.sources[0].split(".experts.")[0].rpartition(".")[0]
            name = next(n for n, ours in _EXPERT_LAYERS.items() if layer.endswith(f".{ours}"))
            pair = _one_pair(matrices, whole_parts(layer, parameter, shape))
            experts.setdefault((above, name), []).append(pair)
            blocks[f"experts.{name}"] = pair[0].shape[0] // config.r
        else:
            for module, (a, b) in _pairs(layer, matrices, parameter, shape).items():
                out[f"{_PREFIX}{module}.lora_A.weight"] = a.contiguous().clone()
                out[f"{_PREFIX}{module}.lora_B.weight"] = b.contiguous()
                blocks[module.rpartition(".")[2]] = a.shape[0] // config.r
    for (above, name), pairs in experts.items():
        # The last parameter's adapter is wrapped around the first one's.
        inner = name == "gate_up_proj" and (above, "down_proj") in experts
        module = f"{_PREFIX}{above}.{_EXPERTS}{'.base_layer' if inner else ''}"
        out[f"{module}.lora_A.weight"], out[f"{module}.lora_B.weight"] = fused(pairs)
    folder = make_dirs(folder)
    with atomic_writer(folder / WEIGHTS, "wb") as file:
        file.write(save(out, metadata={"format": "pt"}))
    names = {key.removeprefix(_PREFIX).removesuffix(".weight") for key in out}
    adapted = {n.rpartition(".lora_")[0] for n in names if ".lora_" in n}
    targets = {n.rpartition(".")[2] for n in adapted if not _FUSED.fullmatch(n)}
    whole = {name.rpartition(".")[2] for name in names if ".lora_" not in name}
    parameters = [f"{_EXPERTS}.{name}" for name in sorted({name for _, name in experts})]
    values = _config(config, sorted(targets), whole, base)
    several = {name: count for name, count in blocks.items() if count > 1}
    grow = 0.5 if config.use_rslora else 1.0
    values["rank_pattern"] = {name: config.r * count for name, count in several.items()}
    values["alpha_pattern"] = {name: config.alpha * count**grow for name, count in several.items()}
    if parameters:
        values["target_parameters"] = parameters
    atomic_write_text(folder / CONFIG, json.dumps(values, indent=2) + "\n")


def _order(layer: str) -> list[str | int]:
    """Numbers as numbers, so that the experts of a layer come in order."""
    return [int(word) if word.isdecimal() else word for word in re.split(r"(\d+)", layer)]


def _one_pair(
    matrices: Mapping[str, torch.Tensor], parts: Mapping[str, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B of a whole layer; parts become blocks."""
    lora_a, lora_b = (
        {k.removeprefix(half): m for k, m in matrices.items() if k.startswith(half)}
        for half in ("lora_A.", "lora_B.")
    )
    return as_one(lora_a, lora_b, parts, None)


def _by_layer(tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """``{layer: {"lora_A.q": ..., "lora_B.q": ...}}``, or ``{layer: {"weight": ...}}``."""
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        layer, dot, matrix = name.partition(".lora_")
        if dot:
            layers.setdefault(layer, {})[f"lora_{matrix}"] = tensor.float()
        else:
            layers.setdefault(name.removesuffix(".weight"), {})["weight"] = tensor
    return layers


def _pairs(
    layer: str, matrices: Mapping[str, torch.Tensor], parameter: Parameter, shape: Shape
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A and B of each Hugging Face module of a layer."""
    shared = matrices.get(f"lora_A.{WHOLE}")
    parts = whole_parts(layer, parameter, shape)
    found = {}
    for module, rows in rows_in_layer(parameter, parts, shape["head"]).items():
        part = part_of(rows, parts)
        if shared is not None:
            stacked = torch.cat([matrices[f"lora_B.{name}"] for name in parts])
            found[module] = shared, stacked[rows]
        elif part == WHOLE:
            a, b = _one_pair(matrices, parts)
            found[module] = a, b[rows]
        elif f"lora_A.{part}" in matrices:
            b = matrices[f"lora_B.{part}"]
            found[module] = matrices[f"lora_A.{part}"], b[rows - start_of(part, parts)]
    return found


def _config(config: LoraConfig, targets: list[str], whole: set[str], base: str) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.r,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "use_rslora": config.use_rslora,
        "target_modules": targets,
        "modules_to_save": sorted(whole) or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
