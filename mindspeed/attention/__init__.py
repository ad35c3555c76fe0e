"""Attention over sequences that are sharded over ranks: context parallelism.

    from mindspeed.attention import Mask, context_parallel_attention, plan

    causal = plan(Mask.causal(S), ranks=P)             # once, the same on all ranks
    rows = causal.sharding.positions(rank)             # the tokens of this rank
    out = context_parallel_attention(q, k, v, causal, group)

A mask is a list of rectangles with a diagonal band (:mod:`~mindspeed.attention.mask`). An algorithm
is a plan of transfers and work (:mod:`~mindspeed.attention.plan`) that can be proven
(:mod:`~mindspeed.attention.check`) and priced (:mod:`~mindspeed.attention.cost_metrics`), and one
executor runs them all. Works without Megatron, with any process group.
"""

from mindspeed.attention import planners
from mindspeed.attention.alibi import alibi_slopes
from mindspeed.attention.check import WrongPlanError, check
from mindspeed.attention.context_parallel import context_parallel_attention
from mindspeed.attention.cost_metrics import CostMetrics, Sizes, cost_metrics
from mindspeed.attention.mask import Mask, Region
from mindspeed.attention.plan import Plan

# As an attribute of the package the function shadows the module of that name; importing from the
# module still works. The same holds for cost_metrics and ulysses_attention.
from mindspeed.attention.planning import plan
from mindspeed.attention.sequence_sharding import SequenceSharding, contiguous, zigzag
from mindspeed.attention.ulysses_all_to_all import HeadAllToAll
from mindspeed.attention.ulysses_attention import ulysses_attention
from mindspeed.attention.user_mask import as_mask

__all__ = [
    "CostMetrics",
    "HeadAllToAll",
    "Mask",
    "Plan",
    "Region",
    "SequenceSharding",
    "Sizes",
    "WrongPlanError",
    "alibi_slopes",
    "as_mask",
    "check",
    "context_parallel_attention",
    "contiguous",
    "cost_metrics",
    "plan",
    "planners",
    "ulysses_attention",
    "zigzag",
]
