"""The shard of a model that a rank holds: tensor, pipeline, virtual pipeline, expert parallelism.

Pure functions of numbers, without ranks or process groups. A pipeline's stages take turns: with
four layers, two ranks and two virtual stages,

    rank 0    layer 0    layer 2
    rank 1    layer 1    layer 3

Tensor parallelism shards a parameter as its :data:`~mindspeed.models.table.Split` says; expert
parallelism gives each rank consecutive experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from mindspeed.errors import ConfigError
from mindspeed.models.naming import Scheme
from mindspeed.models.shape import Shape
from mindspeed.models.table import Parameter

_FIRST = ("embedding.",)  # before the first layer; all other names outside its layers come last
_WORDS = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class ParallelSizes:
    """Sizes of the parallel groups of a model.

    Attributes:
        tensor: Tensor parallel size, of dense layers and of experts.
        pipeline: Pipeline parallel size.
        virtual: Virtual stages of each pipeline rank.
        expert: Expert parallel size.
        layers: Layers of each stage, in the order in which a token meets them; None divides them
            evenly.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    expert: int = 1
    layers: tuple[int, ...] | None = None

    def stages(self, num_layers: int) -> list[range]:
        """Layers of each stage, in the order in which a token meets them.

        Stage ``i`` is virtual stage ``i // pipeline`` of pipeline rank ``i % pipeline``.

        Raises:
            ConfigError: The layers cannot be divided like this.
        """
        count = self.pipeline * self.virtual
        counts = self.layers
        if counts is None:
            if num_layers % count:
                raise ConfigError(
                    f"{num_layers} layers cannot be divided into {count} equal pipeline stages "
                    f"(--pp {self.pipeline}, --vpp {self.virtual}); choose a divisor, or give the "
                    "layers of each stage (--layers-per-stage)"
                )
            counts = (num_layers // count,) * count
        if len(counts) != count or sum(counts) != num_layers:
            raise ConfigError(
                f"--layers-per-stage {','.join(map(str, counts))}: {count} numbers with the sum "
                f"{num_layers} are needed"
            )
        ends = list(itertools.accumulate(counts))
        return [range(end - size, end) for size, end in zip(counts, ends, strict=True)]

    def check(self, shape: Shape) -> None:
        """Check that a model can be divided like this.

        Args:
            shape: The model.

        Raises:
            ConfigError: Names the two numbers that do not fit.
        """
        self.stages(shape.num_layers)
        groups = shape["key"] // shape["head"]
        facts = [
            ("attention heads", shape["heads"], "--tp", self.tensor),
            ("padded vocabulary entries", shape["padded_vocab"], "--tp", self.tensor),
            ("feed-forward rows", shape["ffn"], "--tp", self.tensor),
        ]
        if shape["experts"]:
            facts.append(("experts", shape["experts"], "--ep", self.expert))
            facts.append(("rows of an expert", shape["expert_ffn"], "--tp", self.tensor))
        elif self.expert > 1:
            raise ConfigError(f"--ep {self.expert}: the model has no experts")
        for what, number, flag, size in facts:
            if number % size:
                raise ConfigError(f"{number} {what} cannot be divided by {flag} {size}")
        if groups % self.tensor and self.tensor % groups:
            raise ConfigError(
                f"{groups} key/value heads and --tp {self.tensor}: one must divide the other"
            )


@dataclass(frozen=True)
class RankLocation:
    """A parameter in one file of a checkpoint that has a file for each rank.

    Attributes:
        pipeline: Rank in the pipeline.
        virtual: Virtual stage.
        expert: Rank among the experts' ranks; None: all of them have it.
        layer: Number of the layer in its stage.
        local_expert: Number of the expert on its rank.
        copied: The word embeddings, repeated for the tied output layer of the last stage.
    """

    pipeline: int
    virtual: int
    expert: int | None
    layer: int | None
    local_expert: int | None
    copied: bool = False


def locations(
    parameter: Parameter, sizes: ParallelSizes, stages: Sequence[range], shape: Shape
) -> Iterator[RankLocation]:
    """The ranks that hold a parameter, and where.

    Args:
        parameter: Which one.
        stages: Their stages for this model.
        shape: The model.
    """
    expert = local = None
    if parameter.expert is not None:
        expert, local = divmod(parameter.expert, shape["experts"] // sizes.expert)
    if parameter.layer is not None:
        for number, layers in enumerate(stages):
            if parameter.layer in layers:
                virtual, pipeline = divmod(number, sizes.pipeline)
                yield RankLocation(pipeline, virtual, expert, parameter.layer - layers.start, local)
        return
    first = parameter.name.startswith(_FIRST)
    virtual, pipeline = divmod(0 if first else len(stages) - 1, sizes.pipeline)
    yield RankLocation(pipeline, virtual, expert, None, local)
    if parameter.name == _WORDS and sizes.pipeline > 1:
        last = RankLocation(sizes.pipeline - 1, sizes.virtual - 1, None, None, None)
        if shape["mtp"]:  # multi-token prediction embeds tokens there
            yield last
        if "untied" not in shape.has:
            yield replace(last, copied=True)


def shard(
    tensor: torch.Tensor, parameter: Parameter, scheme: Scheme, size: int
) -> Iterator[torch.Tensor]:
    """The shards of a parameter, one per tensor-parallel rank.

    Args:
        tensor: The whole parameter, ``[rows]`` or ``[rows, columns]``, any dtype.
        parameter: Which one.
        scheme: Layer spec; with ``local`` some projections of latent attention are sharded.
        size: Tensor parallel size.

    Yields:
        The shard of rank 0, 1 ..., of shape :func:`shard_shape` and the same dtype.
    """
    kind = _kind(parameter, scheme)
    if kind is None:
        yield from (tensor for _ in range(size))
    elif kind == "halves":
        gate, up = (half.chunk(size) for half in tensor.chunk(2))
        yield from (torch.cat(pair) for pair in zip(gate, up, strict=True))
    else:
        yield from tensor.chunk(size, dim=1 if kind == "columns" else 0)


def shard_shape(parameter: Parameter, scheme: Scheme, size: int) -> tuple[int, ...]:
    """Shape of the shard of a parameter that one of ``size`` tensor-parallel ranks holds."""
    kind = _kind(parameter, scheme)
    shape = list(parameter.shape)
    if kind is not None:
        shape[1 if kind == "columns" else 0] //= size
    return tuple(shape)


def unshard(shards: Sequence[torch.Tensor], parameter: Parameter, scheme: Scheme) -> torch.Tensor:
    """The whole parameter from the shards of all tensor-parallel ranks; inverse of :func:`shard`.

    Args:
        shards: One per rank, in order, each of shape :func:`shard_shape`.
        parameter: Which one.
        scheme: Layer spec.

    Returns:
        ``[rows]`` or ``[rows, columns]``, in the dtype of the shards.
    """
    kind = _kind(parameter, scheme)
    if kind is None or len(shards) == 1:
        return shards[0]
    if kind == "halves":
        halves = [one.chunk(2) for one in shards]
        return torch.cat([half[i] for i in (0, 1) for half in halves])
    return torch.cat(tuple(shards), dim=1 if kind == "columns" else 0)


def _kind(parameter: Parameter, scheme: Scheme) -> str | None:
    if parameter.split == "rows_if_local":
        return "rows" if scheme == "local" else None
    return parameter.split
