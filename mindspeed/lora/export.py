"""An adapter checkpoint as files of the ``peft`` package; no model and no process group.

The files are written without that package (read: :mod:`mindspeed.lora.peft`). An adapter with one A
for a whole layer is written with a copy of that A for each of its Hugging Face layers; parts with
an A each of what is one tensor there become blocks of one adapter; experts are written as
transformers 5 has them. All three compute the same.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from mindspeed.errors import ConfigError
from mindspeed.files import atomic_write_text, atomic_writer, make_dirs
from mindspeed.lora.config import DESCRIPTION, EMBEDDING, OUTPUT, WHOLE, LoraConfig, is_expert
from mindspeed.lora.flags import base_model
from mindspeed.lora.hf_names import (
    part_of,
    rows_in_layer,
    start_of,
    table_of,
    untied,
    whole_parts,
)
from mindspeed.lora.linear import as_one
from mindspeed.lora.load import whole_adapter
from mindspeed.lora.peft import CONFIG, EXPERT_LAYERS, EXPERTS, FUSED, PREFIX, WEIGHTS
from mindspeed.lora.peft_blocks import fused
from mindspeed.models.families import Family, family_of_args
from mindspeed.models.shape import Shape, shape_of
from mindspeed.models.table import Parameter, parameters
from mindspeed.models.weight_shards import split
from mindspeed.storage.safe_metadata import common_state


def export_peft(checkpoint: Path, folder: str | Path) -> None:
    """Write the adapter of one iteration as a PEFT directory.

    Args:
        checkpoint: Directory of the iteration.
        folder: Directory to write; an adapter not called ``default`` gets a folder in it, as PEFT
            does.

    Raises:
        ConfigError: The model has no counterpart in Hugging Face.
    """
    args = common_state(checkpoint)["args"]
    config = LoraConfig.from_json(checkpoint / DESCRIPTION).plain
    shape = shape_of(args)
    if config.adapter_name != "default":
        folder = Path(folder) / config.adapter_name
    base = base_model(args)
    tensors = whole_adapter(checkpoint, shape)
    write(folder, config, tensors, family_of_args(args), shape, base)


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
        tensors: Whole tensors by their names in an adapter checkpoint: A ``[r, in]`` and B
            ``[rows of the part, r]`` of each part and trained base tensors, any floating dtype.
        family: How the base model is called in Hugging Face.
        shape: Sizes of the base model.
        base: Name or directory of the base model.

    Raises:
        ConfigError: The family has no counterpart of a layer.
    """
    from safetensors.torch import save

    if any(name.startswith(f"{OUTPUT}.lora_") for name in tensors):
        shape = untied(shape)
    written = _Written(config, family, shape)
    written.add_saved({name: one for name, one in tensors.items() if ".lora_" not in name})
    for layer, matrices in sorted(_by_layer(tensors).items(), key=lambda item: _order(item[0])):
        written.add_layer(layer, matrices)
    written.add_experts()
    folder = make_dirs(folder)
    with atomic_writer(folder / WEIGHTS, "wb") as file:
        file.write(save(written.tensors, metadata={"format": "pt"}))
    atomic_write_text(folder / CONFIG, json.dumps(written.fields(base), indent=2) + "\n")


