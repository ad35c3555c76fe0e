"""Adapters into weights: ``W += (alpha / r) B A`` in fp32, then cast to the weight's type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from mindspeed.built_model import unwrap
from mindspeed.errors import CheckpointError
from mindspeed.lora.attach import adapted_layers, detach
from mindspeed.lora.hf_names import whole_parts
from mindspeed.lora.layers import order_of
from mindspeed.lora.linear import as_one, take_adapter
from mindspeed.lora.load import config_of, samples_of, whole_adapter
from mindspeed.lora.state import check_samples
from mindspeed.models.table import Parameter
from mindspeed.models.weight_source import WeightSource

_OUTPUT = "output_layer."


@torch.no_grad()
def merge(chunks: Iterable[Any]) -> None:
    """Add every adapter to its layer's weight and remove it; the model is a plain one again.

    Each rank merges its slices, nothing is communicated. The parameters stay frozen. Taking the
    adapter out again is exact only in fp32.

    Args:
        chunks: This rank's pipeline stages, wrapped for precision or not.
    """
    for chunk in unwrap(chunks):
        for name, layer in adapted_layers(chunk):
            for entry in layer.adapted_weights(name):
                entry.weight.copy_(entry.weight.float() + layer.delta(entry))
            take_adapter(layer)
        detach(chunk)


class Merged(WeightSource):
    """The weights of a model with an adapter merged in, one parameter at a time.

    Args:
        source: The base model, in any format.
        adapter: Directory of an adapter, ours or PEFT's.

    Raises:
        CheckpointError: There is no adapter, or it belongs to another model.
    """

    def __init__(self, source: WeightSource, adapter: str | Path) -> None:
        super().__init__(source.where, source.args, source.family)
        self.unused = source.unused
        self._source, self._adapter = source, adapter
        self._config = config_of(adapter)
        self._base = samples_of(adapter)
        self._layers: dict[str, dict[str, dict[str, torch.Tensor]]] = {}
        self._whole: dict[str, torch.Tensor] = {}
        for key, tensor in whole_adapter(adapter, self.shape).items():
            layer, dot, rest = key.partition(".lora_")
            if dot:
                matrix, _, part = rest.partition(".")
                self._layers.setdefault(layer, {}).setdefault(matrix, {})[part] = tensor.float()
            else:
                self._whole[key] = tensor
        table = {parameter.name: parameter for parameter in self.table}
        for layer, matrices in self._layers.items():
            self._check(layer, matrices, table.get(f"{layer}.weight"))

    def dtype(self, parameter: Parameter) -> torch.dtype:
        """The base model's."""
        return self._source.dtype(parameter)

    def read(self, parameter: Parameter) -> torch.Tensor:
        """A merged parameter, whole, ``[*parameter.shape]``, in the base model's dtype."""
        weight = self._source.read(parameter)
        layer = parameter.name.removesuffix(".weight")
        if parameter.name in self._whole:
            weight = weight.clone()
            rows = min(weight.shape[0], self._whole[parameter.name].shape[0])
            weight[:rows] = self._whole[parameter.name][:rows]
        if layer in self._layers:
            check_samples(parameter.name, weight, self._base, Path(self._adapter))
            a, b = self._matrices(layer, parameter)
            weight = (weight.float() + self._config.scale * (b @ a)).to(weight.dtype)
        return weight

    def _matrices(self, layer: str, parameter: Parameter) -> tuple[torch.Tensor, torch.Tensor]:
        parts = whole_parts(layer, parameter, self.shape)
        order = order_of(parts, self.shape["head"])
        a, b = as_one(self._layers[layer]["A"], self._layers[layer]["B"], parts, order)
        if parameter.name.startswith(_OUTPUT):  # the base may be padded otherwise
            real = b[: self.shape["vocab"]]
            b = torch.cat((real, real.new_zeros(parameter.shape[0] - real.shape[0], b.shape[1])))
        return a, b

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
