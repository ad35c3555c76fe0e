"""Megatron's legacy format (``--ckpt-format torch``): read and written for any parallel sizes.

A parameter of the whole model is in the files of some ranks under a name that depends on the layer
spec, the stage's own count of layers and the rank's own count of experts. Readers find all of this
in the files; the optimizer state is not read.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch

from mindspeed.checkpoint.state import stored_args
from mindspeed.checkpoint.weights.rank_files import Rank, RankFile, file_name, load_files
from mindspeed.errors import CheckpointError, ConfigError
from mindspeed.models.families import Family
from mindspeed.models.naming import Scheme, local_name
from mindspeed.models.parallel_sizes import (
    ParallelSizes,
    RankLocation,
    locations,
    shard,
    shard_shape,
    unshard,
)
from mindspeed.models.table import Parameter
from mindspeed.models.weight_source import WeightSource

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_OUTPUT = "output_layer.weight"
_STATE = ("._extra_state", ".local_tokens_per_expert", ".inv_freq")  # not learned


class LegacyWeights(WeightSource):
    """The model of one checkpoint, its files mapped into memory.

    Args:
        folder: Directory of one iteration, or ``release``.
        args: Arguments of the run, for files that lack them.
        family: The family of a model with such values.

    Raises:
        CheckpointError: Files, values or parameters are missing.
    """

    def __init__(
        self,
        folder: Path,
        args: argparse.Namespace | None,
        family: Callable[[argparse.Namespace], Family],
    ) -> None:
        stored, self._files = load_files(folder)
        args = stored or args
        if args is None:
            raise CheckpointError(
                f"{folder}: its files do not say what model they hold; name a directory that does "
                "with --hf-config-dir"
            )
        super().__init__(str(folder), args, family(args))
        self._tensor = 1 + max(rank.tensor for rank in self._files)
        pipeline = 1 + max(rank.pipeline for rank in self._files)
        expert = 1 + max(rank.expert for rank in self._files)
        self._sizes = ParallelSizes(self._tensor, pipeline, len(self._files[Rank(0, 0, 0)]), expert)
        self._stages = self._found_stages()
        keys = {key for chunks in self._files.values() for chunk in chunks for key in chunk}
        engine = any(".layer_norm_weight" in key for key in keys)
        self._scheme: Scheme = "transformer_engine" if engine else "local"
        self._grouped = any(".mlp.experts.linear_fc1.weight0" in key for key in keys)
        self._check()
        self.unused = self._surplus()

    def dtype(self, parameter: Parameter) -> torch.dtype:
        """The stored dtype."""
        return self._part(parameter, 0).dtype

    def read(self, parameter: Parameter) -> torch.Tensor:
        """The whole parameter, ``[*parameter.shape]`` in :meth:`dtype`, joined from its shards."""
        parts = [self._part(parameter, rank) for rank in range(self._tensor)]
        return unshard(parts, parameter, self._scheme)

    def _part(self, parameter: Parameter, tensor: int) -> torch.Tensor:
        location = next(self._locations(parameter))
        name = self._name(parameter, location)
        rank = Rank(tensor, location.pipeline, location.expert or 0)
        part = self._files[rank][location.virtual].get(name)
        if part is None:
            raise CheckpointError(
                f"{self.where}: there is no {name} in the files of pipeline rank "
                f"{location.pipeline} (Megatron's {parameter.name})"
            )
        return part

    def _name(self, parameter: Parameter, location: RankLocation) -> str:
        if location.copied:
            return _OUTPUT
        return local_name(
            parameter, self._scheme, location.layer, location.local_expert, grouped=self._grouped
        )

    def _surplus(self) -> list[str]:
        """Names in the files that no parameter has."""
        used = {
            (location.pipeline, location.virtual, self._name(parameter, location))
            for parameter in self.table
            for location in self._locations(parameter)
        }
        found = {
            (rank.pipeline, virtual, name)
            for rank, chunks in self._files.items()
            for virtual, chunk in enumerate(chunks)
            for name, value in chunk.items()
            if isinstance(value, torch.Tensor) and not name.endswith(_STATE)
        }
        return sorted(name for _, _, name in found - used)

    def _locations(self, parameter: Parameter) -> Iterator[RankLocation]:
        return locations(parameter, self._sizes, self._stages, self.shape)

    def _found_stages(self) -> list[range]:
        """Layers of each stage, counted in the files."""
        stages, start = [], 0
        for virtual, pipeline in product(range(self._sizes.virtual), range(self._sizes.pipeline)):
            chunk = self._files[Rank(0, pipeline, 0)][virtual]
            layers = {int(match[1]) for key in chunk if (match := _LAYER.match(key))}
            stages.append(range(start, start + len(layers)))
            start += len(layers)
        if start != self.shape.num_layers:
            raise CheckpointError(
                f"{self.where} has {start} layers, but the values stored with it say "
                f"{self.shape.num_layers}"
            )
        return stages

    def _check(self) -> None:
        for parameter in self.table:
            expected = shard_shape(parameter, self._scheme, self._tensor)
            for rank in range(self._tensor):
                found = tuple(self._part(parameter, rank).shape)
                if found != expected:
                    raise CheckpointError(
                        f"{self.where}: {parameter.name} has shape {list(found)} on tensor rank "
                        f"{rank}, but the values stored with it make it {list(expected)}"
                    )


def write_legacy(
    weights: WeightSource,
    folder: Path,
    sizes: ParallelSizes,
    *,
    grouped: bool = False,
    deepspeed: bool = False,
) -> None:
    """Write a checkpoint with one file for each rank.

    Args:
        weights: The model; ``transformer_impl`` of its values says for which layer spec.
        folder: An existing directory.
        sizes: Parallel sizes of the run that will load it.
        grouped: For ``--moe-grouped-gemm``.
        deepspeed: Files as DeepSpeed names them.

    Raises:
        ConfigError: The model cannot be divided like this.
    """
    shape, scheme = weights.shape, weights.scheme
    sizes.check(shape)
    if any(shape.linear_layers):
        raise ConfigError(
            "files of ranks have no place for a gated delta net, whose matrices are stored in "
            "parts: write torch_dist, safetensors or hf"
        )
    stages = sizes.stages(shape.num_layers)

    def targets(parameter: Parameter) -> list[tuple[int, int, int, str]]:
        """Pipeline rank, expert rank, virtual stage and name of each copy of a parameter."""
        found = []
        for location in locations(parameter, sizes, stages, shape):
            name = local_name(
                parameter, scheme, location.layer, location.local_expert, grouped=grouped
            )
            name = _OUTPUT if location.copied else name
            experts = range(sizes.expert) if location.expert is None else (location.expert,)
            found += [(location.pipeline, expert, location.virtual, name) for expert in experts]
        return found

    contents: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(
        lambda: [{} for _ in range(sizes.virtual)]
    )
    for parameter in weights.table:
        entry = weights.dtype(parameter), shard_shape(parameter, scheme, sizes.tensor)
        for pipeline, expert, virtual, name in targets(parameter):
            contents[pipeline, expert][virtual][name] = entry
    extra = _extra(weights.args, sizes, grouped=grouped, deepspeed=deepspeed)
    files = {}
    for pipeline, expert, tensor in product(
        range(sizes.pipeline), range(sizes.expert), range(sizes.tensor)
    ):
        rank = Rank(tensor, pipeline, expert)
        name = file_name(
            rank, pipeline=sizes.pipeline > 1, expert=sizes.expert > 1, deepspeed=deepspeed
        )
        chunks = contents[pipeline, expert]
        files[rank] = RankFile(folder / name, chunks, extra, deepspeed=deepspeed)
    for parameter in weights.table:
        whole = weights.read(parameter)
        for tensor, part in enumerate(shard(whole, parameter, scheme, sizes.tensor)):
            for pipeline, expert, virtual, name in targets(parameter):
                files[Rank(tensor, pipeline, expert)].write(virtual, name, part)
    for file in files.values():
        file.finish()


def _extra(
    args: argparse.Namespace, sizes: ParallelSizes, *, grouped: bool, deepspeed: bool
) -> dict[str, Any]:
    values = stored_args(args)
    values.tensor_model_parallel_size = sizes.tensor
    values.pipeline_model_parallel_size = sizes.pipeline
    values.virtual_pipeline_model_parallel_size = sizes.virtual if sizes.virtual > 1 else None
    values.expert_model_parallel_size = sizes.expert
    values.expert_tensor_parallel_size = sizes.tensor
    # Megatron-LM takes it from here, and leaves out weights that it finds under other names.
    values.moe_grouped_gemm = grouped
    values.ckpt_format = "torch"
    extra: dict[str, Any] = {"args": values, "checkpoint_version": 3.0, "iteration": 0}
    if deepspeed:
        extra["dp_world_size"] = 0
    return extra
