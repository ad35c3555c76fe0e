"""Shorten a micro-batch to the last token that is trained in one of its samples.

A causal model does not attend to later tokens: losses and gradients stay the same.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch


def trim_untrained_tail(
    tensors: Mapping[str, torch.Tensor], multiple: int
) -> dict[str, torch.Tensor]:
    """The tensors without the columns after the last one that has a loss in any sample.

    Args:
        tensors: ``[b, s]`` tensors by name, with ``loss_mask`` (fp32, 0 where not trained).
        multiple: The new length is a multiple of this, or the old length.
    """
    size = tensors["loss_mask"].shape[1]
    trained = torch.nonzero(tensors["loss_mask"].amax(0)).flatten()
    needed = int(trained[-1]) + 1 if len(trained) else 1
    width = min(-(-needed // multiple) * multiple, size)
    return {
        name: x[:, :width] if x.dim() == 2 and x.shape[1] == size else x
        for name, x in tensors.items()
    }
