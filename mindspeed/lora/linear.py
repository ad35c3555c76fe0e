"""Linear layers with an adapter: their matrices, their parts, and the class that has both.

The computation is in :mod:`mindspeed.lora.adapted_linear`. Layers of :mod:`mindspeed.te` and those
of the local spec, converted by :mod:`mindspeed.te.local_linears`, have one method to override.

One sum per step over tensor-parallel ranks: in a column layer each rank has the part of A's
gradient that comes through its rows of B; in a row layer, the part of B's gradient that comes
through its columns of A. Sums commute, so it is enough to add them up when all micro-batches and
data-parallel ranks are done: one all-reduce of a few megabytes per step instead of one of
activations per layer and micro-batch.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from mindspeed.errors import ConfigError
from mindspeed.lora.adapted_linear import adapted_linear
from mindspeed.lora.config import WHOLE, LoraConfig
from mindspeed.te import comm, local_linears
from mindspeed.te.linear import Linear
from mindspeed.te.linear_communication import LinearCommunication
from mindspeed.te.linear_function import compute_dtype
from mindspeed.te.parameter_marks import mark_adapter
from mindspeed.te.quantized_weight import dense


class TPShard(NamedTuple):
    """How a linear layer is sharded over its tensor-parallel ranks.

    Attributes:
        mode: ``column``, as an embedding is, too, ``row`` or None for a layer that every rank has
            whole.
        group: The ranks; None for one rank.
        sequence_parallel: Activations outside the parallel region are split along s.
    """

    mode: str | None
    group: Any
    sequence_parallel: bool

    @property
    def size(self) -> int:
        """Number of ranks."""
        return comm.group_size(self.group)

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)


def as_one(
    lora_a: Mapping[str, torch.Tensor],
    lora_b: Mapping[str, torch.Tensor],
    parts: Mapping[str, int],
    order: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B of a layer from those of its parts.

    Args:
        lora_a: A ``[r, in]`` of each part that has one, or one for ``all``.
        lora_b: B ``[rows of the part, r]`` of each part.
        parts: Rows of each part.
        order: ``[out]``, int64: for each row of the weight, its row in the concatenated parts; None
            if they are equal.

    Returns:
        A ``[R, in]`` and B ``[out, R]`` in the dtype of the inputs; R is r for a shared A, else r
        times the number of adapted parts, and B is block-diagonal.
    """
    if WHOLE in lora_a:
        a, b = lora_a[WHOLE], torch.cat([lora_b[name] for name in parts])
    else:
        a = torch.cat([lora_a[name] for name in parts if name in lora_a])
        blocks = (lora_b.get(name, a.new_zeros(rows, 0)) for name, rows in parts.items())
        b = torch.block_diag(*blocks)
    return a, b if order is None else b[order]


class AdaptedWeight(NamedTuple):
    """One weight with an adapter: a layer, or one expert of a grouped layer.

    Attributes:
        name: Name of its layer in the whole model.
        weight: The frozen weight, this rank's slice.
        a: A of each part that has one, or one for ``all``.
        b: B of each part.
        initial: What A and B began as, if the weight has lost that; the same names.
    """

    name: str
    weight: torch.Tensor
    a: Mapping[str, torch.nn.Parameter]
    b: Mapping[str, torch.nn.Parameter]
    initial: tuple[Mapping[str, torch.nn.Parameter], Mapping[str, torch.nn.Parameter]] | None


class Matrices(torch.nn.ParameterDict):
    """Matrices of an adapter that are read by a call, so that their forward hooks run.

    Distributed data parallelism waits in those hooks for parameters that are gathered while the
    layers before compute (``--overlap-param-gather``); ZeRO gathers its shards in them.
    """

    def forward(self) -> dict[str, torch.nn.Parameter]:
        """The matrices by name."""
        return dict(self)

    def __call__(self) -> dict[str, torch.nn.Parameter]:  # type: ignore[override]
        """The matrices by name, after the hooks; :class:`torch.nn.ParameterDict` refuses calls."""
        return torch.nn.Module.__call__(self)


