"""Attention over sequences that are split over ranks: context parallelism.

    from mindspeed.attention import Mask, context_parallel_attention, plan

    causal = plan(Mask.causal(S), ranks=P)             # once, the same on all ranks
    rows = causal.layout.positions(rank)               # the tokens that this rank owns
    out = context_parallel_attention(q, k, v, causal, group)

A mask is a list of rectangles with a diagonal band (:mod:`~mindspeed.attention.mask`), an algorithm
is a plan of moves and work (:mod:`~mindspeed.attention.plan`) that can be proven
(:mod:`~mindspeed.attention.check`) and priced (:mod:`~mindspeed.attention.figures`), and one
executor runs them all. Works without Megatron, with any process group.
"""

from mindspeed.attention import planners
from mindspeed.attention.alibi import alibi_slopes
from mindspeed.attention.by_heads import ulysses_attention
from mindspeed.attention.check import PlanError, check
from mindspeed.attention.figures import Figures, Sizes, figures
from mindspeed.attention.layout import Layout, contiguous, zigzag
from mindspeed.attention.mask import Mask, Region
from mindspeed.attention.parallel import context_parallel_attention
from mindspeed.attention.plan import Plan

# Hides the attribute of the module of that name; ``from mindspeed.attention.plan import`` finds it.
from mindspeed.attention.planning import plan
from mindspeed.attention.ulysses import HeadSplit
from mindspeed.attention.user_mask import as_mask

__all__ = [
    "Figures",
    "HeadSplit",
    "Layout",
    "Mask",
    "Plan",
    "PlanError",
    "Region",
    "Sizes",
    "alibi_slopes",
    "as_mask",
    "check",
    "context_parallel_attention",
    "contiguous",
    "figures",
    "plan",
    "planners",
    "ulysses_attention",
    "zigzag",
]
