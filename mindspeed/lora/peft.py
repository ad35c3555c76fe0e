"""Files of the ``peft`` package, read without it (written: :mod:`~mindspeed.lora.export`).

    adapter_config.json          {"peft_type": "LORA", "r": 16, "lora_alpha": 32, ...}
    adapter_model.safetensors    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight ...

PEFT knows Hugging Face's layers, where q, k and v are three; the family's mapping table says which
rows of a Megatron layer they are. Experts are one module each, or, as transformers 5 has them, one
parameter of three dimensions for all (``target_parameters``).

Merged into weights, every adapter that :mod:`mindspeed.lora.peft_fields` lets pass is exact.
Attached, each module has the rank and the scale that the file says (:func:`attached_config`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
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
    saved_modules,
    untied,
    whole_parts,
)
from mindspeed.lora.peft_blocks import FactorPair, divided, unfused
from mindspeed.lora.peft_fields import check_fields
from mindspeed.models.shape import Shape
from mindspeed.models.table import Parameter, parameters
from mindspeed.models.weight_shards import with_tensors
from mindspeed.models.weight_source import check_finite
from mindspeed.parsing import read_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Pairs = tuple[FactorPair, ...]
"""A and B of the parts of a module, in the order of its rows."""
PREFIX = "base_model.model."
# What transformers 5 calls the experts of a layer, and its parameters our layers.
EXPERTS = "mlp.experts"
EXPERT_LAYERS = {"gate_up_proj": "linear_fc1", "down_proj": "linear_fc2"}
FUSED = re.compile(r"(.*\.layers\.(\d+)\.mlp\.experts)(\.base_layer)?")
_MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_ENDS = {"embed_tokens": "embedding.word_embeddings", "lm_head": "output_layer"}


@dataclass(frozen=True)
class PeftFiles:
    """A PEFT directory in memory.

    Attributes:
        folder: Where it is.
        config: Options of the adapter.
        pairs: Hugging Face module -> its A and B, or those of its parts.
        experts: Layer and parameter that holds all its experts -> the same of each expert.
        whole: Hugging Face tensor of a module that is saved whole -> the tensor.
        magnitudes: Hugging Face module -> length of each row of its weight, ``[rows]`` (DoRA).
        tied: An embedding that is saved whole is the tied output layer, too.
        uniform: All modules that ``config`` names have an adapter of its rank and scale.
    """

    folder: Path
    config: LoraConfig
    pairs: Mapping[str, Pairs]
    experts: Mapping[tuple[int, str], list[Pairs]]
    whole: Mapping[str, torch.Tensor]
    magnitudes: Mapping[str, torch.Tensor] = field(default_factory=dict)
    tied: bool = False
    uniform: bool = True

    @property
    def ends(self) -> dict[str, torch.Tensor]:
        """Embedding and output layer that are saved whole -> weight ``[vocabulary, hidden]``."""
        weights = {n.removesuffix(".weight"): w for n, w in self.whole.items()}
        return {name: w for name, w in weights.items() if name.rpartition(".")[2] in _ENDS}

    def check_attached(self, *, tied_model: bool) -> None:
        """See that a model can have the adapter without merging it.

        Args:
            tied_model: The model's embedding is its output layer, too.

        Raises:
            CheckpointError: It cannot; names the reason and the command that merges it.
        """
        if tied_model and self.ends and not self.tied:
            raise CheckpointError(
                f"{self.folder}: modules_to_save = {sorted(self.ends)} unties the embedding; such "
                "an adapter is merged before it is used: "
                f"mindspeed merge-lora --load BASE --lora-load {self.folder} --save MERGED"
            )

    @property
    def unties(self) -> bool:
        """Whether the model with the adapter merged has an output layer of its own."""
        adapted = any(end_of(f"{name}.weight") for name in self.pairs)
        return bool(self.ends or adapted) and not self.tied


def read_config(folder: str | Path) -> dict[str, Any]:
    """``adapter_config.json`` of an adapter that can be read.

    Raises:
        CheckpointError: It is damaged, or describes another kind of adapter.
    """
    path = Path(folder) / CONFIG
    values = read_json(path, str(path), CheckpointError)
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: a JSON object is expected")
    check_fields(values, path)
    return values


def read(folder: str | Path) -> PeftFiles:
    """Read a PEFT directory.

    Raises:
        CheckpointError: Files are missing, damaged or of another kind of adapter.
    """
    folder = Path(folder)
    values = read_config(folder)
    found = _sorted(_tensors_of(folder), folder)
    if values.get("ensure_weight_tying"):
        _drop_copies(found, folder)
    try:
        pairs, experts = _pairs(found, values)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    every = [*pairs.values(), *(blocks for each in experts.values() for blocks in each)]
    ranks = {block.a.shape[0] for blocks in every for block in blocks}
    scales = [block.scale for blocks in every for block in blocks]
    described = float(values["lora_alpha"] / _divisor(values, values["r"]))
    scale = described if not scales or any(_same(s, described) for s in scales) else scales[0]
    targets = {_target(module, block) for module, blocks in pairs.items() for block in blocks}
    for (_, name), found_experts in experts.items():
        targets |= {f"experts.{block.name or name}" for block in found_experts[0]}
    r = max(ranks, default=values["r"])
    ends = {name for name in found.whole if end_of(name)}
    config = LoraConfig(
        target_modules=tuple(sorted(targets)),
        r=r,
        alpha=values["lora_alpha"]
        if (r, scale) == (values["r"], described)
        else scale * _divisor(values, r),
        dropout=values.get("lora_dropout") or 0.0,
        modules_to_save=tuple(sorted({end_of(name) for name in ends})),
        use_rslora=bool(values.get("use_rslora")),
        use_dora=bool(values.get("use_dora")),
        use_bias=bool(values.get("lora_bias")),
        ensure_weight_tying=bool(values.get("ensure_weight_tying")),
    )
    same = len(ranks) < 2 and all(_same(one, scale) for one in scales)
    return PeftFiles(
        folder,
        config,
        pairs,
        experts,
        found.whole,
        found.magnitudes,
        bool(values.get("ensure_weight_tying")),
        same and not _some_layers(values),
    )


@dataclass(frozen=True)
class _Sorted:
    """Tensors of a file by their role; modules and tensors by their Hugging Face names."""

    halves: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    magnitudes: dict[str, torch.Tensor] = field(default_factory=dict)
    whole: dict[str, torch.Tensor] = field(default_factory=dict)


def _pairs(
    found: _Sorted, values: Mapping[str, Any]
) -> tuple[dict[str, Pairs], dict[tuple[int, str], list[Pairs]]]:
    """A and B of modules, and of experts by layer and name."""
    pairs: dict[str, Pairs] = {}
    experts: dict[tuple[int, str], list[Pairs]] = {}
    for module, pair in found.halves.items():
        biased = bool(values.get("lora_bias")) and not FUSED.fullmatch(module)
        if pair.keys() - {"bias"} != {"A", "B"}:
            raise CheckpointError(f"{module} has no A and B of rank {values['r']}")
        if ("bias" in pair) != biased:
            raise CheckpointError("lora_B.bias and lora_bias belong together")
        if match := FUSED.fullmatch(module):
            name = _fused_parameter(match, f"{match[1]}.base_layer" in found.halves, values)
            where = f"{match[1]}.{name}"
            experts[int(match[2]), name] = unfused(where, pair["A"], pair["B"], values)
        else:
            _check_named(module, values)
            pairs[module] = divided(module, pair["A"], pair["B"], values, pair.get("bias"))
    if bool(values.get("use_dora")) != bool(found.magnitudes):
        raise CheckpointError("lora_magnitude_vector and use_dora belong together")
    if missing := pairs.keys() ^ found.magnitudes.keys() if found.magnitudes else ():
        raise CheckpointError(f"{min(missing)} has no lora_magnitude_vector, or nothing else")
    return pairs, experts


def _tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors: dict[str, torch.Tensor] = load_file(check_path(folder / WEIGHTS, "input"))
    except (FileNotFoundError, SafetensorError) as error:
        raise CheckpointError(f"{folder}/{WEIGHTS} cannot be read: {error}") from error
    return tensors


def _sorted(tensors: Mapping[str, torch.Tensor], folder: Path) -> _Sorted:
    found = _Sorted()
    for key, tensor in tensors.items():
        name = key.removeprefix(PREFIX)
        module, _, half = name.removesuffix(".weight").rpartition(".lora_")
        vector = half in ("magnitude_vector", "B.bias") or (not module and tensor.dim() == 1)
        if not (tensor.dim() == 2 or vector) or not tensor.is_floating_point():
            raise CheckpointError(
                f"{folder}/{WEIGHTS}: {key} is {tensor.dtype} {list(tensor.shape)}; weights of an "
                "adapter are matrices of floating-point numbers"
            )
        check_finite(tensor, key, folder / WEIGHTS)
        if half in ("A", "B"):
            found.halves.setdefault(module, {})[half] = tensor.float()
        elif half == "magnitude_vector":
            found.magnitudes[module] = tensor.float()
        elif half == "B.bias":
            found.halves.setdefault(module, {})["bias"] = tensor.float()
        elif half in ("embedding_A", "embedding_B"):  # of one-hot inputs
            ours = "A" if half == "embedding_B" else "B"
            found.halves.setdefault(module, {})[ours] = tensor.float().t().contiguous()
        elif module:
            raise CheckpointError(f"{folder}/{WEIGHTS}: cannot use the tensor {key}")
        elif not name.endswith(".base_layer.weight"):  # the base model's, next to its adapter
            found.whole[name] = tensor.float()
    return found


def _drop_copies(found: _Sorted, folder: Path) -> None:
    """Leave out the output layer of a tied model, which peft saves a second time."""
    pairs = {f"{name}.weight": list(pair.values()) for name, pair in found.halves.items()}
    for tensors in ({name: [one] for name, one in found.whole.items()}, pairs):
        ends = {end_of(name): name for name in tensors if end_of(name)}
        if {"embed_tokens", "lm_head"} <= ends.keys():
            one, copy = (tensors[ends[end]] for end in ("embed_tokens", "lm_head"))
            if not all(any(torch.equal(a, b) for b in copy) for a in one):
                raise CheckpointError(
                    f"{folder}: ensure_weight_tying = true, but the weights differ"
                )
            found.whole.pop(ends["lm_head"], None)
            found.halves.pop(ends["lm_head"].removesuffix(".weight"), None)


def _divisor(values: Mapping[str, Any], rank: int) -> float:
    return rank**0.5 if values.get("use_rslora") else float(rank)


def _same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-6)


def _some_layers(values: Mapping[str, Any]) -> bool:
    """Whether the configuration names modules of some layers only."""
    if values.get("layers_to_transform") not in (None, []):
        return True
    targets = values.get("target_modules") or []
    if isinstance(targets, str):
        return targets != "all-linear"
    return any(re.search(r"\.\d+\.", name) for name in targets)


def end_of(tensor: str) -> str:
    """``embed_tokens`` or ``lm_head`` if a tensor is its weight, else an empty text."""
    module = tensor.removesuffix(".weight").rpartition(".")[2]
    return module if module in _ENDS and tensor.endswith(".weight") else ""


def _check_named(module: str, values: Mapping[str, Any]) -> None:
    """See that the configuration names a module of the file: peft leaves out the others."""
    targets, excluded = values.get("target_modules"), values.get("exclude_modules")
    if targets is not None and targets != "all-linear" and not _named(module, targets):
        raise CheckpointError(f"target_modules = {targets!r:.60} does not name {module}")
    if excluded and _named(module, excluded):
        raise CheckpointError(f"exclude_modules = {excluded!r:.60} names {module}")
    layers = values.get("layers_to_transform")
    if layers is None or layers == []:
        return
    patterns = values.get("layers_pattern") or [r"[^.]*"]
    patterns = [patterns] if isinstance(patterns, str) else patterns
    numbers = (_match(rf"(?:.*?\.)??(?:{name})\.(\d+)\..*", module) for name in patterns)
    number = next((int(found[1]) for found in numbers if found), None)
    if number not in ([layers] if isinstance(layers, int) else layers):
        raise CheckpointError(f"layers_to_transform = {layers!r:.60} does not name {module}")


def _named(module: str, names: str | list[str]) -> bool:
    if isinstance(names, str):
        return _match(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _match(pattern: str, module: str) -> re.Match[str] | None:
    try:
        return re.fullmatch(pattern, module)
    except re.error as error:
        raise CheckpointError(f"{pattern!r:.60} is no pattern of names: {error}") from error


def _fused_parameter(module: re.Match[str], nested: bool, values: Mapping[str, Any]) -> str:
    """The parameter of a layer's experts that a module is about: peft wraps one into the other."""
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


