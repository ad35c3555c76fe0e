"""Ranks that receive no tokens, and ranks that raise inside a stage."""

from __future__ import annotations

from typing import Any

from tests.moe import layer_ranks

# Megatron adds the bias to the scores before it chooses experts: the first ones win.
BIASED = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}


def crowded(
    layout: dict[str, int],
    overrides: dict[str, Any],
    variants: list[dict[str, Any]],
    first: int,
    **options: Any,
) -> list[layer_ranks.Result]:
    """All tokens go to experts from ``first`` on, all others get none.

    Args:
        layout: Arguments of ``layer_ranks.start``.
        overrides: Of the transformer config.
        variants: Fields of ``LayerRequest`` each; Megatron's own forward comes before them.
        first: Index of an expert.
        **options: Of ``layer_ranks.run``.
    """
    layer_ranks.start(**layout)
    layer = layer_ranks.layer_of("te", **layer_ranks.parallel_of(layout), **BIASED, **overrides)
    topk = layer.config.moe_router_topk
    layer.router.expert_bias[first : first + topk] += 100.0
    return layer_ranks._variants(layer, variants, **options)


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
    from mindspeed.te import fused_permutation, kernels

    plain = crowded(layout, overrides, [], first)
    for name in ("permute", "permute_again", "unpermute", "sort_chunks"):
        setattr(kernels, f"moe_{name}", getattr(fused_permutation, name))
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
    change(layer, Journal(), **changes)
    if dist.get_rank() == 1:

        def fail(*args: Any) -> None:
            raise StageError(where)

        def fail_later(module: Any, args: Any) -> None:
            args[0].register_hook(fail)

        hook = fail if where == "forward" else fail_later
        layer.experts.register_forward_pre_hook(hook)
    layer_ranks.run(layer)
    dist.barrier()
