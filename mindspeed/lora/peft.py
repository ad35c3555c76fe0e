"""Files of the ``peft`` package, read and written without it.

    adapter_config.json          {"peft_type": "LORA", "r": 16, "lora_alpha": 32, ...}
    adapter_model.safetensors    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight ...

PEFT knows Hugging Face's layers, where q, k and v are three; the family's mapping table says which
rows of a Megatron layer they are. An adapter with one A for a whole layer is written with a copy
of that A for each of its Hugging Face layers, which computes the same.
"""

from __future__ import annotations

import json
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
from mindspeed.models.families import Family
from mindspeed.models.rows import split
from mindspeed.models.shape import Shape
from mindspeed.models.table import Parameter

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_ENDS = {"embed_tokens": "embedding.word_embeddings", "lm_head": "output_layer"}
# What peft offers beyond a plain adapter, with the values that mean "no".
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": (None,),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "megatron_config": (None,),
    "target_parameters": (None, []),
}


@dataclass(frozen=True)
class PeftFiles:
    """A PEFT directory in memory.

    Attributes:
        folder: Where it is.
        config: Options of the adapter.
        pairs: Hugging Face module -> its A and B.
        whole: Hugging Face module that is saved whole -> its weight.
    """

    folder: Path
    config: LoraConfig
    pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
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
        elif key.rpartition(".")[0].rpartition(".")[2] in _ENDS:
            whole[key.removeprefix(_PREFIX).removesuffix(".weight")] = tensor.float()
        else:
            raise CheckpointError(f"{folder}/{WEIGHTS}: cannot use the tensor {key}")
    rank = values["r"]
    for module, pair in halves.items():
        if set(pair) != {"A", "B"} or pair["A"].shape[0] != rank or pair["B"].shape[1] != rank:
            raise CheckpointError(f"{folder}: {module} has no A and B of rank {rank}")
    config = LoraConfig(
        target_modules=tuple(sorted({module.rpartition(".")[2] for module in halves})),
        r=rank,
        alpha=values["lora_alpha"],
        dropout=values.get("lora_dropout") or 0.0,
        modules_to_save=tuple(sorted({module.rpartition(".")[2] for module in whole})),
        use_rslora=bool(values.get("use_rslora")),
    )
    pairs = {module: (pair["A"], pair["B"]) for module, pair in halves.items()}
    return PeftFiles(folder, config, pairs, whole)


def whole_tensors(files: PeftFiles, shape: Shape) -> dict[str, torch.Tensor]:
    """A PEFT adapter under the names of our adapter checkpoints.

    Args:
        files: The adapter.
        shape: Sizes of the base model; the vocabulary's may be the padded one.

    Raises:
        CheckpointError: It belongs to another model; names the layer.
    """
    try:
        _, table = family_with([*files.pairs, *files.whole], shape)
        tensors: dict[str, torch.Tensor] = {}
        for layer, parameter in table.items():
            parts = whole_parts(layer, parameter, shape)
            for module, rows in rows_in_layer(parameter, parts, shape["head"]).items():
                if module in files.pairs:
                    a, b = _checked(module, files, len(rows), parameter.shape[1])
                    tensors |= _layer_tensors(layer, a, b, rows, parts)
                if module in files.whole:
                    tensors[f"{layer}.weight"] = files.whole[module]
    except CheckpointError as error:
        raise CheckpointError(f"{files.folder} is of another model: {error}") from None
    return tensors


def _checked(
    module: str, files: PeftFiles, rows: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = files.pairs[module]
    end = module.rpartition(".")[2] in _ENDS  # padding has no rows in Hugging Face
    if a.shape[1] != columns or b.shape[0] > rows or (b.shape[0] < rows and not end):
        raise CheckpointError(
            f"{module} is {b.shape[0]} x {a.shape[1]} there, {rows} x {columns} here"
        )
    return a, b


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
        ConfigError: A layer has an A for each of its parts, but the family stores them as one.
    """
    from safetensors.torch import save

    table = table_of(family, shape)
    out: dict[str, torch.Tensor] = {}
    for layer, matrices in _by_layer(tensors).items():
        if layer not in table:
            raise ConfigError(f"family {family.name} has no counterpart of {layer}")
        if "weight" in matrices:
            for name, weight in split(matrices["weight"], table[layer].segments).items():
                out[_PREFIX + name] = weight.contiguous()
        else:
            for module, (a, b) in _pairs(layer, matrices, table[layer], shape).items():
                out[f"{_PREFIX}{module}.lora_A.weight"] = a.contiguous().clone()
                out[f"{_PREFIX}{module}.lora_B.weight"] = b.contiguous()
    folder = make_dirs(folder)
    with atomic_writer(folder / WEIGHTS, "wb") as file:
        file.write(save(out, metadata={"format": "pt"}))
    names = {key.removeprefix(_PREFIX).removesuffix(".weight") for key in out}
    adapted = {n.rpartition(".lora_")[0].rpartition(".")[2] for n in names if ".lora_" in n}
    whole = {name.rpartition(".")[2] for name in names if ".lora_" not in name}
    atomic_write_text(folder / CONFIG, _config_json(config, adapted, whole, base))


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
            raise ConfigError(
                f"{layer}: {module} is one tensor in Hugging Face, but its parts have an A each; "
                "for this family train it whole (query_key_value, linear_fc1)"
            )
        elif f"lora_A.{part}" in matrices:
            b = matrices[f"lora_B.{part}"]
            found[module] = matrices[f"lora_A.{part}"], b[rows - start_of(part, parts)]
    return found


def _config_json(config: LoraConfig, adapted: set[str], whole: set[str], base: str) -> str:
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.r,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "use_rslora": config.use_rslora,
        "target_modules": sorted(adapted),
        "modules_to_save": sorted(whole) or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    return json.dumps(values, indent=2) + "\n"
