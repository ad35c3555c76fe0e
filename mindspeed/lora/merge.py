"""Adapters into weights: ``W += (alpha / r) B A`` in fp32, then cast to the weight's type.

A base that was stored in fewer bits (``--base-weights``) is rounded to these first, whole: to what
the adapter was trained on. Scales of ranks that shared a weight may have been others.

With magnitudes m (DoRA) every row of the sum gets its length: ``W := m (W + s B A) / |W + s B A|``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from mindspeed.built_model import unwrap
from mindspeed.errors import CheckpointError, ConfigError
from mindspeed.flags import changed
from mindspeed.lora import peft
from mindspeed.lora.attach import adapted_layers, detach
from mindspeed.lora.config import EMBEDDING, HEAD, OUTPUT, WHOLE, is_end
from mindspeed.lora.hf_names import whole_parts
from mindspeed.lora.layers import order_of
from mindspeed.lora.linear import AdaptedLinear, as_one, take_adapter
from mindspeed.lora.load import config_of, is_peft, samples_of, whole_adapter
from mindspeed.lora.state import check_samples
from mindspeed.models.table import SCORE, Parameter
from mindspeed.models.weight_shards import source_rows, with_tensors
from mindspeed.models.weight_source import WeightSource
from mindspeed.te.quantized_weight import QuantizedFormat, QuantizedWeight, replace, rounded

_LINEAR = re.compile(r"\.(linear_\w+|eh_proj)\.weight$")
_EMBEDDING = f"{EMBEDDING}.weight"


@torch.no_grad()
def merge(chunks: Iterable[Any]) -> None:
    """Add every adapter to its layer's weight and remove it; the model is a plain one again.

    Each rank merges its slices; nothing is communicated but lengths of rows that ranks share
    (DoRA). The parameters stay frozen. Taking the adapter out again is exact only in fp32.

    Args:
        chunks: This rank's pipeline stages, wrapped for precision or not.
    """
    for chunk in unwrap(chunks):
        layers = adapted_layers(chunk)
        for name, layer in layers:
            if name in (EMBEDDING, OUTPUT) and chunk.share_embeddings_and_output_weights:
                _check_still_tied(name, layer, dict(layers))
        for name, layer in layers:
            for entry in layer.adapted_weights(name) if not layer._lora.shared else ():
                merged = layer.merged(entry)
                if isinstance(entry.weight, QuantizedWeight):
                    replace(layer, entry.weight, merged)  # type: ignore[arg-type]
                else:
                    entry.weight.copy_(merged)
            if layer._lora.config.use_bias:
                layer.bias.add_(layer._lora.bias(layer.lora_bias()))  # type: ignore[attr-defined]
            take_adapter(layer)
        detach(chunk)


def _check_still_tied(name: str, layer: AdaptedLinear, layers: Mapping[str, AdaptedLinear]) -> None:
    """See that both ends of a tied model have the adapter."""
    if not layer._lora.shared and not (OUTPUT in layers and layers[OUTPUT]._lora.shared):
        raise ConfigError(
            f"{name} alone is adapted, and embedding and output layer of the model have one "
            "weight: merged they have two, as mindspeed merge-lora writes them"
        )


class Merged(WeightSource):
    """The weights of a model with an adapter merged in, one parameter at a time.

    A tied model whose embedding or output layer was saved alone has both afterwards, as PEFT's has.

    Args:
        source: The base model, in any format.
        adapter: Directory of an adapter, ours or PEFT's.

    Raises:
        CheckpointError: There is no adapter, or it belongs to another model.
    """

    def __init__(self, source: WeightSource, adapter: str | Path) -> None:
        self._files = peft.read(adapter) if is_peft(adapter) else None
        values: dict[str, Any] = {}
        config = config_of(adapter).plain if self._files is None else self._files.config
        if HEAD in config.modules_to_save:
            values["objective"] = "reward"  # with the head that was trained beside the adapter
        if self._files is None:
            tensors = whole_adapter(adapter, source.shape)
            ends = any(".lora_" in key and is_end(key) for key in tensors)
            unties = ends and not config.ensure_weight_tying
        else:
            unties = self._files.unties
        if unties:
            values["untie_embeddings_and_output_weights"] = True
        super().__init__(source.where, changed(source.args, **values), source.family)
        self.unused = source.unused
        self._source, self._adapter = source, adapter
        self._originals = {parameter.name: parameter for parameter in source.table}
        self._config = config
        self._base = samples_of(adapter)
        self._layers: dict[str, dict[str, dict[str, torch.Tensor]]] = {}
        self._whole: dict[str, torch.Tensor] = {}
        if self._files is not None:
            tensors = peft.whole_tensors(self._files, self.shape)
            self._check_saved(self._files)
        for key, tensor in tensors.items():
            layer, dot, rest = key.partition(".lora_")
            if dot:
                matrix, _, part = rest.partition(".")
                self._layers.setdefault(layer, {}).setdefault(matrix, {})[part] = tensor.float()
            elif self._files is None:
                self._whole[key] = tensor
        self._named = {parameter.name: parameter for parameter in self.table}
        for layer, matrices in self._layers.items():
            self._check(layer, matrices, self._named.get(f"{layer}.weight"))
            if "bias" in matrices and f"{layer}.bias" not in self._named:
                raise CheckpointError(f"{adapter}: {layer} has no bias that lora_bias could change")

    def dtype(self, parameter: Parameter) -> torch.dtype:
        """The base model's."""
        return self._source.dtype(self._original(parameter))

    def read(self, parameter: Parameter) -> torch.Tensor:
        """A merged parameter, whole, ``[*parameter.shape]``, in the base model's dtype."""
        if parameter.name == SCORE.name:
            return self._whole[SCORE.name].to(self.dtype(parameter))
        weight = self._source.read(self._original(parameter))
        if self._config.base_weights and _LINEAR.search(parameter.name):
            form = QuantizedFormat(self._config.base_weights, self._config.double_quantization)
            weight, original = rounded(weight, form), weight
        else:
            original = weight
        layer = parameter.name.removesuffix(".weight")
        if self._files is not None:
            weight = with_tensors(weight, self._files.whole, parameter.segments)
        if parameter.name in self._whole:
            weight = weight.clone()
            rows = min(weight.shape[0], self._whole[parameter.name].shape[0])
            weight[:rows] = self._whole[parameter.name][:rows]
        if layer in self._layers:
            check_samples(parameter.name, original, self._base, Path(self._adapter))
            a, b = self._matrices(layer, parameter)
            merged = weight.float() + self._config.scale * (b @ a)
            if "magnitude" in self._layers[layer]:
                merged = _with_lengths(merged, self._lengths(layer, parameter))
            weight = merged.to(weight.dtype)
        biased = self._layers.get(parameter.name.removesuffix(".bias"), {})
        if parameter.name.endswith(".bias") and "bias" in biased:
            more = self._bias(parameter.name.removesuffix(".bias"))
            weight = (weight.float() + self._config.scale * more).to(weight.dtype)
        return weight

    def _bias(self, layer: str) -> torch.Tensor:
        """Biases of B of a layer, ``[rows]``, for the scale of the adapter."""
        parts = whole_parts(layer, self._named[f"{layer}.weight"], self.shape)
        order = order_of(parts, self.shape["head"])
        found = self._scaled(layer, "bias")
        whole = torch.cat([found.get(n, torch.zeros(rows)) for n, rows in parts.items()])
        return whole if order is None else whole[order]

    def _original(self, parameter: Parameter) -> Parameter:
        """The base model's; the embedding where it has none: of a tied output layer, of a head."""
        found = self._originals.get(parameter.name)
        return self._originals[_EMBEDDING] if found is None else found

    def _lengths(self, layer: str, parameter: Parameter) -> torch.Tensor:
        """Lengths of the rows of a merged weight, ``[rows]``; NaN where they follow from it."""
        parts = whole_parts(layer, parameter, self.shape)
        order = order_of(parts, self.shape["head"])
        found = self._layers[layer]["magnitude"]
        unknown = torch.full((sum(parts.values()),), float("nan"))
        slices = zip(parts, unknown.split(tuple(parts.values())), strict=True)
        lengths = torch.cat([found.get(name, rows) for name, rows in slices])
        return lengths if order is None else lengths[order]

    def _check_saved(self, files: peft.PeftFiles) -> None:
        """See that the model has the tensors that were saved whole, as large."""
        rows: dict[str, int] = {}
        columns: dict[str, tuple[int, ...]] = {}
        for parameter in self.table:
            rows |= source_rows(parameter.segments)
            columns |= dict.fromkeys(parameter.sources, parameter.shape[1:])
        for name, tensor in files.whole.items():
            shape = (rows[name], *columns[name]) if name in rows else None
            if shape == tuple(tensor.shape):
                continue
            there = "has no such tensor" if shape is None else f"has {list(shape)}"
            more = "; add its tokens to the base with mindspeed convert --added-token-num"
            grown = shape is not None and peft.end_of(name) and len(tensor) > shape[0]
            raise CheckpointError(
                f"{self._adapter}: {name} is {list(tensor.shape)} there, and {self.where} {there}"
                + (more if grown else "")
            )

    def _matrices(self, layer: str, parameter: Parameter) -> tuple[torch.Tensor, torch.Tensor]:
        parts = whole_parts(layer, parameter, self.shape)
        order = order_of(parts, self.shape["head"])
        a, b = as_one(self._layers[layer]["A"], self._scaled(layer, "B"), parts, order)
        if is_end(parameter.name):  # the base may be padded otherwise
            real = b[: self.shape["vocab"]]
            b = torch.cat((real, real.new_zeros(parameter.shape[0] - real.shape[0], b.shape[1])))
        return a, b

    def _scaled(self, layer: str, kind: str) -> dict[str, torch.Tensor]:
        """B of each part, or its bias, for the scale of the adapter."""
        shared = WHOLE in self._layers[layer]["A"]
        names = {name: f"{layer}.{WHOLE if shared else name}" for name in self._layers[layer][kind]}
        config = self._config
        scales = {n: config.scale_of(*config.of_module(full)) for n, full in names.items()}
        pairs = self._layers[layer][kind].items()
        return {name: b * (scales[name] / config.scale) for name, b in pairs}

    def _check(
        self,
        layer: str,
        matrices: Mapping[str, Mapping[str, torch.Tensor]],
        parameter: Parameter | None,
    ) -> None:
        there = "has no such layer"
        if parameter is not None:
            a, b = self._matrices(layer, parameter)
            if (b.shape[0], a.shape[1]) == parameter.shape:
                return
            there = f"has {parameter.shape[0]} x {parameter.shape[1]}"
        elif layer.startswith("mtp."):
            raise CheckpointError(
                f"{self._adapter} changes {layer}, and files of the family {self.family.name} have "
                "no multi-token prediction; merge it in the built model, with mindspeed.lora.merge"
            )
        raise CheckpointError(
            f"{self._adapter} is an adapter of another model: it changes {layer}, and "
            f"{self.where} {there}"
        )


def _with_lengths(weight: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Rows ``[rows, columns]`` of given lengths ``[rows]``, fp32; those of NaN as they are."""
    factor = lengths / torch.linalg.vector_norm(weight, dim=1)
    return torch.where(lengths.isnan(), torch.ones_like(lengths), factor)[:, None] * weight