class _Written:
    """Tensors of a PEFT file, and what its description says of them.

    Attributes:
        tensors: by their keys in the file.
    """

    def __init__(self, config: LoraConfig, family: Family, shape: Shape) -> None:
        self._config, self._family, self._shape = config, family, shape
        self._table = table_of(family, shape)
        self._named = {one.name: one for one in parameters(family.rules, shape)}
        self.tensors: dict[str, torch.Tensor] = {}
        self._sizes: dict[str, tuple[int, float]] = {}  # module -> rank and scale
        self._copies = set[str]()  # further names of tied weights
        self._experts: dict[tuple[str, str], list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def add_saved(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Add trained tensors of the base model."""
        for name, tensor in tensors.items():
            if name not in self._named:
                raise self._no_counterpart(name)
            parameter = self._named[name]
            for source, weight in split(tensor, parameter.segments).items():
                for copy in (source, *parameter.tied):  # one parameter here, two keys there
                    self.tensors[PREFIX + copy] = weight.contiguous().clone()
                self._copies |= {copy.removesuffix(".weight") for copy in parameter.tied}

    def add_layer(self, layer: str, matrices: Mapping[str, torch.Tensor]) -> None:
        """Add the adapter of a layer; those of experts wait for :meth:`add_experts`."""
        if layer not in self._table:
            raise self._no_counterpart(layer)
        parameter = self._table[layer]
        if layer == EMBEDDING:
            self._add_embedding(parameter, matrices)
            return
        if is_expert(layer):
            above = parameter.sources[0].split(".experts.")[0].rpartition(".")[0]
            name = next(n for n, ours in EXPERT_LAYERS.items() if layer.endswith(f".{ours}"))
            a, b, scale = self._one_pair(layer, parameter, matrices)
            self._experts.setdefault((above, name), []).append((a, b))
            self._sizes[f"{above}.experts.{name}"] = (a.shape[0], scale)
            return
        pairs = _pairs(layer, self._config, matrices, parameter, self._shape)
        for module, (a, b, scale) in pairs.items():
            self._add(module, a, b)
            self._sizes[module] = (a.shape[0], scale)
        if self._config.use_dora:
            self.tensors |= _lengths(layer, matrices, parameter, self._shape)
        if self._config.use_bias:
            self.tensors |= _biases(layer, matrices, parameter, self._shape)

    def _add_embedding(self, parameter: Parameter, matrices: Mapping[str, torch.Tensor]) -> None:
        (source,) = parameter.sources
        module = source.removesuffix(".weight")
        a, b, scale = self._one_pair(EMBEDDING, parameter, matrices)
        b = split(b, parameter.segments)[source]
        self.tensors[f"{PREFIX}{module}.lora_embedding_A"] = b.t().contiguous()
        self.tensors[f"{PREFIX}{module}.lora_embedding_B"] = a.t().contiguous()
        self._sizes[module] = (a.shape[0], scale)
        if self._config.ensure_weight_tying:
            for copy in (one.removesuffix(".weight") for one in parameter.tied):
                self._add(copy, a, b)
                self._copies.add(copy)

    def add_experts(self) -> None:
        """Add the adapters of all experts of each layer as one."""
        for (above, name), pairs in self._experts.items():
            # The last parameter's adapter is wrapped around the first one's.
            inner = name == "gate_up_proj" and (above, "down_proj") in self._experts
            self._add(f"{above}.{EXPERTS}{'.base_layer' if inner else ''}", *fused(pairs))

    def fields(self, base: str) -> dict[str, Any]:
        """The description, ``adapter_config.json``; ``base`` is the base model."""
        config = self._config
        names = {key.removeprefix(PREFIX).removesuffix(".weight") for key in self.tensors}
        adapted = {n.rpartition(".lora_")[0] for n in names if ".lora_" in n} - self._copies
        kept = {n.removesuffix(".bias") for n in names - self._copies if ".lora_" not in n}
        values = _config(config, self._targets(adapted), self._saved_modules(kept), base)
        ranks = {module: r for module, (r, _) in self._sizes.items()}
        alphas = {m: s * (r**0.5 if config.use_rslora else r) for m, (r, s) in self._sizes.items()}
        values["rank_pattern"] = _pattern(ranks, config.r)
        values["alpha_pattern"] = _pattern(alphas, config.alpha)
        if self._experts:
            parameters_ = sorted({name for _, name in self._experts})
            values["target_parameters"] = [f"{EXPERTS}.{name}" for name in parameters_]
        if self._copies or config.ensure_weight_tying:
            values["ensure_weight_tying"] = True
        return values

    def _targets(self, adapted: set[str]) -> list[str]:
        """The shortest names of the adapted modules."""
        targets = {n.rpartition(".")[2] for n in adapted if not FUSED.fullmatch(n)}
        if not self._config.modules:
            return sorted(targets)
        every = (source for one in self._table.values() for source in one.sources)
        there = {source.removesuffix(".weight") for source in every}  # some layers may have none
        found = (_shortest(t, {m for m in there if _leaf(m) == t}, adapted) for t in targets)
        return sorted(set().union(*found))

    def _saved_modules(self, kept: set[str]) -> set[str]:
        """The shortest names of the base modules that were trained."""
        every = (source for one in self._named.values() for source in one.sources)
        modules = {source.rpartition(".")[0] for source in every}
        leaves = {_leaf(one) for one in kept}
        found = (_shortest(leaf, {m for m in modules if m.endswith(leaf)}, kept) for leaf in leaves)
        return set().union(*found)

    def _add(self, module: str, a: torch.Tensor, b: torch.Tensor) -> None:
        self.tensors[f"{PREFIX}{module}.lora_A.weight"] = a.contiguous().clone()
        self.tensors[f"{PREFIX}{module}.lora_B.weight"] = b.contiguous().clone()

    def _one_pair(
        self, layer: str, parameter: Parameter, matrices: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, float]:
        parts = whole_parts(layer, parameter, self._shape)
        return _one_pair(layer, self._config, matrices, parts)

    def _no_counterpart(self, name: str) -> ConfigError:
        return ConfigError(f"family {self._family.name} has no counterpart of {name}")


def _leaf(module: str) -> str:
    return module.rpartition(".experts.")[1].lstrip(".") + module.rpartition(".")[2]


def _shortest(leaf: str, there: set[str], adapted: set[str]) -> set[str]:
    """Names that mean the adapted ones of all modules that end in ``leaf``."""
    return {leaf} if there <= adapted else there & adapted


def _pattern(values: Mapping[str, float], default: float) -> dict[str, float]:
    """Values that are not the default one, by the last name where all modules of it agree."""
    by_leaf: dict[str, dict[str, float]] = {}
    for module, value in values.items():
        by_leaf.setdefault(_leaf(module), {})[module] = value
    found: dict[str, float] = {}
    for leaf, own in by_leaf.items():
        if len(set(own.values())) == 1:
            own = {leaf: next(iter(own.values()))}
        found |= {name: v for name, v in own.items() if not math.isclose(v, default)}
    return found


def _order(layer: str) -> list[str | int]:
    """Numbers as numbers, so that the experts of a layer come in order."""
    return [int(word) if word.isdecimal() else word for word in re.split(r"(\d+)", layer)]


def _one_pair(
    layer: str, config: LoraConfig, matrices: Mapping[str, torch.Tensor], parts: Mapping[str, int]
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """A, B and scale of a whole layer; parts become blocks."""
    lora_a, lora_b = (
        {k.removeprefix(half): m for k, m in matrices.items() if k.startswith(half)}
        for half in ("lora_A.", "lora_B.")
    )
    scales = {name: _scale(layer, name, config) for name in lora_a}
    scale = next(iter(scales.values()))
    scaled = {name: b * (scales.get(name, scale) / scale) for name, b in lora_b.items()}
    return *as_one(lora_a, scaled, parts, None), scale


def _scale(layer: str, part: str, config: LoraConfig) -> float:
    return config.scale_of(*config.of_module(f"{layer}.{part}"))


def _by_layer(tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """``{layer: {"lora_A.q": ..., "lora_B.q": ...}}``."""
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        layer, dot, matrix = name.partition(".lora_")
        if dot:
            layers.setdefault(layer, {})[f"lora_{matrix}"] = tensor.float()
    return layers


def _pairs(
    layer: str,
    config: LoraConfig,
    matrices: Mapping[str, torch.Tensor],
    parameter: Parameter,
    shape: Shape,
) -> dict[str, tuple[torch.Tensor, torch.Tensor, float]]:
    """A, B and scale of each Hugging Face module of a layer."""
    shared = matrices.get(f"lora_A.{WHOLE}")
    parts = whole_parts(layer, parameter, shape)
    found = {}
    for module, rows in rows_in_layer(parameter, parts, shape["head"]).items():
        part = part_of(rows, parts)
        if shared is not None:
            stacked = torch.cat([matrices[f"lora_B.{name}"] for name in parts])
            found[module] = shared, stacked[rows], _scale(layer, WHOLE, config)
        elif part == WHOLE:
            a, b, scale = _one_pair(layer, config, matrices, parts)
            found[module] = a, b[rows], scale
        elif f"lora_A.{part}" in matrices:
            b = matrices[f"lora_B.{part}"][rows - start_of(part, parts)]
            found[module] = matrices[f"lora_A.{part}"], b, _scale(layer, part, config)
    return found


def _lengths(
    layer: str, matrices: Mapping[str, torch.Tensor], parameter: Parameter, shape: Shape
) -> dict[str, torch.Tensor]:
    """Lengths of the rows of each Hugging Face module of a layer, by their keys in the file."""
    found = {}
    for module, lengths in _vectors("lora_magnitude", layer, matrices, parameter, shape):
        if lengths.isnan().all():
            continue
        if lengths.isnan().any():
            raise ConfigError(
                f"{layer}: peft has one adapter for {module}, with a length of every row, and "
                "only some of its parts were adapted with --lora-use-dora"
            )
        found[f"{PREFIX}{module}.lora_magnitude_vector"] = lengths
    return found


def _biases(
    layer: str, matrices: Mapping[str, torch.Tensor], parameter: Parameter, shape: Shape
) -> dict[str, torch.Tensor]:
    """Biases of B of each Hugging Face module of a layer, by their keys in the file."""
    vectors = _vectors("lora_bias", layer, matrices, parameter, shape)
    return {
        f"{PREFIX}{module}.lora_B.bias": bias.nan_to_num(0)
        for module, bias in vectors
        if not bias.isnan().all()
    }


def _vectors(
    kind: str,
    layer: str,
    matrices: Mapping[str, torch.Tensor],
    parameter: Parameter,
    shape: Shape,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each Hugging Face module of a layer, and numbers of its rows; NaN where there are none."""
    parts = whole_parts(layer, parameter, shape)
    unknown = [torch.full((rows,), math.nan) for rows in parts.values()]
    own = (matrices.get(f"{kind}.{n}", o) for n, o in zip(parts, unknown, strict=True))
    stacked = torch.cat(list(own))
    for module, rows in rows_in_layer(parameter, parts, shape["head"]).items():
        yield module, stacked[rows]


def _config(config: LoraConfig, targets: list[str], whole: set[str], base: str) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.r,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "use_rslora": config.use_rslora,
        "use_dora": config.use_dora,
        "lora_bias": config.use_bias,
        "target_modules": targets,
        "modules_to_save": sorted(whole) or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
