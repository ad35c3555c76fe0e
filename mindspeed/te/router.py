"""Choosing experts: scores, top-k with optional group limit, and the load-balancing loss.

    softmax, before top-k   p = softmax(logits), keep the k largest
    softmax, after top-k    p = softmax(the k largest logits)
    sigmoid                 p = s / sum of the chosen s (k > 1),  s = sigmoid(logits); a bias per
                            expert affects the choice but not p

With groups, a token may only choose from the ``group_topk`` groups whose best
``topk / group_topk`` scores sum highest. Scores are computed in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor


def fused_topk_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return probabilities ``[t, e]``, zero where not chosen, and the boolean choice ``[t, e]``.

    Args:
        logits: ``[..., e]`` router outputs.
        use_pre_softmax: Softmax over all experts before the choice.
        group_topk: Groups a token may choose from.
        score_function: ``"softmax"`` or ``"sigmoid"``.
        expert_bias: ``[e]`` bias on the choice (sigmoid only).
    """
    if logits.dtype == torch.float64:
        raise ValueError("the fused router takes fp32, bf16 or fp16 logits, not float64")
    shape, flat = logits.shape, logits.reshape(-1, logits.shape[-1])
    groups = (num_groups or 1, group_topk or 0)
    if score_function == "softmax":
        scores = flat.float()
        scores = scores.softmax(-1).to(flat.dtype).float() if use_pre_softmax else scores
        chosen = _choose(scores, topk, *groups)
        probs = scores.gather(1, chosen)
        probs = probs if use_pre_softmax else probs.softmax(-1)
    elif score_function == "sigmoid":
        scores = flat.float().sigmoid()
        chosen = _choose(scores if expert_bias is None else scores + expert_bias, topk, *groups)
        probs = scores.gather(1, chosen)
        probs = probs / (probs.sum(-1, keepdim=True) + 1e-20) if topk > 1 else probs
    else:
        raise ValueError(f"score_function {score_function!r} is not one of softmax, sigmoid")
    if scaling_factor:
        probs = probs * scaling_factor
    routed = torch.zeros_like(flat).scatter(1, chosen, probs.to(flat.dtype))
    return routed.view(shape), _as_map(flat, chosen).view(shape)


def fused_compute_score_for_moe_aux_loss(
    logits: Tensor, topk: int, score_function: str
) -> tuple[Tensor, Tensor]:
    """Return the top-k choice (bool) and the normalised scores (fp32) for the auxiliary loss.

    Both have the shape of ``logits``, ``[t, e]``.
    """
    shape, flat = logits.shape, logits.reshape(-1, logits.shape[-1])
    if score_function == "softmax":
        scores = flat.float().softmax(-1)
    elif score_function == "sigmoid":
        scores = flat.float().sigmoid()
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    else:
        raise ValueError(f"score_function {score_function!r} is not one of softmax, sigmoid")
    chosen = _as_map(flat, scores.detach().topk(topk, dim=-1).indices)
    return chosen.view(shape), scores.view(shape)


def fused_moe_aux_loss(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: int,
    num_experts: int,
    topk: int,
    coeff: float,
) -> Tensor:
    """Return the scalar ``coeff * e / (topk * T^2) * sum_e (tokens_per_expert * sum_t probs)``.

    ``probs`` is ``[t, e]`` of any floating dtype, ``tokens_per_expert`` int ``[e]``, T
    ``total_num_tokens``.
    """
    factor = num_experts * coeff / (topk * total_num_tokens * total_num_tokens)
    return (probs.sum(0) * tokens_per_expert).sum() * factor


def _choose(scores: Tensor, topk: int, num_groups: int, group_topk: int) -> Tensor:
    scores = scores.detach()
    if not group_topk:
        return scores.topk(topk, dim=-1).indices
    grouped = scores.view(scores.shape[0], num_groups, -1)
    best = grouped.topk(topk // group_topk, dim=-1).values.sum(-1).topk(group_topk, dim=-1).indices
    allowed = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, True)
    return grouped.masked_fill(~allowed[..., None], float("-inf")).flatten(1).topk(topk).indices


def _as_map(like: Tensor, chosen: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.bool).scatter(1, chosen, True)
