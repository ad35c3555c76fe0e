"""One user-defined attention mask for all layers and micro-batches of the process.

    set_attention_mask(lambda q, k: (k <= q) & ((q // 4096 == k // 4096) | (k < 64)))

It is converted once (:mod:`mindspeed.attention.user_mask`) to a few regions on the host, whatever
the length. Set it before training, the same on all ranks. It must not change between micro-batches,
because a recomputed layer would then use a later mask than its forward.
"""

from __future__ import annotations

import functools

import torch

from mindspeed.attention.mask import Mask
from mindspeed.attention.user_mask import UserMask, as_mask
from mindspeed.errors import ConfigError
from mindspeed.ops.visibility import causal_mask

_given: UserMask | None = None
_of_samples: tuple[UserMask, ...] = ()  # one, or one for each sample


def set_attention_mask(mask: UserMask | None) -> None:
    """Set the mask of all layers; None removes it.

    Needs ``--attention-mask-type general``.

    Args:
        mask: Any form of :func:`~mindspeed.attention.user_mask.as_mask`, or a bool tensor
            ``[b, 1, s, s]`` (True is masked), a mask for each sample of a micro-batch.

    Raises:
        ConfigError: A tensor is not a mask, or a query sees no key.
    """
    global _given, _of_samples
    samples: list[UserMask] = [] if mask is None else [mask]
    if isinstance(mask, torch.Tensor):
        each = mask.flatten(0, 1) if mask.dim() == 4 and mask.shape[1] == 1 else [mask]
        samples = [as_mask(one, len(one), number) for number, one in enumerate(each)]
    _given, _of_samples = mask, tuple(samples)
    mask_of_batch.cache_clear()


def get_attention_mask(device: torch.device | str = "cpu") -> UserMask:
    """The mask that was set, else the compressed causal mask on ``device``."""
    return causal_mask(device) if _given is None else _given


@functools.lru_cache(maxsize=8)
def mask_of_batch(length: int, samples: int) -> Mask | None:
    """The mask that was set, for the concatenated samples of a micro-batch; None if none was.

    Raises:
        ConfigError: It has another length or another number of samples.
    """
    if not _of_samples:
        return None
    if len(_of_samples) not in (1, samples):
        raise ConfigError(
            f"attention mask is of {len(_of_samples)} samples, the micro-batch has {samples}"
        )
    masks = [as_mask(one, length, number) for number, one in enumerate(_of_samples)]
    return Mask.batch(masks * samples if len(masks) == 1 else masks)
