"""Linear layers with an adapter: their matrices, their parts, and the class that has both.

The computation is in :mod:`mindspeed.lora.adapted_linear`. Layers of :mod:`mindspeed.te` and those
of the local spec, converted by :mod:`mindspeed.te.local_linears`, have one method to override.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from mindspeed.errors import ConfigError
from mindspeed.lora.adapted_linear import adapted_linear
from mindspeed.lora.config import WHOLE, LoraConfig
from mindspeed.te import comm, local_linears
from mindspeed.te.base import mark_tensor_parallel
from mindspeed.te.linear import Linear
from mindspeed.te.linear_communication import LinearCommunication, compute_dtype


class Cut(NamedTuple):
    """How a linear layer is cut over its tensor-parallel ranks.

    Attributes:
        mode: ``column``, ``row`` or None for a layer that every rank has whole.
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
        """This rank's place among them."""
        return 0 if self.group is None else dist.get_rank(self.group)


def as_one(
    lora_a: Mapping[str, torch.Tensor],
    lora_b: Mapping[str, torch.Tensor],
    parts: Mapping[str, int],
    order: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A ``[R, in]`` and B ``[out, R]`` of a layer, from those of its parts.

    Args:
        lora_a: A of each part that has one, or one for ``all``.
        lora_b: B of each part.
        parts: Rows of each part.
        order: For each row of the weight, its row when the parts stand one below the other.
    """
    if WHOLE in lora_a:
        a, b = lora_a[WHOLE], torch.cat([lora_b[name] for name in parts])
    else:
        a = torch.cat([lora_a[name] for name in parts if name in lora_a])
        blocks = (lora_b.get(name, a.new_zeros(rows, 0)) for name, rows in parts.items())
        b = torch.block_diag(*blocks)
    return a, b if order is None else b[order]


class Piece(NamedTuple):
    """One weight with an adapter: a layer, or one expert of a grouped layer.

    Attributes:
        name: Name of its layer in the whole model.
        weight: The frozen weight, this rank's slice.
        a: A of each part that has one, or one for ``all``.
        b: B of each part.
    """

    name: str
    weight: torch.Tensor
    a: Mapping[str, torch.nn.Parameter]
    b: Mapping[str, torch.nn.Parameter]


class AdaptedLinear:
    """What a linear layer with an adapter has beside its own (mixed into its class).

    ``lora_A`` and ``lora_B`` hold one matrix per part of the layer, in the order of ``parts``;
    with one A for all parts, ``lora_A`` holds that one as ``all``. Each B is a slice of rows in the
    order in which the part's rows stand in the layer, so that the slices of all ranks, one below
    the other, are the part's whole matrix.
    """

    lora_A: torch.nn.ParameterDict
    lora_B: torch.nn.ParameterDict
    _lora: Options

    def pieces(self, name: str) -> Iterator[Piece]:
        """The weights of the layer that is called ``name`` in the whole model."""
        yield Piece(name, self.weight, dict(self.lora_A), dict(self.lora_B))  # type: ignore[attr-defined]

    def adapter(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """A ``[R, in]`` and B ``[out, R]`` of the layer as one; parts become blocks of B."""
        a, b = as_one(dict(self.lora_A), dict(self.lora_B), self._lora.parts, self._lora.order)
        return a.to(dtype), b.to(dtype)

    def delta(self, piece: Piece) -> torch.Tensor:
        """The correction of this rank's slice of a weight, fp32."""
        a, b = as_one(piece.a, piece.b, self._lora.parts, self._lora.order)
        return (b.float() @ a.float()).mul_(self._lora.config.scale)

    def _multiply(
        self,
        inp: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        communication: LinearCommunication,
    ) -> torch.Tensor:
        """Override the product of a linear layer of :mod:`mindspeed.te`."""
        a, b = self.adapter(compute_dtype(inp, weight))
        mask = self._lora.mask(inp, communication) if self.training else None  # type: ignore[attr-defined]
        scale = self._lora.config.scale
        return adapted_linear(inp, weight, bias, a, b, mask, scale, communication)


class Options(NamedTuple):
    """What :class:`AdaptedLinear` knows of its layer: rows of each part, and their order in W."""

    config: LoraConfig
    cut: Cut
    parts: dict[str, int]
    order: torch.Tensor | None
    original: type

    def mask(self, x: torch.Tensor, communication: LinearCommunication) -> torch.Tensor | None:
        """0 or 1 / (1 - p) for each element of the input, gathered or not.

        Ranks that see the same input drop the same elements of it.
        """
        p = self.config.dropout
        if not p:
            return None
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        size = (x.shape[0] * (self.cut.size if communication.gathers_input else 1), *x.shape[1:])
        ones = torch.ones(size, dtype=x.dtype, device=x.device)
        if self.cut.mode == "row" or (self.cut.mode is None and self.cut.sequence_parallel):
            with get_cuda_rng_tracker().fork():
                return F.dropout(ones, p)
        return F.dropout(ones, p)


def cut_of(module: torch.nn.Module) -> Cut | None:
    """How a linear layer is cut; None if it is no linear layer that can have an adapter.

    Raises:
        ConfigError: It belongs to NVIDIA's Transformer Engine.
    """
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    if isinstance(module, Linear):
        parallel = module.parallel_mode is not None
        # A layer that every rank has whole does not know its ranks; Megatron's wrapper does.
        group = module.tp_group if parallel else getattr(module, "_tp_group", None)
        return Cut(module.parallel_mode, group, module_sequence_parallel(module))
    if isinstance(module, ColumnParallelLinear | RowParallelLinear):
        mode = "column" if isinstance(module, ColumnParallelLinear) else "row"
        return Cut(mode, module.tp_group, module.sequence_parallel)
    if any(base.__module__.startswith("transformer_engine") for base in type(module).__mro__):
        raise ConfigError(
            "adapters need linear layers of this library, not those of NVIDIA's Transformer "
            "Engine: unset MINDSPEED_TE=native, or use --transformer-impl local"
        )
    return None


def module_sequence_parallel(module: Any) -> bool:
    """Whether activations around a Transformer Engine layer are split along the sequence."""
    config = getattr(module, "config", None)
    return bool(getattr(config, "sequence_parallel", module.sequence_parallel))


def give_adapter(
    module: Any,
    config: LoraConfig,
    cut: Cut,
    targets: set[str],
    parts: dict[str, int],
    order: torch.Tensor | None,
) -> None:
    """Turn a linear layer into one with an adapter; A and B are empty.

    Args:
        module: The layer.
        config: Rank, scale, dropout.
        cut: How it is cut.
        targets: Parts that get their own A and B, or ``all``.
        parts: This rank's rows of each part.
        order: For each row of the weight, its row when the parts stand one below the other; None
            if that is how they stand.
    """
    module.lora_A, module.lora_B = new_matrices(module.weight, config, cut, targets, parts)
    module._lora = Options(config, cut, parts, order, type(module))
    local_linears.convert(module)
    module.__class__ = adapted_class(type(module), AdaptedLinear)  # type: ignore[arg-type]


def new_matrices(
    weight: torch.Tensor, config: LoraConfig, cut: Cut, targets: set[str], parts: dict[str, int]
) -> tuple[torch.nn.ParameterDict, torch.nn.ParameterDict]:
    """A and B of one weight, empty; arguments as of :func:`give_adapter`."""
    whole = WHOLE in targets
    shared = [WHOLE] if whole else [name for name in parts if name in targets]
    own = list(parts) if whole else shared
    options: dict[str, Any] = {"dtype": torch.float32, "device": weight.device}
    new = lambda *size: torch.nn.Parameter(torch.empty(size, **options))  # noqa: E731
    # Pairs keep their order, a dict would be sorted.
    lora_a = torch.nn.ParameterDict([(n, new(config.r, weight.shape[1])) for n in shared])
    lora_b = torch.nn.ParameterDict([(n, new(parts[n], config.r)) for n in own])
    for matrices, dim, cut_here in (
        (lora_a, 1, cut.mode == "row"),
        (lora_b, 0, cut.mode == "column"),
    ):
        for parameter in matrices.values():
            parameter.allreduce = getattr(weight, "allreduce", True)  # Megatron's mark of experts
            if cut_here:
                mark_tensor_parallel(parameter, dim)
            elif cut.size > 1 and (cut.mode is not None or cut.sequence_parallel):
                parameter.partial_over_tp = cut.group
    return lora_a, lora_b


def take_adapter(module: Any) -> None:
    """Make the layer what it was before :func:`give_adapter`."""
    module.__class__ = module._lora.original
    del module.lora_A, module.lora_B, module._lora


@functools.cache
def adapted_class(base: Any, kind: type[AdaptedLinear]) -> type:
    """The class of a layer with an adapter, whose checkpoints hold the layer alone.

    Args:
        base: The layer's class.
        kind: What it has beside its own.
    """

    def sharded_state_dict(self: Any, prefix: str = "", *args: Any, **kwargs: Any) -> Any:
        state = base.sharded_state_dict(self, prefix, *args, **kwargs)
        own = (f"{prefix}lora_A.", f"{prefix}lora_B.")
        return {name: value for name, value in state.items() if not name.startswith(own)}

    return type(
        f"Adapted{base.__name__}",
        (kind, base),
        {"__module__": __name__, "sharded_state_dict": sharded_state_dict},
    )
