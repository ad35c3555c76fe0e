"""Packed documents as an argument that Megatron carries from the batch to every attention.

Megatron hands ``packed_seq_params`` from ``GPTModel.forward`` through all layers, also into
recomputation. :class:`PlanParams` is one that keeps the layout ``sbhd``: rows stay rows, so that
the squeezing of Megatron's ``thd`` layout, its position embedding by document and its one-row limit
do not apply.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from mindspeed.attention.packed import PackedBatch


@dataclass
class PlanParams(PackedSeqParams):
    """Megatron's parameters of packed sequences, and ours.

    Attributes:
        packed: Documents, layout and positions of the micro-batch.
    """

    packed: PackedBatch | None = None

    @classmethod
    def of(cls, packed: PackedBatch, cp_group: Any = None) -> PlanParams:
        """Parameters of a micro-batch.

        Args:
            packed: The micro-batch.
            cp_group: Ranks that share it, where they are not the context-parallel group.
        """
        device = packed.positions.device
        borders = torch.tensor(packed.cu_seqlens, dtype=torch.int32).to(device, non_blocking=True)
        return cls(
            qkv_format="sbhd",
            cu_seqlens_q=borders,
            cu_seqlens_kv=borders,
            max_seqlen_q=packed.size,
            max_seqlen_kv=packed.size,
            cp_group=cp_group,
            packed=packed,
        )
