"""Moving tokens to their experts and back.

Slot ``i = token * k + j`` is the j-th expert of a token; ``sorted_indices[i]`` is the row of the
permuted tokens where that slot went. Rows are ordered by expert, and by token within an expert.
"""

from __future__ import annotations

import torch

from tests.npu_emulator.reference_ops._common import refuse, require


def _rows_of_slots(experts):
    """``sorted_indices`` for the expert of each slot."""
    order = experts.flatten().argsort(stable=True)
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.numel())).int()


def _to_rows(slots, rows, count):
    """Slots [n, H] in the order of rows; those beyond `count` are dropped.

    Rows that no slot goes to are NaN: what the device leaves there is not documented.
    """
    kept = rows < count
    result = slots.new_full((count, *slots.shape[1:]), float("nan"))
    result[rows[kept].long()] = slots[kept]
    return result


def _to_slots(permuted, rows):
    """Rows back to slots; slots that were dropped are 0."""
    kept = (rows >= 0) & (rows < permuted.size(0))
    result = permuted.new_zeros(rows.numel(), *permuted.shape[1:])
    result[kept] = permuted[rows[kept].long()]
    return result


def npu_moe_token_permute(tokens, indices, num_out_tokens=None, padded_mode=False):
    """Returns the permuted tokens and sorted_indices (int32, one per slot)."""
    refuse("npu_moe_token_permute", {"padded_mode": padded_mode})
    require(
        "npu_moe_token_permute",
        indices.numel() < 16777215 and bool(((indices >= 0) & (indices < 16777215)).all()),
        "fewer than 16777215 indices, each in [0, 16777215)",
    )
    few = indices.dim() == 1 or indices.size(1) <= 512
    require("npu_moe_token_permute", few, "at most 512 indices to a token")
    rows, wanted = _rows_of_slots(indices), num_out_tokens or 0
    count = min(wanted, rows.numel()) if wanted > 0 else rows.numel() + wanted
    slots = tokens.repeat_interleave(indices.numel() // max(tokens.size(0), 1), 0)
    return _to_rows(slots, rows, count), rows


def npu_moe_token_permute_grad_v2(
    grad_permuted_tokens, sorted_indices, tokens_size_0, tokens_dtype, num_topK, padded_mode=False
):
    refuse("npu_moe_token_permute_grad_v2", {"padded_mode": padded_mode})
    slots = _to_slots(grad_permuted_tokens.float(), sorted_indices)
    return slots.view(tokens_size_0, num_topK, slots.size(-1)).sum(1).to(tokens_dtype)


def npu_moe_token_permute_grad(
    tokens, grad_permuted_tokens, indices, sorted_indices, padded_mode=False
):
    k = indices.numel() // max(tokens.size(0), 1)
    return npu_moe_token_permute_grad_v2(
        grad_permuted_tokens, sorted_indices, tokens.size(0), tokens.dtype, k, padded_mode
    )


def npu_moe_token_unpermute(
    permuted_tokens, sorted_indices, probs=None, padded_mode=False, restore_shape=None
):
    """The sum of each token's rows, weighted by `probs` [tokens, k]; without them k is 1."""
    refuse("npu_moe_token_unpermute", {"padded_mode": padded_mode, "restore_shape": restore_shape})
    slots = _to_slots(permuted_tokens.float(), sorted_indices)
    if probs is None:
        return slots.to(permuted_tokens.dtype)
    slots = slots.view(*probs.shape, slots.size(-1)) * probs.float()[..., None]
    return slots.sum(1).to(permuted_tokens.dtype)


def _npu_moe_token_unpermute(permuted_tokens, sorted_indices, *how, **options):
    """What torch_npu's autograd calls: with the tokens that the gradient wants."""
    out = npu_moe_token_unpermute(permuted_tokens, sorted_indices, *how, **options)
    return out, permuted_tokens.clone()


def npu_moe_token_unpermute_grad(
    permuted_tokens, grad_unpermuted_tokens, sorted_indices, probs=None, padded_mode=False,
    restore_shape=None,
):  # fmt: skip
    """Gradients of the permuted tokens and of probs."""
    op = "npu_moe_token_unpermute_grad"
    refuse(op, {"padded_mode": padded_mode, "restore_shape": restore_shape})
    dy, count = grad_unpermuted_tokens.float(), permuted_tokens.size(0)
    if probs is None:
        return _to_rows(dy, sorted_indices, count).to(permuted_tokens.dtype), None
    dslots = (dy[:, None] * probs.float()[..., None]).flatten(0, 1)
    slots = _to_slots(permuted_tokens.float(), sorted_indices).view(*probs.shape, -1)
    dprobs = (slots * dy[:, None]).sum(-1).to(probs.dtype)
    return _to_rows(dslots, sorted_indices, count).to(permuted_tokens.dtype), dprobs


def npu_moe_token_unpermute_grad_v2(
    grad_unpermuted_tokens, sorted_indices, permuted_tokens_size_0, permuted_tokens_dtype,
    probs=None, padded_mode=False, restore_shape=None, permuted_tokens=None,
):  # fmt: skip
    if permuted_tokens is None:  # only the gradient of probs looks at the values
        require("npu_moe_token_unpermute_grad_v2", probs is None, "probs need permuted_tokens")
        shape = (permuted_tokens_size_0, grad_unpermuted_tokens.size(1))
        permuted_tokens = torch.empty(shape, dtype=permuted_tokens_dtype)
    return npu_moe_token_unpermute_grad(
        permuted_tokens, grad_unpermuted_tokens, sorted_indices, probs, padded_mode, restore_shape
    )


# By routing map [tokens, experts]: slot j of a token is its j-th expert in ascending order.


def _slots_of_map(op, routing_map, k):
    """Token and expert of each slot."""
    counts = routing_map.bool().sum(1)
    require(op, bool((counts == k).all()), f"each row of routing_map has {k} ones")
    return routing_map.bool().nonzero(as_tuple=True)


def npu_moe_token_permute_with_routing_map(
    tokens, routing_map, *, probs=None, num_out_tokens=None, drop_and_pad=False
):
    """Returns permuted tokens, permuted probs (or None) and sorted_indices."""
    op = "npu_moe_token_permute_with_routing_map"
    refuse(op, {"drop_and_pad": drop_and_pad})
    k = (tokens.size(0) if num_out_tokens is None else num_out_tokens) // max(tokens.size(0), 1)
    token, expert = _slots_of_map(op, routing_map, k)
    rows = _rows_of_slots(expert)
    permuted_probs = None if probs is None else _to_rows(probs[token, expert], rows, len(rows))
    return _to_rows(tokens[token], rows, len(rows)), permuted_probs, rows


def npu_moe_token_permute_with_routing_map_grad(
    permuted_token_out_grad, probs_grad, sorted_indices, routing_map, experts_num, tokens_num,
    drop_and_pad,
):  # fmt: skip
    op = "npu_moe_token_permute_with_routing_map_grad"
    refuse(op, {"drop_and_pad": drop_and_pad})
    k = sorted_indices.numel() // max(tokens_num, 1)
    token, expert = _slots_of_map(op, routing_map, k)
    slots = _to_slots(permuted_token_out_grad.float(), sorted_indices)
    dtokens = slots.new_zeros(tokens_num, slots.size(1)).index_add_(0, token, slots)
    dprobs = None
    if probs_grad is not None:
        dprobs = probs_grad.new_zeros(tokens_num, experts_num)
        dprobs[token, expert] = _to_slots(probs_grad, sorted_indices)
    return dtokens.to(permuted_token_out_grad.dtype), dprobs


def _npu_moe_token_unpermute_with_routing_map(
    permuted_tokens, sorted_indices, restore_shape, *, probs=None, routing_map=None,
    drop_and_pad=False,
):  # fmt: skip
    """What torch_npu's autograd calls: also row and token of each slot, and the probs by row."""
    op = "npu_moe_token_unpermute_with_routing_map"
    refuse(op, {"drop_and_pad": drop_and_pad})
    token, weight = _slot_weights(op, sorted_indices, restore_shape[0], probs, routing_map)
    slots = _to_slots(permuted_tokens.float(), sorted_indices)
    weighted = slots if weight is None else slots * weight.float()[:, None]
    out = weighted.new_zeros(restore_shape).index_add_(0, token, weighted)
    by_row = None if weight is None else _to_rows(weight, sorted_indices, weight.numel())
    return out.to(permuted_tokens.dtype), sorted_indices.clone(), token.int(), by_row


def npu_moe_token_unpermute_with_routing_map(permuted_tokens, sorted_indices, restore_shape, **how):
    return _npu_moe_token_unpermute_with_routing_map(
        permuted_tokens, sorted_indices, restore_shape, **how
    )[0]


def npu_moe_token_unpermute_with_routing_map_grad(
    unpermuted_tokens_grad, out_index, permuted_token_id, routing_map, permuted_tokens, probs,
    drop_and_pad, restore_shape,
):  # fmt: skip
    """From the row of each slot (`out_index`); `permuted_token_id` is for drop_and_pad alone.

    Without it torch_npu's autograd hands in sorted_indices for both.
    """
    op = "npu_moe_token_unpermute_with_routing_map_grad"
    refuse(op, {"drop_and_pad": drop_and_pad})
    token, weight = _slot_weights(op, out_index, restore_shape[0], probs, routing_map)
    dslots, dtype = unpermuted_tokens_grad.float()[token], unpermuted_tokens_grad.dtype
    dprobs = None
    if weight is not None:
        expert = routing_map.bool().nonzero(as_tuple=True)[1]
        dprobs = torch.zeros(probs.shape)
        dprobs[token, expert] = (_to_slots(permuted_tokens.float(), out_index) * dslots).sum(-1)
        dslots, dprobs = dslots * weight.float()[:, None], dprobs.to(dtype)
    return _to_rows(dslots, out_index, out_index.numel()).to(dtype), dprobs


def _slot_weights(op, sorted_indices, tokens, probs, routing_map):
    k = sorted_indices.numel() // max(tokens, 1)
    if probs is None:
        return torch.arange(tokens).repeat_interleave(k), None
    token, expert = _slots_of_map(op, routing_map, k)
    return token, probs[token, expert]


REFERENCE = {
    function.__name__: function
    for function in (
        npu_moe_token_permute,
        npu_moe_token_permute_grad,
        npu_moe_token_permute_grad_v2,
        npu_moe_token_unpermute,
        _npu_moe_token_unpermute,
        npu_moe_token_unpermute_grad,
        npu_moe_token_unpermute_grad_v2,
        npu_moe_token_permute_with_routing_map,
        npu_moe_token_permute_with_routing_map_grad,
        npu_moe_token_unpermute_with_routing_map,
        _npu_moe_token_unpermute_with_routing_map,
        npu_moe_token_unpermute_with_routing_map_grad,
    )
}
