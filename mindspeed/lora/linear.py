"""A frozen linear layer and its adapter as one autograd function, cut over tensor-parallel ranks.

Layout ``[s, b, h]``; W is this rank's slice, s = alpha / r, ``u = x A^T`` is [s, b, r]. On p ranks:

    column   A whole, B cut like W     y_tp = x W_tp^T + s u B_tp^T
    row      A cut like W, B whole     y = reduce(x_tp W_tp^T + s u_tp B^T)

The correction is added before the collective that the layer has anyway, and in the backward pass
the input gradients of both are reduced together, so there is no collective of the adapter's own.
What is left partial on each rank (the gradient of A in a column layer, of B in a row layer) is
summed once per step (:mod:`mindspeed.lora.gradients`).

With sequence parallelism a column layer gathers its input once for both. The backward pass needs
that input again for the gradient of A; instead of gathering or keeping it whole, ``du`` travels
with the input gradient in one reduce-scatter, ``h + r`` columns wide, and meets the slice of the
input that this rank has.

Saved for backward: the input as it came in, W, A, B and u. The frozen layer alone saves W.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from mindspeed.errors import ConfigError
from mindspeed.lora.config import WHOLE, LoraConfig
from mindspeed.te import comm
from mindspeed.te.base import mark_tensor_parallel
from mindspeed.te.linear import Linear, Plan, compute_dtype


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


class _Adapted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        keep: torch.Tensor | None,
        scale: float,
        plan: Plan,
    ) -> torch.Tensor:
        dtype = a.dtype
        ctx.scale, ctx.plan, ctx.x_dtype = scale, plan, x.dtype
        x = x.to(dtype)
        whole = comm.all_gather_first_dim(x, plan.group)[0] if plan.gather_input else x
        out = F.linear(whole, weight.to(dtype), None if bias is None else bias.to(dtype))
        u = F.linear(whole if keep is None else whole * keep, a)
        out.view(-1, out.shape[-1]).addmm_(u.view(-1, u.shape[-1]), b.t(), alpha=scale)
        ctx.save_for_backward(x, weight, a, b, u, keep)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        grad = grads[0]
        x, weight, a, b, u, keep = ctx.saved_tensors
        plan: Plan = ctx.plan
        du = (grad @ b) * ctx.scale
        dgrad = grad @ weight.to(a.dtype) if ctx.needs_input_grad[0] else None
        if plan.gather_input:
            keep = None if keep is None else _slice(keep, plan.group)
            reducing, parts = _scatter_together(dgrad, du, plan.group)
        elif dgrad is not None:
            dgrad = _plus(dgrad, du @ a, keep)
            if plan.reduce_dgrad:
                dgrad = dgrad.contiguous()
                reducing = dist.all_reduce(dgrad, group=plan.group, async_op=True)
        db = _rows(grad).t() @ _rows(u) * ctx.scale
        if plan.gather_input:
            reducing.wait()
            dgrad, du = parts()
            dgrad = None if dgrad is None else _plus(dgrad, du @ a, keep)
        da = _rows(du).t() @ _rows(x if keep is None else x * keep)
        if dgrad is not None:
            if plan.reduce_dgrad and not plan.gather_input:
                reducing.wait()
            dgrad = dgrad.to(ctx.x_dtype)
        return dgrad, None, None, da, db, None, None, None


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def _plus(dgrad: torch.Tensor, correction: torch.Tensor, keep: torch.Tensor | None) -> torch.Tensor:
    return dgrad.add_(correction if keep is None else correction * keep)


def _slice(whole: torch.Tensor, group: Any) -> torch.Tensor:
    return whole.chunk(group.size(), 0)[dist.get_rank(group)]


def _scatter_together(dgrad: torch.Tensor | None, du: torch.Tensor, group: Any) -> tuple[Any, Any]:
    """Start one reduce-scatter of both; returns its handle and what gives the two parts."""
    sent = du if dgrad is None else torch.cat((dgrad, du), -1)
    received, work = comm.reduce_scatter_first_dim(sent, group, async_op=True)
    width = sent.shape[-1] - du.shape[-1]

    def parts() -> tuple[torch.Tensor | None, torch.Tensor]:
        return (received[..., :width] if width else None), received[..., width:]

    return work, parts


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

    def _lora_multiply(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, plan: Plan
    ) -> torch.Tensor:
        a, b = self.adapter(compute_dtype(x, weight))
        keep = self._lora.mask(x, plan) if self.training else None  # type: ignore[attr-defined]
        scale = self._lora.config.scale
        return _Adapted.apply(x, weight, bias, a, b, keep, scale, plan)  # type: ignore[no-any-return]


class Options(NamedTuple):
    """What :class:`AdaptedLinear` knows of its layer: rows of each part, and their order in W."""

    config: LoraConfig
    cut: Cut
    parts: dict[str, int]
    order: torch.Tensor | None
    original: type

    def mask(self, x: torch.Tensor, plan: Plan) -> torch.Tensor | None:
        """0 or 1 / (1 - p) for each element of the input, gathered or not.

        Ranks that see the same input drop the same elements of it.
        """
        p = self.config.dropout
        if not p:
            return None
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        size = (x.shape[0] * (self.cut.size if plan.gather_input else 1), *x.shape[1:])
        ones = torch.ones(size, dtype=x.dtype, device=x.device)
        if self.cut.mode == "row" or (self.cut.mode is None and self.cut.sequence_parallel):
            with get_cuda_rng_tracker().fork():
                return F.dropout(ones, p)
        return F.dropout(ones, p)


class _OverEngine(AdaptedLinear):
    """For the linear layers of :mod:`mindspeed.te`."""

    def _multiply(self, inp: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self._lora_multiply(inp, self.weight, bias, self._plan())  # type: ignore[attr-defined]


class _OverLocal(AdaptedLinear):
    """For Megatron's ``ColumnParallelLinear`` and ``RowParallelLinear``."""

    def _forward_impl(self, input: Any, weight: Any, *unused: Any, **kwargs: Any) -> torch.Tensor:
        plan = Plan(
            group=self.tp_group,  # type: ignore[attr-defined]
            gather_input=kwargs["sequence_parallel"],
            reduce_dgrad=kwargs["allreduce_dgrad"],
        )
        return self._lora_multiply(input, weight, kwargs["bias"], plan)


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
    kind = _OverEngine if isinstance(module, Linear) else _OverLocal
    module.__class__ = adapted_class(type(module), kind)  # type: ignore[arg-type]


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