def _target(module: str, block: FactorPair) -> str:
    """Name of a part or layer in ``--lora-target-modules``."""
    name = block.name or module.rpartition(".")[2]
    if re.search(r"\.experts\.\d+\.", module):
        return f"experts.{_MIXTRAL.get(name, name)}"
    return name


def whole_tensors(
    files: PeftFiles, shape: Shape, *, own_scales: bool = False
) -> dict[str, torch.Tensor]:
    """A PEFT adapter under the names of our adapter checkpoints.

    Args:
        files: The adapter.
        shape: Sizes of the base model; the vocabulary's may be the padded one.
        own_scales: Every B is for the scale of its module, not for the configuration's.

    Returns:
        A ``[r, in]`` and B ``[rows of the part, r]`` of each part, its magnitudes ``[rows]`` and
        the trained embedding and output layer, fp32.

    Raises:
        CheckpointError: It belongs to another model; names the layer.
    """
    tensors: dict[str, torch.Tensor] = {}
    try:
        table, placed = _placed(files, shape)
        for layer, parts, rows, block in placed:
            own = block.scale
            scale = own if own_scales or _same(own, files.config.scale) else files.config.scale
            tensors |= _layer_tensors(layer, block.a, block.b * (own / scale), rows, parts)
            if block.bias is not None:
                bias = block.bias * (own / scale)
                tensors |= _row_tensors(f"{layer}.lora_bias", bias, rows, parts, 0.0)
        for layer, parameter in table.items():
            parts = whole_parts(layer, parameter, shape)
            for module, rows in rows_in_layer(parameter, parts, shape["head"]).items():
                if module in files.magnitudes:
                    lengths = files.magnitudes[module]
                    name = f"{layer}.lora_magnitude"
                    tensors |= _row_tensors(name, lengths, rows, parts, float("nan"))
                if module in files.ends:
                    tensors[f"{layer}.weight"] = files.ends[module]
        tensors |= _saved_tensors(files, shape)
    except CheckpointError as error:
        raise CheckpointError(f"{files.folder} is of another model: {error}") from None
    return tensors


