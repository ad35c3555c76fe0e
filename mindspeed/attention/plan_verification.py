"""Verify a plan before its first use: cheap always, in full with ``MINDSPEED_CHECK_PLAN=1``."""

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

    Always compares the number of query-key pairs, once per plan. With ``MINDSPEED_CHECK_PLAN=1``
    also proves the plan once, and compares its digest between the ranks at every call. That
    comparison is an all-gather of 32 bytes and cannot be skipped for a plan seen before: a rank
    does not know whether the other ranks have seen it.

    Args:
        plan: The plan about to be executed.
        group: The ranks of the plan.
        device: Device of the tensors of the all-gather.

    Raises:
        PlanError: The plan is wrong, or the ranks have different plans.
    """
    thorough = os.environ.get(CHECK_PLAN) == "1"
    if thorough and plan.ranks > 1:
        _compare_digests(plan, group, device)
    if verify not in plan.derived:
        (check if thorough else check_area)(plan)
        plan.derived[verify] = True


def _compare_digests(plan: Plan, group: Any, device: torch.device) -> None:
    own = torch.tensor(list(bytes.fromhex(plan.digest)), dtype=torch.uint8, device=device)
    gathered = [torch.empty_like(own) for _ in range(plan.ranks)]
    dist.all_gather(gathered, own, group=group)
    digests = [bytes(digest.tolist()).hex() for digest in gathered]
    if other := next((digest for digest in digests if digest != digests[0]), None):
        raise PlanError(
            f"plans differ between CP ranks: {digests[0][:12]} vs {other[:12]} "
            "(same cu_seqlens on every rank?)"
        )
