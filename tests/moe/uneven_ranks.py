"""Ranks that receive no tokens, and ranks that raise inside a stage."""

from __future__ import annotations

from typing import Any

import torch

from tests.moe import ampipe_ranks, layer_ranks

# Megatron adds the bias to the scores before it chooses experts: the first ones win.
BIASED = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}


def all_rows(tokens: int) -> int:
    """A capacity that drops nothing."""
    return tokens


def crowded(
    layout: dict[str, int],
    overrides: dict[str, Any],
    variants: list[dict[str, Any]],
    first: int,
    **options: Any,
) -> list[layer_ranks.Result]:
    """All tokens go to experts from ``first`` on, all others get none.

    The first result's ``extra`` has the ``weights``, ``input`` and ``output_weight``.

    Args:
        layout: Arguments of ``layer_ranks.start``.
        overrides: Of the transformer config.
        variants: Fields of ``LayerRequest`` each; Megatron's own forward comes before them.
        first: Index of an expert.
        **options: Of ``layer_ranks.run``.
    """
    import torch.distributed as dist

    layer_ranks.start(**layout)
    layer = layer_ranks.layer_of("te", **layer_ranks.parallel_of(layout), **BIASED, **overrides)
    _crowd(layer.router, first)
    variants = [one | _nodes(layer, one) for one in variants]
    results = layer_ranks._variants(layer, variants, **options)
    tokens = options.get("tokens", layer_ranks.TOKENS)
    shape = tokens if isinstance(tokens, int) else tokens[dist.get_rank()], 1, layer_ranks.HIDDEN
    generator = torch.Generator().manual_seed(5 + dist.get_rank())
    x, weight = (torch.randn(shape, generator=generator) for _ in range(2))
    weights = {name: p.detach() for name, p in layer.named_parameters()}
    results[0].extra = {"weights": weights, "input": x, "output_weight": weight}
    return results


def _nodes(layer: Any, variant: dict[str, Any]) -> dict[str, Any]:
    """Groups of two nodes, for hierarchical dispatch."""
    from mindspeed.moe.nodes import node_groups

    if variant.get("exchange") != "hierarchical":
        return {}
    group = layer.token_dispatcher.ep_group
    return {"nodes": node_groups(group, group.size() // 2)}


def _crowd(router: Any, first: int) -> None:
    router.expert_bias[first : first + router.config.moe_router_topk] += 100.0


def crowded_ampipe(
    layout: dict[str, int], degrees: list[int], first: int, attached: dict[str, Any]
) -> list[layer_ranks.Result]:
    """A transformer layer in chunks of the sequence, whose tokens all go to the same experts.

    Args:
        layout: Arguments of ``layer_ranks.start``.
        degrees: Numbers of chunks; Megatron's own forward comes before them.
        first: Index of an expert.
        attached: Arguments of ``attach``.
    """
    from mindspeed.journal import Journal
    from mindspeed.moe.ampipe.megatron import attach

    layer_ranks.start(**layout)
    layer = ampipe_ranks.transformer_layer("te", **layer_ranks.parallel_of(layout), **BIASED)
    _crowd(layer.mlp.router, first)
    results = [ampipe_ranks.run(layer)]
    for degree in degrees:
        journal = Journal()
        attach(layer, degree, journal, **attached)
        results.append(ampipe_ranks.run(layer))
        journal.undo()
    return results


def crowded_single(first: int) -> list[layer_ranks.Result]:
    """One expert a rank, top-1: Megatron's own forward, and with rows of the expert's own."""
    from mindspeed.journal import Journal
    from mindspeed.moe.layer.megatron import keep_rows

    overrides = {"num_moe_experts": 2, "moe_router_topk": 1}
    layer_ranks.start(expert=2)
    layer = layer_ranks.layer_of("te", expert_model_parallel_size=2, **BIASED, **overrides)
    _crowd(layer.router, first)
    results = layer_ranks._variants(layer, [])
    keep_rows(layer, Journal())
    return [*results, layer_ranks.run(layer)]


def crowded_with(options: dict[str, Any], *args: Any) -> list[layer_ranks.Result]:
    """:func:`crowded` with options of ``run``."""
    return crowded(*args, **options)


def crowded_fused(
    layout: dict[str, int],
    overrides: dict[str, Any],
    variants: list[dict[str, Any]],
    first: int,
) -> list[layer_ranks.Result]:
    """:func:`crowded` without and with the kernels of one operator each way; one reference."""
    from mindspeed.te import fused_experts, kernels

    plain = crowded(layout, overrides, [], first)
    for name in ("permute", "permute_again", "unpermute", "sort_chunks"):
        setattr(kernels, f"moe_{name}", getattr(fused_experts, name))
    return plain + crowded(layout, {**overrides, "moe_permute_fusion": True}, variants, first)


class StageError(Exception):
    """Raised on purpose."""


def failing(changes: dict[str, Any], dispatcher: str, where: str) -> None:
    """Rank 1 raises in the experts' forward, or in the backward of their input."""
    import torch.distributed as dist

    from mindspeed.journal import Journal
    from mindspeed.moe.layer.megatron import change

    layer_ranks.start(expert=2)
    layer = layer_ranks.layer_of(
        "te", expert_model_parallel_size=2, moe_token_dispatcher_type=dispatcher
    )
    change(layer, Journal(), **changes, **_nodes(layer, changes))
    if dist.get_rank() == 1:

        def fail(*args: Any) -> None:
            raise StageError(where)

        def fail_later(module: Any, args: Any) -> None:
            args[0].register_hook(fail)

        hook = fail if where == "forward" else fail_later
        layer.experts.register_forward_pre_hook(hook)
    layer_ranks.run(layer)
    dist.barrier()
