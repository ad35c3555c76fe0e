"""Whole Megatron parameters in safetensors: readable by everything that reads safetensors.

    model-00001-of-00004.safetensors     decoder.layers.0.self_attention.linear_qkv.weight ...
    model.safetensors.index.json         which tensor is in which file
    megatron.json                        Megatron-LM's values of the model

Names are those of the local layer spec with numbers counted over the whole model, so that the files
are the same for both layer specs and every layout. The padding of the vocabulary is in them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mindspeed.checkpoint.state import stored_args
from mindspeed.errors import CheckpointError
from mindspeed.files import atomic_write_text
from mindspeed.models.families import Family
from mindspeed.models.hf_reader import HFReader
from mindspeed.models.hf_writer import specs_of, write_weights
from mindspeed.models.table import Parameter
from mindspeed.models.weight_shards import RowSegment
from mindspeed.models.weight_source import WeightSource
from mindspeed.parsing import decode_json

ARGS = "megatron.json"


class SafetensorsWeights(WeightSource):
    """The model of one directory of whole parameters.

    Args:
        folder: The directory.
        family: The family of a model with such values.

    Raises:
        CheckpointError: A parameter is missing or has another shape.
    """

    def __init__(self, folder: Path, family: Callable[[argparse.Namespace], Family]) -> None:
        args = _read_args(folder / ARGS)
        super().__init__(str(folder), args, family(args))
        self._reader = HFReader(folder)
        own = [_by_its_own_name(parameter) for parameter in self.table]
        for parameter in own:
            self._reader.check(parameter)
        self.unused = self._reader.unused_tensors(own)

    def dtype(self, parameter: Parameter) -> torch.dtype:
        """The stored dtype."""
        return self._reader.dtype(_by_its_own_name(parameter))

    def read(self, parameter: Parameter) -> torch.Tensor:
        """The whole parameter, ``[*parameter.shape]``, in the dtype of the file."""
        return self._reader.read(_by_its_own_name(parameter))


def write_safetensors(weights: WeightSource, folder: Path, *, max_shard_bytes: int) -> None:
    """Write whole parameters into an existing directory."""
    specs = [
        spec
        for parameter in weights.table
        for spec in specs_of(_by_its_own_name(parameter), weights.dtype(parameter))
    ]
    tensors = ((parameter.name, weights.read(parameter)) for parameter in weights.table)
    write_weights(folder, specs, tensors, max_shard_bytes)
    values = {name: _plain(value) for name, value in vars(stored_args(weights.args)).items()}
    atomic_write_text(folder / ARGS, json.dumps(values, indent=1, sort_keys=True) + "\n")


def _by_its_own_name(parameter: Parameter) -> Parameter:
    """The parameter as a tensor that has its name, instead of Hugging Face's."""
    segment = RowSegment(parameter.name, 0, parameter.shape[0])
    return replace(parameter, segments=(segment,), copies=())


def _plain(value: Any) -> Any:
    """A value as JSON has it; types by name, members of enumerations too."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, torch.dtype) else value.name


def _read_args(path: Path) -> argparse.Namespace:
    try:
        values = decode_json(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if isinstance(values.get("params_dtype"), str):
        values["params_dtype"] = getattr(torch, values["params_dtype"].removeprefix("torch."))
    if values.get("window_size"):
        values["window_size"] = tuple(values["window_size"])
    return argparse.Namespace(**values)
