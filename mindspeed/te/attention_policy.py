"""Decisions of core attention that features may replace, each under its name with the default.

    attention_policy.mask_type_and_window("causal", (128, 0))

Which mask and window a layer uses, which bias, how it attends over a sequence that ranks share.
Modules of this package call these functions through the module, at run time; a feature replaces one
with ``seams.use_kernels(owner=..., alibi_slopes=...)``, and detaching it restores the default. The
computations themselves are in :mod:`mindspeed.te.kernels`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mindspeed.te.masks import Window

if TYPE_CHECKING:
    from mindspeed.attention.mask import Mask
    from mindspeed.attention.strategy import Strategy


def mask_type_and_window(mask_type: str, window: Window) -> tuple[str, Window]:
    """The mask type and sliding window with which a layer attends, from those of its module."""
    return mask_type, window


def mask_tensor(mask: Tensor | None, causal: bool) -> Tensor | None:
    """The mask tensor with which a layer of the local spec attends; None: its mask type alone.

    Args:
        mask: ``[b, 1, s, s]`` bool from the data loader, True is masked; or None.
        causal: Whether the layer's mask type is causal.
    """
    return mask


def user_mask(length: int, samples: int) -> Mask | None:
    """The user's mask of a micro-batch; None where the mask type decides.

    Args:
        length: Tokens of a sample, of all ranks.
    """
    return None


def sharding_mask(cu_seqlens: tuple[int, ...], samples: int) -> Mask | None:
    """The mask that adaptive sequence sharding balances; None: causal within documents.

    Args:
        cu_seqlens: Cumulative lengths of the documents that do not see each other, of all samples.
    """
    return None


def alibi_slopes(all_heads: int, first: int, heads: int, device: torch.device) -> Tensor | None:
    """ALiBi slopes, fp32 ``[heads]``, of heads ``first, first + 1 ...``; None without ALiBi."""
    return None


def context_strategy(comm_type: str | None, ulysses_degree: int) -> Strategy:
    """How a layer attends over a sequence that context-parallel ranks share.

    Args:
        comm_type: Megatron's ``--cp-comm-type`` of the layer; None for its default.
        ulysses_degree: Ranks of the inner all-to-all group where ``comm_type`` is ``a2a+p2p``.
    """
    from mindspeed.attention.strategy import Strategy

    return Strategy.from_comm_type(comm_type, ulysses_degree)


def overlap_group(group: Any) -> Any:
    """Another process group of the same ranks, for dkv that is sent while kv is received.

    Messages of one communicator wait for each other; None: everything goes through ``group``.
    """
    return None
