"""Look at a plan before its first use: cheap always, thorough with ``MINDSPEED_CHECK_PLAN=1``."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.attention.check import PlanError, check, check_area
from mindspeed.attention.plan import Plan

CHECK_PLAN = "MINDSPEED_CHECK_PLAN"


def verify(plan: Plan, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Refuse a plan that does not compute its mask.

    Compares the number of pairs, once for each plan. With ``MINDSPEED_CHECK_PLAN=1`` proves the
    plan once, and compares it between the ranks of the group every time, which is a collective: a
    rank cannot know whether the others have the plan that it has seen before.

    Args:
        plan: About to be run.
        group: Its ranks.
        device: Where a collective's tensors may lie.

    Raises:
        PlanError: The plan is wrong, or ranks have different plans.
    """
    thorough = os.environ.get(CHECK_PLAN) == "1"
    if thorough and plan.ranks > 1:
        _compare(plan, group, device)
    if verify not in plan.derived:
        (check if thorough else check_area)(plan)
        plan.derived[verify] = True


def _compare(plan: Plan, group: Any, device: torch.device) -> None:
    mine = torch.tensor(list(bytes.fromhex(plan.digest)), dtype=torch.uint8, device=device)
    everybody = [torch.empty_like(mine) for _ in range(plan.ranks)]
    dist.all_gather(everybody, mine, group=group)
    digests = [bytes(digest.tolist()).hex() for digest in everybody]
    if other := next((digest for digest in digests if digest != digests[0]), None):
        raise PlanError(
            f"plans differ between CP ranks: {digests[0][:12]} vs {other[:12]} "
            "(same cu_seqlens on every rank?)"
        )
