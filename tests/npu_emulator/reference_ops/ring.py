"""Merging two partial attentions by their softmax statistics."""

from __future__ import annotations

import itertools

import torch

from tests.npu_emulator.reference_ops._common import require

OP = "npu_ring_attention_update"


def npu_ring_attention_update(
    prev_attn_out,
    prev_softmax_max,
    prev_softmax_sum,
    cur_attn_out,
    cur_softmax_max,
    cur_softmax_sum,
    *,
    actual_seq_qlen=None,
    input_layout="SBH",
    input_softmax_layout="",
):
    """Returns output, max and sum of the attention over both sets of keys.

    `actual_seq_qlen` is cumulative with a leading 0; with TND it says how the statistics lie in
    memory, sequence by sequence as [n, s, 8], unless ``input_softmax_layout="TND"``.
    """
    maximum = torch.maximum(prev_softmax_max, cur_softmax_max)
    prev = prev_softmax_sum * torch.exp(prev_softmax_max - maximum)
    cur = cur_softmax_sum * torch.exp(cur_softmax_max - maximum)
    total = prev + cur
    shape, dtype = prev_attn_out.shape, prev_attn_out.dtype
    heads = prev_softmax_max.size(1)

    def weight(part):
        share = (part / total)[..., 0]
        if input_layout == "SBH":  # [b, n, s] -> [s, b, n]
            return share.permute(2, 0, 1)[..., None]
        if input_softmax_layout == "TND":
            return share[..., None]
        require(OP, actual_seq_qlen is not None, "TND needs actual_seq_qlen")
        ends = actual_seq_qlen.tolist()
        require(OP, ends[0] == 0, "actual_seq_qlen starts with 0")
        lengths = [b - a for a, b in itertools.pairwise(ends)]
        parts = share.flatten().split([length * heads for length in lengths])
        return torch.cat([part.view(heads, -1).t() for part in parts])[..., None]

    split = (*shape[:-1], heads, -1) if input_layout == "SBH" else shape
    outs = (out.float().reshape(split) for out in (prev_attn_out, cur_attn_out))
    merged = sum(out * weight(part) for out, part in zip(outs, (prev, cur), strict=True))
    return merged.reshape(shape).to(dtype), maximum, total


REFERENCE = {"npu_ring_attention_update": npu_ring_attention_update}
