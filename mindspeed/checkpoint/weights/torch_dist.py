"""Megatron's ``torch_dist`` checkpoints: whole tensors, which any layout loads."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from mindspeed.checkpoint.state import sharding_metadata, stored_args
from mindspeed.errors import CheckpointError
from mindspeed.files import atomic_write_text, atomic_writer
from mindspeed.models.families import Family
from mindspeed.models.naming import address, addresses
from mindspeed.models.table import Parameter
from mindspeed.models.weight_source import WeightSource
from mindspeed.storage.global_tensors import GlobalTensors, StoredTensor, write_tensors

# What is not of the model is the optimizer's.
_MODEL = ("embedding.", "decoder.", "output_layer.", "score.", "mtp.")
_LAYERS = ("decoder.", "mtp.")
_STATE = (".local_tokens_per_expert",)  # of the training, not learned


class TorchDistWeights(WeightSource):
    """The model of one checkpoint.

    Args:
        checkpoint: Directory of one iteration, or ``release``.
        args: The values stored in it.
        family: Whose mapping table to use.

    Raises:
        CheckpointError: It lacks a parameter, or has one of another shape.
    """

    def __init__(self, checkpoint: Path, args: argparse.Namespace, family: Family) -> None:
        super().__init__(str(checkpoint), args, family)
        self._tensors = GlobalTensors(checkpoint)
        self._places = {parameter.name: self._find(parameter) for parameter in self.table}
        known = {key for key, _ in self._places.values()}
        self.unused = sorted(
            key
            for key in self._tensors
            if key.startswith(_MODEL) and key not in known and not key.endswith(_STATE)
        )

    def dtype(self, parameter: Parameter) -> torch.dtype:
        """The stored dtype."""
        return self._tensors.dtype(self._places[parameter.name][0])

    def read(self, parameter: Parameter) -> torch.Tensor:
        """The whole parameter, ``[*parameter.shape]`` in :meth:`dtype`, joined from its shards."""
        return self._tensors.read(*self._places[parameter.name])

    def _find(self, parameter: Parameter) -> tuple[str, tuple[int, ...]]:
        for place in addresses(parameter, self.shape.num_layers, self.shape["experts"]):
            if place.key in self._tensors:
                expected = (*place.counts, *parameter.shape)
                if (stored := self._tensors.shape(place.key)) != expected:
                    raise CheckpointError(
                        f"{self.where}: {place.key} has shape {list(stored)}, but the values "
                        f"stored with it make it {list(expected)}"
                    )
                return place.key, place.position
        raise CheckpointError(f"{self.where}: there is no tensor for {parameter.name}")


def write_torch_dist(weights: WeightSource, folder: Path, *, max_file_bytes: int) -> None:
    """Write a checkpoint.

    Args:
        weights: The model; ``transformer_impl`` of its values says for which layer spec.
        folder: An existing directory.
        max_file_bytes: Largest size of a file with more than one tensor; memory holds one file.
    """
    shape, scheme, stacked = weights.shape, weights.scheme, weights.stacked
    tensors = []
    for parameter in weights.table:
        place = address(parameter, scheme, shape.num_layers, shape["experts"], stacked=stacked)
        tensors.append(
            StoredTensor(
                place.key,
                place.position,
                place.counts,
                parameter.shape,
                weights.dtype(parameter),
                lambda parameter=parameter: weights.read(parameter),  # type: ignore[misc]
            )
        )
    write_tensors(folder, tensors, _extra_states(tensors), max_file_bytes)
    _write_common(folder, weights.args)


def _extra_states(tensors: Sequence[StoredTensor]) -> Iterator[str]:
    """Keys of the (empty) extra state of every module with a weight."""
    for tensor in tensors:
        module, _, kind = tensor.key.rpartition(".")
        if kind == "weight" and module.startswith(_LAYERS) and not module.endswith("router"):
            position = ".".join(map(str, tensor.position or (0,)))
            counts = ".".join(map(str, tensor.counts or (1,)))
            yield f"{module}._extra_state/shard_{position}_{counts}"
            if module.startswith("mtp.") and module.endswith(".linear_proj"):
                # Only here Megatron also loads the extra state of a module without weights.
                attention = module.removesuffix(".linear_proj")
                yield f"{attention}.core_attention._extra_state/shard_{position}_{counts}"


def _write_common(folder: Path, args: argparse.Namespace) -> None:
    """The files besides the tensors: values of the model, and what format this is."""
    common = {
        "args": stored_args(args),
        "checkpoint_version": 3.0,
        "iteration": 0,
        "content_metadata": sharding_metadata(args),
    }
    with atomic_writer(folder / "common.pt", "wb") as file:
        torch.save(common, file)
    description = {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    atomic_write_text(folder / "metadata.json", json.dumps(description))