class AdaptedLinear:
    """Mixin of a linear layer with an adapter.

    ``lora_A`` and ``lora_B`` hold one matrix per part of the layer, in the order of ``parts``;
    with one A for all parts, ``lora_A`` holds that one as ``all``. Each B holds this rank's rows of
    the part in the order of the layer, so the concatenated B of all ranks is the unsharded matrix.

    Attributes:
        switched_off: The layer computes as the frozen one (:func:`mindspeed.lora.switched_off`).
    """

    lora_A: Matrices
    lora_B: Matrices
    lora_initial_A: Matrices
    lora_initial_B: Matrices
    lora_magnitude: Matrices
    lora_bias: Matrices
    _lora: AdapterOptions
    switched_off = False

    def adapted_weights(self, name: str) -> Iterator[AdaptedWeight]:
        """The weights of the layer that is called ``name`` in the whole model."""
        initial = None
        if self._lora.config.from_base:
            initial = dict(self.lora_initial_A), dict(self.lora_initial_B)
        a, b = dict(self.lora_A), dict(self.lora_B)
        own = self._lora.tied if self.weight is None else self.weight  # type: ignore[attr-defined]
        yield AdaptedWeight(name, own, a, b, initial)  # type: ignore[arg-type]

    def adapter(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """A ``[R, in]`` and B ``[out, R]`` of all parts in ``dtype``; B is block-diagonal."""
        a, b = self._lora.as_one(self.lora_A(), self.lora_B())
        return a.to(dtype), b.to(dtype)

    def delta(self, a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """``s B A`` of this rank's shard of a weight: ``[out, in]``, fp32.

        Args:
            a: As :class:`AdaptedWeight` has them.
            b: As :class:`AdaptedWeight` has them.
        """
        whole_a, whole_b = self._lora.as_one(a, b)
        return (whole_b.float() @ whole_a.float()).mul_(self._lora.scale)

    def merged(self, entry: AdaptedWeight) -> torch.Tensor:
        """This rank's shard of a weight with its adapter: ``[out, in]``, fp32."""
        weight = dense(entry.weight, torch.float32) + self.delta(entry.a, entry.b)
        if self._lora.config.use_dora:
            weight *= self._lora.length_factors(weight, self.lora_magnitude())[:, None]
        return weight

    def _multiply(
        self,
        inp: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        communication: LinearCommunication,
    ) -> torch.Tensor:
        """Override the product of a linear layer of :mod:`mindspeed.te`."""
        if self.switched_off:
            return super()._multiply(inp, weight, bias, communication)  # type: ignore[misc,no-any-return]
        a, b = self.adapter(compute_dtype(inp, weight))
        if self._lora.config.use_bias:
            more = self._lora.bias(self.lora_bias())
            bias = more if bias is None else bias + more.to(bias.dtype)
        mask = self._lora.mask(inp, communication) if self.training else None  # type: ignore[attr-defined]
        scale = self._lora.scale
        if not self._lora.config.use_dora:
            return adapted_linear(inp, weight, bias, a, b, mask, scale, communication)
        communication = replace(communication, exchange=None)  # the output is read here
        out = adapted_linear(inp, weight, None, a, b, mask, scale, communication)
        with torch.no_grad():
            merged = dense(weight, a.dtype) + scale * (b @ a)
        out = out * self._lora.length_factors(merged, self.lora_magnitude()).to(out.dtype)
        return out if bias is None else out + bias.to(out.dtype)


class AdapterOptions(NamedTuple):
    """Properties of the layer that an adapter uses.

    Attributes:
        config: Rank, scale, dropout.
        shard: How the layer is sharded.
        parts: This rank's rows of each part.
        order: As for :func:`as_one`.
        original: The class of the layer without adapter.
        name: Of the layer in the whole model.
        ranks: Rank of each adapted part, or of ``all``.
        scale: What the correction is multiplied by.
        ratios: What the B of a part is multiplied by before, if that is another number.
        tied: The weight of a layer that has none of its own, but the embedding's.
        shared: A and B are the embedding's, too.
    """

    config: LoraConfig
    shard: TPShard
    parts: dict[str, int]
    order: torch.Tensor | None
    original: type
    name: str
    ranks: dict[str, int]
    scale: float
    ratios: dict[str, float]
    tied: torch.Tensor | None = None
    shared: bool = False

    @classmethod
    def of(
        cls,
        config: LoraConfig,
        shard: TPShard,
        parts: dict[str, int],
        order: torch.Tensor | None,
        original: type,
        name: str,
        targets: set[str],
    ) -> AdapterOptions:
        """The options of a layer.

        Args:
            config: The attributes, like all up to ``name``.
            targets: Parts that get their own A and B, or ``all``.
        """
        named = [WHOLE] if WHOLE in targets else [part for part in parts if part in targets]
        sizes = {part: config.of_module(f"{name}.{part}") for part in named}
        scales = {part: config.scale_of(*size) for part, size in sizes.items()}
        scale = next(iter(scales.values()), config.scale)
        ratios = {part: own / scale for part, own in scales.items() if own != scale}
        ranks = {part: r for part, (r, _) in sizes.items()}
        return cls(config, shard, parts, order, original, name, ranks, scale, ratios)

    def as_one(
        self, a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """:func:`as_one` of this layer; B of a part with another scale makes up for it."""
        if self.ratios:
            b = {name: matrix * self.ratios.get(name, 1.0) for name, matrix in b.items()}
        return as_one(a, b, self.parts, self.order)

    def bias(self, biases: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """What biases of B, ``[rows]`` by part, add to the layer's: ``[out]``, in their dtype."""
        first = next(iter(biases.values()))
        added = [
            biases[name] * self.ratios.get(name, 1.0) if name in biases else first.new_zeros(rows)
            for name, rows in self.parts.items()
        ]
        whole = torch.cat(added) * self.scale
        return whole if self.order is None else whole[self.order]

    def length_factors(
        self, merged: torch.Tensor, magnitudes: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """What each row of ``W + s B A`` is multiplied by to have its trained length (DoRA).

        The length that it has is a constant of the backward pass (arXiv 2402.09353, section 4.3).
        Of a row-parallel layer it is summed over the ranks: ``[out]`` in an all-reduce.

        Args:
            merged: This rank's shard, ``[out, in]``.
            magnitudes: ``[rows]`` of each part that has an adapter.

        Returns:
            ``[out]``, fp32 or the wider dtype of ``merged``; 1 for rows without an adapter.
        """
        rows = list(self.parts.items())
        lengths = self.lengths(merged)
        lengths = torch.where(lengths > 0, lengths, torch.ones_like(lengths))  # rows of padding
        ones = (lengths.new_ones(count) for _, count in rows)
        own = self.unordered(lengths).split([count for _, count in rows])
        factors = torch.cat(
            [
                magnitudes[name] / length if name in magnitudes else one
                for (name, _), length, one in zip(rows, own, ones, strict=True)
            ]
        )
        return factors if self.order is None else factors[self.order]

    @torch.no_grad()
    def lengths(self, merged: torch.Tensor) -> torch.Tensor:
        """Length of each whole row of ``merged [out, in]``: ``[out]``, fp32 or wider."""
        wide = torch.promote_types(merged.dtype, torch.float32)
        if self.shard.mode != "row" or self.shard.size == 1:
            return torch.linalg.vector_norm(merged, dim=1, dtype=wide)
        squares = merged.to(wide).square().sum(1)
        dist.all_reduce(squares, group=self.shard.group)
        return squares.sqrt_()

    def unordered(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows ``[out, ...]`` of the weight as the concatenated parts have them."""
        if self.order is None:
            return rows
        result = torch.empty_like(rows)
        result[self.order] = rows
        return result

    def mask(self, x: torch.Tensor, communication: LinearCommunication) -> torch.Tensor | None:
        """The dropout mask of the input: 0 or 1 / (1 - p); None without dropout.

        The input is gathered first where the layer gathers it. Ranks with the same input have the
        same mask.

        Args:
            x: ``[s, b, in]``, this rank's shard of the input, any floating dtype.
            communication: How the layer is sharded.

        Returns:
            ``[s, b, in]`` of the gathered input in the dtype of x.
        """
        p = self.config.dropout
        if not p:
            return None
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        size = (x.shape[0] * (self.shard.size if communication.gathers_input else 1), *x.shape[1:])
        ones = torch.ones(size, dtype=x.dtype, device=x.device)
        if self.shard.mode == "row" or (self.shard.mode is None and self.shard.sequence_parallel):
            with get_cuda_rng_tracker().fork():
                return F.dropout(ones, p)
        return F.dropout(ones, p)


def tp_shard_of(module: torch.nn.Module) -> TPShard | None:
    """How a linear layer is sharded; None if it cannot have an adapter.

    Raises:
        ConfigError: It belongs to NVIDIA's Transformer Engine.
    """
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    if isinstance(module, Linear):
        parallel = module.parallel_mode is not None
        # A layer that every rank has whole does not know its ranks; Megatron's wrapper does.
        group = module.tp_group if parallel else getattr(module, "_tp_group", None)
        return TPShard(module.parallel_mode, group, module_sequence_parallel(module))
    if isinstance(module, ColumnParallelLinear | RowParallelLinear):
        mode = "column" if isinstance(module, ColumnParallelLinear) else "row"
        return TPShard(mode, module.tp_group, module.sequence_parallel)
    if any(base.__module__.startswith("transformer_engine") for base in type(module).__mro__):
        raise ConfigError(
            "adapters need linear layers of this library, not those of NVIDIA's Transformer "
            "Engine: unset MINDSPEED_TE=native, or use --transformer-impl local"
        )
    return None


def module_sequence_parallel(module: Any) -> bool:
    """Whether a Transformer Engine layer runs under sequence parallelism."""
    config = getattr(module, "config", None)
    return bool(getattr(config, "sequence_parallel", module.sequence_parallel))


def give_adapter(module: Any, options: AdapterOptions) -> None:
    """Turn a linear layer into one with an adapter; A and B are empty.

    Raises:
        ConfigError: It is of a class that cannot have one.
    """
    module._lora, config = options, options.config
    weight = module.weight if options.tied is None else options.tied
    module.lora_A, module.lora_B = new_matrices(weight, options)
    if config.from_base:
        pair = new_matrices(weight, options, trained=False)
        module.lora_initial_A, module.lora_initial_B = pair
    if config.use_dora:
        module.lora_magnitude = _new_vectors(weight, options)
    if config.use_bias:
        module.lora_bias = _new_vectors(weight, options)
    local_linears.convert(module)
    if not hasattr(module, "_multiply"):
        kind = type(module).__name__
        raise ConfigError(f"{options.name} is a {kind}, which cannot have an adapter")
    module.__class__ = adapted_class(type(module), AdaptedLinear)  # type: ignore[arg-type]


def new_matrices(
    weight: torch.Tensor, options: AdapterOptions, *, trained: bool = True
) -> tuple[Matrices, Matrices]:
    """Allocate A and B of one weight, uninitialised.

    Args:
        weight: ``[out, in]`` of this rank, any dtype.
        options: Of its layer.
        trained: Whether they need gradients.

    Returns:
        fp32 A ``[r, in]`` and B ``[rows of the part, r]`` by part.
    """
    parts, ranks, shard = options.parts, options.ranks, options.shard
    rank_of = (lambda name: ranks[WHOLE]) if WHOLE in ranks else ranks.__getitem__
    own = list(parts) if WHOLE in ranks else list(ranks)
    # Pairs keep their order, a dict would be sorted.
    lora_a = Matrices([(n, _new(weight, trained, r, weight.shape[1])) for n, r in ranks.items()])
    lora_b = Matrices([(n, _new(weight, trained, parts[n], rank_of(n))) for n in own])
    for matrices, dim, sharded in (
        (lora_a, 1, shard.mode == "row"),
        (lora_b, 0, shard.mode == "column"),
    ):
        for parameter in matrices.values():
            partial = shard.mode is not None or shard.sequence_parallel
            mark_adapter(
                parameter,
                weight,
                dim if sharded else None,
                shard.group if partial and shard.size > 1 else None,
            )
    return lora_a, lora_b


def _new_vectors(weight: torch.Tensor, options: AdapterOptions) -> Matrices:
    """Allocate a number for each row with an adapter: ``[rows of the part]``, fp32."""
    parts, shard = options.parts, options.shard
    adapted = [name for name in parts if name in options.ranks or WHOLE in options.ranks]
    vectors = Matrices([(name, _new(weight, True, parts[name])) for name in adapted])
    partial = shard.sequence_parallel and shard.size > 1
    for parameter in vectors.values():
        dim = 0 if shard.mode == "column" else None
        mark_adapter(parameter, weight, dim, shard.group if partial else None)
    return vectors


def _new(weight: torch.Tensor, trained: bool, *size: int) -> torch.nn.Parameter:
    empty = torch.empty(size, dtype=torch.float32, device=weight.device)
    return torch.nn.Parameter(empty, requires_grad=trained)


def take_adapter(module: Any) -> None:
    """Undo :func:`give_adapter`."""
    module.__class__ = module._lora.original
    for name in [name for name in module._modules if name.startswith("lora_")]:
        delattr(module, name)
    del module._lora


@functools.cache
def adapted_class(base: Any, kind: type[AdaptedLinear]) -> type:
    """The class of a layer with an adapter.

    Args:
        base: The layer's class.
        kind: The mixin.
    """
    return type(f"Adapted{base.__name__}", (kind, base), {"__module__": __name__})


def summed_over_tp(finalize: Callable[..., None]) -> Callable[..., None]:
    """Megatron's ``finalize_model_grads`` followed by the adapters' sum."""

    def finalize_model_grads(model: Sequence[Any], *args: Any, **kwargs: Any) -> None:
        finalize(model, *args, **kwargs)
        sum_partial_gradients(model)

    return finalize_model_grads


@torch.no_grad()
def sum_partial_gradients(model: Sequence[torch.nn.Module]) -> None:
    """Add up the partial gradients of all adapters of a model over tensor-parallel ranks."""
    together = defaultdict[Any, list[torch.Tensor]](list)
    for chunk in model:
        for parameter in chunk.parameters():
            # Under ZeRO 2 and 3 this is a shard, the same elements on all ranks of the group.
            whole_parameter = getattr(parameter, "orig_param", parameter)
            group = getattr(whole_parameter, "partial_over_tp", None)
            grad = getattr(parameter, "main_grad", parameter.grad)
            grad = getattr(grad, "_local_tensor", grad)
            if group is not None and grad is not None:
                together[group, grad.dtype].append(grad)
    for (group, _), grads in together.items():
        whole = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(whole, group=group)
        for grad, total in zip(grads, whole.split([g.numel() for g in grads]), strict=True):
            grad.copy_(total.view_as(grad))
