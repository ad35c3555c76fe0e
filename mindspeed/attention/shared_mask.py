"""One attention mask for the process, of all layers and micro-batches.

    set_attention_mask(lambda q, k: (k <= q) & ((q // 4096 == k // 4096) | (k < 64)))

It is converted once (:mod:`mindspeed.attention.user_mask`) and then is a few regions on the host,
whatever the length. Set it before training, on all ranks the same; a mask that changes between
micro-batches would be another one when a layer is computed again.
"""

from __future__ import annotations

import functools

import torch

from mindspeed.attention.mask import Mask
from mindspeed.attention.user_mask import UserMask, as_mask
from mindspeed.errors import ConfigError
from mindspeed.ops.attention_mask import causal_mask

_given: UserMask | None = None
_of_samples: tuple[UserMask, ...] = ()  # one, or one for each sample


def set_attention_mask(mask: UserMask | None) -> None:
    """Let all layers attend by a mask of one's own; None takes it back.

    Needs ``--attention-mask-type general``.

    Args:
        mask: Any form of :func:`~mindspeed.attention.user_mask.as_mask`, or a bool tensor
            ``[b, 1, s, s]`` (True is hidden), a mask for each sample of a micro-batch.

    Raises:
        ConfigError: A tensor is no mask, or has a query without a key.
    """
    global _given, _of_samples
    samples: list[UserMask] = [] if mask is None else [mask]
    if isinstance(mask, torch.Tensor):
        each = mask.flatten(0, 1) if mask.dim() == 4 and mask.shape[1] == 1 else [mask]
        samples = [as_mask(one, len(one), number) for number, one in enumerate(each)]
    _given, _of_samples = mask, tuple(samples)
    mask_of_batch.cache_clear()


def get_attention_mask(device: torch.device | str = "cpu") -> UserMask:
    """Return the mask that was set, else the compressed causal mask on ``device``."""
    return causal_mask(device) if _given is None else _given


@functools.lru_cache(maxsize=8)
def mask_of_batch(length: int, samples: int) -> Mask | None:
    """The mask that was set, for the samples of a micro-batch; None if there is none.

    Args:
        length: Tokens of a sample.
        samples: Samples, one behind the other.

    Raises:
        ConfigError: It is of another length or another number of samples.
    """
    if not _of_samples:
        return None
    if len(_of_samples) not in (1, samples):
        raise ConfigError(
            f"attention mask is of {len(_of_samples)} samples, the micro-batch has {samples}"
        )
    masks = [as_mask(one, length, number) for number, one in enumerate(_of_samples)]
    return Mask.batch(masks * samples if len(masks) == 1 else masks)