def _saved_tensors(files: PeftFiles, shape: Shape) -> dict[str, torch.Tensor]:
    """The modules between the ends that are saved whole, by the names of Megatron's parameters."""
    others = {name: one for name, one in files.whole.items() if not end_of(name)}
    if not others:
        return {}
    family, _ = family_with(_names(files), (), _shape_for(files, shape))
    found = {}
    for parameter in parameters(family.rules, shape):
        if set(parameter.sources) <= others.keys():
            empty = next(iter(others.values())).new_empty(parameter.shape)
            found[parameter.name] = with_tensors(empty, others, parameter.segments)
    return found


def _names(files: PeftFiles) -> list[str]:
    return [*(f"{module}.weight" for module in files.pairs), *files.whole]


def _shape_for(files: PeftFiles, shape: Shape) -> Shape:
    """The sizes of a model that has the output layer that is adapted."""
    return untied(shape) if any(end_of(f"{m}.weight") == "lm_head" for m in files.pairs) else shape


def attached_config(files: PeftFiles, shape: Shape) -> LoraConfig:
    """The options of an adapter that a model is to have: with rank and alpha of each module.

    Args:
        files: The adapter.
        shape: As for :func:`whole_tensors`.

    Raises:
        CheckpointError: It belongs to another model; names the layer.
    """
    config, modules = files.config, {}
    try:
        others = {name.rpartition(".")[0] for name in files.whole if not end_of(name)}
        if others:
            family, _ = family_with(_names(files), (), _shape_for(files, shape))
            saved = saved_modules(others, family, shape)
            config = replace(config, modules_to_save=(*config.modules_to_save, *saved))
        if files.uniform:
            return config
        _, placed = _placed(files, shape)
    except CheckpointError as error:
        raise CheckpointError(f"{files.folder} is of another model: {error}") from None
    for layer, parts, rows, block in placed:
        r = block.a.shape[0]
        alpha = block.scale * (r**0.5 if files.config.use_rslora else r)
        modules[f"{layer}.{part_of(rows, parts)}"] = (r, alpha)
    return replace(config, modules=modules)


