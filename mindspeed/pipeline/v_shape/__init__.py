"""V-shape: rank r has the stages r and 2p - 1 - r.

    rank 0    stage 0    stage 2p-1     embedding and loss
    rank 1    stage 1    stage 2p-2
    ...
    rank p-1  stage p-1  stage p        the turn: one stage hands on to the other without a message

A micro-batch goes down and comes back up, so its backward begins on the rank where its forward
began, and activations are alive equally long on all ranks. :mod:`.megatron` builds the two chunks
of a rank with Megatron Core's modules.

Source: Qi et al., "Pipeline parallelism with controllable memory" (2024); DualPipeV of
DeepSeek-V3.
"""

from __future__ import annotations


def even_layout(num_layers: int, ranks: int, mtp_layers: int = 0) -> str:
    """A layout in Megatron's notation: equally many layers in each of 2p stages.

    Args:
        num_layers: a multiple of 2p.
        ranks: p.
        mtp_layers: layers of multi-token prediction, in the last stage.
    """
    stages = "|".join(["t" * (num_layers // (2 * ranks))] * (2 * ranks))
    return f"E{stages}{'m' * mtp_layers}L"
