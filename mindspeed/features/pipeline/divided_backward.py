"""Checks and costs of schedules that divide backward into I and W."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from mindspeed import device
from mindspeed.features.feature import Megatron, Problem, conflict

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams
    from mindspeed.pipeline.schedule.costs import Costs

_LAYER, _LAYER_INPUT, _PENDING = 34, 2, 32
"""Bytes of a dense layer in 16 bits with flash attention, in units of s b h: what forward keeps,
what it keeps where the layer is recomputed, and what a weight gradient that waits keeps: 7 of
inputs and 9 of output gradients. Source of the first: Korthikanti et al., "Reducing activation
recomputation in large transformer models" (2022)."""


def divided_backward_problems(name: str, megatron: Megatron) -> Iterator[Problem]:
    """Find layers whose weight gradients cannot be computed separately.

    Args:
        name: the flag that selects it.
    """
    from mindspeed import te

    if te.choose(device.current().name)[0] == "native":
        yield Problem(
            name,
            "computes weight gradients apart from backward, which the layers of NVIDIA's "
            "Transformer Engine do not do",
            "unset MINDSPEED_TE",
        )
    if megatron.get("use_transformer_engine_op_fuser"):
        why = "its fused layers compute weight gradients in backward"
        yield conflict(name, "--use-transformer-engine-op-fuser", why)


def divide_backward(
    seams: Seams, owner: str, check: Callable[[int, int], None] | None = None
) -> None:
    """Let layers of models that are built later compute weight gradients separately.

    Args:
        seams: the seams, of which ``chunk`` is used.
        owner: the feature.
        check: gets a stage and the bytes that one of its weight gradients keeps on the host.
    """
    from mindspeed.te.local_linears import new_store, split

    seams.chunk.add(partial(split, new_store(check)), owner=owner)


def costs_of(megatron: Megatron) -> Costs:
    """Costs by which weight gradients are scheduled: ``--pipeline-costs``, or modelled ones.

    Where layers are recomputed, input gradients take longer, and a weight gradient that waits keeps
    more than the forward did: then few are made to wait, so that memory does not grow.
    """
    from mindspeed.pipeline.schedule.costs import Costs, parse_costs

    part, measured = _recomputed_part(megatron), megatron.get("pipeline_costs")
    costs = parse_costs(measured) if measured else Costs(input_gradient=1.0 + part)
    if not part:
        return costs
    kept = part * _LAYER_INPUT + (1 - part) * _LAYER
    return replace(costs, weight_share=_PENDING / kept)


def _recomputed_part(megatron: Megatron) -> float:
    """Fraction of the layers that are fully recomputed."""
    if megatron.get("recompute_granularity") != "full":
        return 0.0
    number, layers = megatron.get("recompute_num_layers"), megatron.get("num_layers")
    if megatron.get("recompute_method") != "block" or not number or not layers:
        return 1.0
    stages = megatron.get("pipeline_model_parallel_size") or 1
    stages *= megatron.get("virtual_pipeline_model_parallel_size") or 1
    return min(1.0, float(number * stages / layers))
