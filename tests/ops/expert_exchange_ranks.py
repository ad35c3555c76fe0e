"""Jobs for the ranks of test_expert_exchange.py: a grid of ep x tp ranks, TP neighbours first."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mindspeed.instruments import CommLedger
from mindspeed.ops.compat.expert_bmm import (
    ALL_TO_ALL_ALL_GATHER_BMM,
    BMM_REDUCE_SCATTER_ALL_TO_ALL,
)
from mindspeed.ops.npu_all_to_all_all_gather_bmm import npu_all_to_all_all_gather_bmm
from mindspeed.ops.npu_bmm_reduce_scatter_all_to_all import npu_bmm_reduce_scatter_all_to_all

FUNCTIONS = {
    "first": npu_all_to_all_all_gather_bmm,
    "second": npu_bmm_reduce_scatter_all_to_all,
}


def grid(ep, tp):
    """This rank's group over EP and over TP."""
    rank = dist.get_rank()
    over_ep = [dist.new_group(range(j, ep * tp, tp)) for j in range(tp)]
    over_tp = [dist.new_group(range(i * tp, (i + 1) * tp)) for i in range(ep)]
    return over_ep[rank % tp], over_tp[rank // tp]


def run(which, ep, tp, arguments, cotangents, options, device="cpu"):
    """Outputs, gradients of x, weight and bias, and the collectives of each phase."""
    rank = dist.get_rank()
    group_ep, group_tp = grid(ep, tp)
    given = {
        name: None if x is None else x.to(device).requires_grad_()
        for name, x in arguments[rank].items()
    }
    names = (group_ep.group_name, ep, group_tp.group_name, tp)
    with CommLedger() as ledger:
        outputs = FUNCTIONS[which](
            given["x"], given["weight"], *names, bias=given["bias"], **options
        )
        y, *extras = outputs if isinstance(outputs, tuple) else (outputs,)
        y.backward(cotangents[rank].to(device))
    sent = [(event.phase, event.op, event.payload) for event in ledger.events]
    gradients = {name: None if x is None else x.grad.cpu() for name, x in given.items()}
    return y.detach().cpu(), [x if x is None else x.detach().cpu() for x in extras], gradients, sent


def frozen_weight_keeps_no_tokens(x, weight):
    """Bytes that autograd keeps with and without a gradient of the weight."""
    from mindspeed.instruments import saved_for_backward

    group_ep, group_tp = grid(2, 1)
    kept = []
    for train in (True, False):
        w = weight.clone().requires_grad_(train)
        with saved_for_backward() as saved:
            npu_all_to_all_all_gather_bmm(x.clone().requires_grad_(), w, group_ep, 2, group_tp, 1)
        kept.append(saved.bytes)
    return kept


def opcheck_and_compile(x, weight, back_x, back_weight):
    group_ep, group_tp = grid(2, 1)
    names = (group_ep.group_name, group_tp.group_name)
    for operator, tensors in (
        (ALL_TO_ALL_ALL_GATHER_BMM, (x, weight)),
        (BMM_REDUCE_SCATTER_ALL_TO_ALL, (back_x, back_weight)),
    ):
        leaves = [t.clone().requires_grad_() for t in tensors]
        torch.library.opcheck(operator.overload, (*leaves, None, *names, 0))

    def function(x, weight):
        groups = (names[0], 2, names[1], 1)
        return npu_all_to_all_all_gather_bmm(x, weight, *groups, act_type="Silu")[0]

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    results = []
    for call in (function, compiled):
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        y = call(*leaves)
        y.square().sum().backward()
        results.append((y.detach(), *(leaf.grad for leaf in leaves)))
    return results


def refusal(which, change):
    """The message for arguments that are right but for ``change``."""
    group_ep, group_tp = grid(2, 2)
    good = {
        "group_ep": group_ep,
        "group_ep_worldsize": 2,
        "group_tp": group_tp,
        "group_tp_worldsize": 2,
        "x": torch.ones(4, 3, 2) if which == "first" else torch.ones(2, 4, 3),
        "weight": torch.ones(2, 4, 5) if which == "first" else torch.ones(2, 3, 4),
    }
    if change.get("group_tp") == "the group of EP":
        change = {**change, "group_tp": group_ep}
    try:
        FUNCTIONS[which](**{**good, **change})
    except ValueError as error:
        return str(error)
    return "accepted"
