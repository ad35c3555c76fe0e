"""Jobs of test_ring_attention_update.py on an emulated NPU."""

from __future__ import annotations

import torch

from mindspeed.ops.npu_ring_attention_update import npu_ring_attention_update


def npu_and_cpu(layout: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Results on both devices, with rows that one or both sets of keys do not know."""
    generator = torch.Generator().manual_seed(0)
    shape, lanes = ((6, 2, 8), (2, 4, 6)) if layout == "SBH" else ((6, 4, 2), (6, 4))
    tensors = []
    for number in range(2):
        out = torch.randn(shape, generator=generator)
        top = torch.randn(lanes, generator=generator)
        top.view(-1)[: number + 1] = -torch.inf
        total = torch.rand(lanes, generator=generator) + 1
        tensors += [out, *(x[..., None].repeat_interleave(8, -1) for x in (top, total))]
    ends = [2, 6]
    npu = npu_ring_attention_update(*(x.npu() for x in tensors), ends, layout)
    return [x.cpu() for x in npu], list(npu_ring_attention_update(*tensors, ends, layout))
