"""Linear layers of the local spec by :mod:`mindspeed.te.linear_function`.

Megatron's ``ColumnParallelLinear`` and ``RowParallelLinear`` multiply and communicate by code of
their own. :func:`convert` makes an instance compute as the modules of this package do, in one
autograd function whose products features may replace; parameters, checkpoints and
``isinstance`` stay. Models whose linear kernels nobody replaced keep Megatron's code: their losses
do not depend on ours, and Megatron reuses one buffer for gathered inputs.

Left to Megatron: gradients of the output layer that are deferred
(``defer_embedding_wgrad_compute``).

Weight gradients of layers, of both specs, can be computed elsewhere than in their backward:

* by a pipeline schedule that divides the backward into I and W (:func:`split`): linear layers of
  transformer layers and of multi-token prediction, experts and shared experts. Undivided are the
  output layer, whose output gradient is as large as the logits, embeddings, the router, norms,
  biases and adapters, and a layer whose input needs no gradient;
* by an anchor (:mod:`mindspeed.moe.anchor`, :func:`anchored`): experts, not while a schedule
  divides the backward, and not where weight gradients are delayed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mindspeed.te.linear_communication import LinearCommunication
from mindspeed.te.linear_function import linear
from mindspeed.te.weight_gradient import GradientAnchor, WgradOptions
from mindspeed.tensor_parallel import regions

if TYPE_CHECKING:
    from mindspeed.pipeline.schedule.weight_gradients import WeightGradients


def convert_chunk(model: torch.nn.Module, config: Any, vp_stage: int | None) -> None:
    """Convert all linear layers of a built model chunk; a function for the seam ``chunk``."""
    for module in model.modules():
        convert(module)


def convert(module: torch.nn.Module) -> None:
    """Make a linear layer of Megatron's own compute here; any other module stays as it is."""
    module.__class__ = substitute(type(module))


def substitute(kind: type) -> type:
    """The class that computes here instead of one of Megatron's two; any other class as it is."""
    return _substitutes().get(kind, kind)


class _Multiply:
    """The product of both layers, without their options; adapters override it."""

    gradient_accumulation_fusion: bool
    overlap_communication = True
    weight_gradients: WeightGradients | None = None
    gradient_anchor: GradientAnchor | None = None

    def _multiply(
        self, inp: Tensor, weight: Tensor, bias: Tensor | None, communication: LinearCommunication
    ) -> Tensor:
        wgrad = WgradOptions(
            self.gradient_accumulation_fusion,
            store=self.weight_gradients,
            anchor=self.gradient_anchor,
        )
        return linear(inp, weight, bias, communication, wgrad)


@functools.cache
def _substitutes() -> dict[type, type]:
    """Subclasses of Megatron's two classes, under the same names."""
    from megatron.core.tensor_parallel import ColumnParallelLinear as Column
    from megatron.core.tensor_parallel import RowParallelLinear as Row
    from megatron.core.tensor_parallel import scatter_to_tensor_model_parallel_region

    class ColumnParallelLinear(_Multiply, Column):  # type: ignore[misc]
        def _forward_impl(self, input: Any, weight: Any, **options: Any) -> Any:
            if options.get("grad_output_buffer") is not None:
                return super()._forward_impl(input, weight, **options)
            scatters, reduces = options["sequence_parallel"], options["allreduce_dgrad"]
            group = self.tp_group if scatters or reduces else None
            communication = LinearCommunication(
                group, "column", scatters, self.overlap_communication
            )
            return self._multiply(input, weight, options["bias"], communication)

    class RowParallelLinear(_Multiply, Row):  # type: ignore[misc]
        def _forward_impl(self, input: Any, weight: Any, **options: Any) -> Any:
            communication = LinearCommunication(output_unread=regions.output_unread(self))
            return self._multiply(input, weight, options["bias"], communication)

        def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
            if self.explicit_expert_comm:  # the token dispatcher communicates
                return super().forward(input_)  # type: ignore[no-any-return]
            if not self.input_is_parallel:
                input_ = scatter_to_tensor_model_parallel_region(input_, group=self.tp_group)
            offloading = self.config._cpu_offloading_context
            if offloading is not None and offloading.inside_context:
                input_.activation_offloading = self.config.cpu_offloading_activations  # type: ignore[attr-defined]
            communication = LinearCommunication(
                self.tp_group,
                "row",
                self.sequence_parallel,
                self.overlap_communication,
                regions.output_unread(self),
            )
            bias = None if self.skip_bias_add else self.bias
            out = self._multiply(input_, self.weight, bias, communication)
            return out, self.bias if self.skip_bias_add else None

    return {Column: ColumnParallelLinear, Row: RowParallelLinear}


def new_store(check: Callable[[int, int], None] | None = None) -> WeightGradients:
    """A store whose stashes may wait in host memory.

    Args:
        check: of :class:`~mindspeed.memory.stash_swap.StashSwap`.
    """
    from mindspeed.memory.stash_swap import StashSwap  # not with the import line
    from mindspeed.pipeline.schedule.weight_gradients import WeightGradients

    return WeightGradients(StashSwap(check=check))


def split(
    store: WeightGradients, model: torch.nn.Module, config: Any, vp_stage: int | None
) -> None:
    """Let the layers of a built model chunk give their weight gradients to ``store``.

    Linear layers of Megatron's own are converted (:mod:`mindspeed.te.local_linears`).
    """
    stacked = _stacked_experts()
    model.weight_gradients = store  # type: ignore[assignment]
    output_layer = getattr(model, "output_layer", None)
    for module in model.modules():
        if module is output_layer:
            continue
        convert(module)
        if hasattr(type(module), "weight_gradients") or isinstance(module, stacked):
            module.weight_gradients = store  # type: ignore[assignment]


def convert_experts(experts: torch.nn.Module) -> None:
    """Let linear layers of Megatron's own compute by :mod:`mindspeed.te.local_linears`."""
    for module in experts.modules():
        convert(module)


def anchored_weights(experts: torch.nn.Module) -> list[Tensor]:
    """The weights, frozen ones too, whose gradients an anchor can take now."""
    return [
        parameter
        for module in _takers(experts)
        for name, parameter in module.named_parameters(recurse=False)
        if name.startswith("weight")
    ]


@contextlib.contextmanager
def anchored(experts: torch.nn.Module, anchor: GradientAnchor | None) -> Iterator[None]:
    """Give the weight gradients of the calls inside to ``anchor``.

    Args:
        anchor: None changes nothing.
    """
    layers = [] if anchor is None else list(_takers(experts))
    for layer in layers:
        layer.gradient_anchor = anchor
    try:
        yield
    finally:
        for layer in layers:
            del layer.gradient_anchor


def _takers(experts: torch.nn.Module) -> Iterator[Any]:
    stacked = _stacked_experts()
    for module in experts.modules():
        if hasattr(type(module), "gradient_anchor") or isinstance(module, stacked):
            store = getattr(module, "weight_gradients", None)
            delayed = getattr(module, "_delayed", None) is not None
            if not delayed and (store is None or not store.splitting_backward):
                yield module


def _stacked_experts() -> tuple[type, ...]:
    """Megatron's experts with stacked weights; none since 0.17."""
    from megatron.core.transformer.moe import experts

    found = getattr(experts, "GroupedMLP", None)
    return () if found is None else (found,)
