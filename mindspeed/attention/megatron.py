"""Packed documents as ``packed_seq_params``, which Megatron passes to every attention.

Megatron passes it from ``GPTModel.forward`` through all layers, recomputed ones included.
:class:`PlanPackedSeqParams` keeps the layout ``sbhd``: samples stay apart, so the squeezing of the
batch dimension, the position embedding by document and the limit to one sample of Megatron's
``thd`` layout do not apply.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from mindspeed.attention.packed_batch import PackedBatch
from mindspeed.device.host_tensors import with_values


@dataclass
class PlanPackedSeqParams(PackedSeqParams):
    """Megatron's parameters of packed sequences with those of the plan.

    Attributes:
        cp_group: Ranks that share each sample, which Megatron's have since 0.16.
        packed: Documents, sharding and positions of the micro-batch.
    """

    cp_group: Any = None
    packed: PackedBatch | None = None

    @classmethod
    def of(cls, packed: PackedBatch, cp_group: Any = None) -> PlanPackedSeqParams:
        """Parameters of a micro-batch."""
        cu_seqlens = _on_device(packed)
        return cls(
            qkv_format="sbhd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=packed.size,
            max_seqlen_kv=packed.size,
            cp_group=cp_group,
            packed=packed,
        )


@with_values
def _on_device(packed: PackedBatch) -> torch.Tensor:
    """``cu_seqlens [n]`` int32 where the positions are."""
    cu_seqlens = torch.tensor(packed.cu_seqlens, dtype=torch.int32)
    return cu_seqlens.to(packed.positions.device, non_blocking=True)
