"""Whether a layer attends by a plan: the ranks that share its sequence, and the user's mask.

Kept apart from :mod:`mindspeed.te.context_parallel`, so that training without either does not
import :mod:`mindspeed.attention`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mindspeed.errors import ConfigError
from mindspeed.te import attention_policy

if TYPE_CHECKING:
    from mindspeed.attention.mask import Mask
    from mindspeed.attention.packed_batch import PackedBatch


def user_mask(length: int, samples: int, packed: PackedBatch | None) -> Mask | None:
    """The user's mask of a micro-batch; None where there is none.

    Args:
        length: Tokens of a sample, of all ranks.

    Raises:
        ConfigError: Packed documents and a user's mask contradict each other.
    """
    mask = attention_policy.user_mask(length, samples)
    if mask is not None and packed is not None and len(packed.cu_seqlens) > samples + 1:
        raise ConfigError(
            "set_attention_mask and packed documents (--reset-attention-mask) both decide "
            "which tokens are masked; drop the flag and give a mask that keeps documents apart"
        )
    return mask


def group_size(groups: Any) -> int:
    """Ranks of a group, or of the groups of a hierarchy together; 1 for None."""
    size = 1
    for group in groups if isinstance(groups, list) else [groups]:
        size *= 1 if group is None else group.size()
    return size


def lowest_level(groups: Any) -> int:
    """Ranks of the first group of a hierarchy, the Ulysses all-to-all; 1 without one."""
    return groups[0].size() if isinstance(groups, list) else 1  # type: ignore[no-any-return]