_Placed = tuple[str, Mapping[str, int], torch.Tensor, FactorPair]


def _placed(files: PeftFiles, shape: Shape) -> tuple[dict[str, Parameter], list[_Placed]]:
    """The model's table; layer, its parts, rows in these, and matrices of each block."""
    layers = {
        f"decoder.layers.{number}.mlp.experts.local_experts.{expert}.{EXPERT_LAYERS[name]}": blocks
        for (number, name), experts in files.experts.items()
        for expert, blocks in enumerate(experts)
    }
    shape = _shape_for(files, shape)
    _, table = family_with(_names(files), layers, shape)
    found = list[_Placed]()
    for layer, parameter in table.items():
        parts = whole_parts(layer, parameter, shape)
        if layer in layers:
            rows = torch.arange(parameter.shape[0])
            found += _blocks_of(layer, layer, layers[layer], rows, parts, parameter)
        for module, rows in rows_in_layer(parameter, parts, shape["head"]).items():
            if module in files.pairs:
                found += _blocks_of(layer, module, files.pairs[module], rows, parts, parameter)
    return table, found


def _blocks_of(
    layer: str,
    module: str,
    blocks: Pairs,
    rows: torch.Tensor,
    parts: Mapping[str, int],
    parameter: Parameter,
) -> Iterator[_Placed]:
    """The blocks of one Hugging Face module; ``rows``: where its rows stand in the parts."""
    there = blocks[0].b.shape[0] * blocks[0].of
    end = module.rpartition(".")[2] in _ENDS  # padding has no rows in Hugging Face
    columns = blocks[0].a.shape[1]
    if columns != parameter.shape[1] or there > len(rows) or (there < len(rows) and not end):
        raise CheckpointError(
            f"{module} is {there} x {columns} there, {len(rows)} x {parameter.shape[1]} here"
        )
    for block in blocks:
        yield layer, parts, rows[block.start : block.start + block.b.shape[0]], block


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


def _row_tensors(
    name: str, vector: torch.Tensor, rows: torch.Tensor, parts: Mapping[str, int], other: float
) -> dict[str, torch.Tensor]:
    """Numbers of the rows of one Hugging Face module by part; ``other`` where it has none."""
    part = part_of(rows, parts)
    stacked = vector.new_full((sum(parts.values()),), other)
    stacked[rows[: len(vector)]] = vector
    slices = zip(parts, stacked.split(tuple(parts.values())), strict=True)
    return {f"{name}.{own}": rows for own, rows in slices if part in (own, WHOLE)}
