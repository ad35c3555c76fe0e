"""Cross entropy over a vocabulary that may be split over tensor-parallel ranks.

``logits [s, b, v/p]``, ``target [s, b]`` with global token ids; the loss is fp32. Each rank takes
its own maximum, sum of exponentials and target logit; three all_reduces of ``[s, b]`` fp32 join
them (MAX, SUM, SUM; one more for the sum of all logits with label smoothing). Saved for backward:
the probabilities of this rank's shard, written over one fp32 copy of the logits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed.spmd import Collective, I, V, typed
from mindspeed.te.comm import group_size


@typed(Collective(V, I))
class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, smoothing: float, group: Any, ignore_idx: int
    ) -> Tensor:
        size = logits.shape[-1]
        ranks = group_size(group)
        x = logits.float()
        peak = x.amax(-1)
        _reduce(peak, group, dist.ReduceOp.MAX)
        x = x - peak.unsqueeze(-1)
        start = size * (group.rank() if ranks > 1 else 0)
        local = target - start
        mine = (local >= 0) & (local < size)
        index = local.masked_fill(~mine, 0).unsqueeze(-1)
        hit = x.gather(-1, index).squeeze(-1).masked_fill(~mine, 0.0)
        _reduce(hit, group)
        mean = x.sum(-1) if smoothing else None
        probs = x.exp_()
        total = probs.sum(-1)
        _reduce(total, group)
        log_total = total.log()
        loss = log_total - hit
        if mean is not None:
            _reduce(mean, group)
            uniform = log_total - mean / (size * ranks)
            loss = (1 - smoothing) * loss + smoothing * uniform
        ignored = target == ignore_idx
        ctx.save_for_backward(probs.div_(total.unsqueeze(-1)), index, mine, ignored)
        ctx.smoothing, ctx.vocabulary, ctx.dtype = smoothing, size * ranks, logits.dtype
        return loss.masked_fill(ignored, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        probs, index, mine, ignored = ctx.saved_tensors
        grad = probs.clone()
        hit = mine.to(grad.dtype).mul_(ctx.smoothing - 1).unsqueeze(-1)
        grad.scatter_add_(-1, index, hit)
        if ctx.smoothing:
            grad -= ctx.smoothing / ctx.vocabulary
        grad *= grads[0].float().masked_fill(ignored, 0.0).unsqueeze(-1)
        return grad.to(ctx.dtype), None, None, None, None


def _reduce(x: Tensor, group: Any, op: Any = dist.ReduceOp.SUM) -> None:
    if group_size(group) > 1:
        dist.all_reduce(x, op=op, group=group)


def parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: Any = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
) -> Tensor:
    """Return the loss of each token in fp32, or their mean with ``reduce_loss``.

    Args:
        logits: ``[s, b, v/p]``, this rank's shard of the vocabulary; any dtype.
        target: int64 ``[s, b]``, token ids in the whole vocabulary.
        label_smoothing: Share of the target's weight spread over the vocabulary.
        reduce_loss: Average over all tokens that are not ignored.
        dist_process_group: Group over which the vocabulary is split.
        ignore_idx: Target whose loss and gradient are zero.
        is_cg_capturable: Without effect: nothing here depends on values on the host.
    """
    loss = _CrossEntropy.apply(logits, target, label_smoothing, dist_process_group, ignore_idx)
    if reduce_loss:
        return loss.sum() / (target != ignore_idx).sum().clamp(min=1)
    return loss  # type: ignore[no-any-return]
