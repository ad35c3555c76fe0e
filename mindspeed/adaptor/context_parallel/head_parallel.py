"""A sharded sequence as sharded features and back, for layers that scan the whole sequence.

Gated delta nets under context parallelism: each rank gets all tokens of some heads. The functions
have the names and arguments that megatron-core has from 0.18 on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from mindspeed.errors import ConfigError


def tensor_a2a_cp2hp(
    tensor: torch.Tensor,
    seq_dim: int,
    head_dim: int,
    cp_group: dist.ProcessGroup | None,
    split_sections: Sequence[int] | None = None,
    undo_attention_load_balancing: bool = True,
) -> torch.Tensor:
    """All tokens of a rank's features, from its tokens of all features. Collective, differentiable.

    Args:
        tensor: ``[s, b, h]``, any dtype: the chunks r and 2 P - 1 - r of 2 P of the sequence.
        seq_dim: 0.
        head_dim: 2 or -1.
        cp_group: Ranks that share the sequence; None for one.
        split_sections: Sizes of parts of the features, each of which is sharded by itself.
        undo_attention_load_balancing: Order the tokens as in the sequence, else as the ranks.

    Returns:
        ``[P s, b, h / P]``.

    Raises:
        ConfigError: Another dimension; features that the ranks do not divide.
    """
    from megatron.core.ssm import mamba_context_parallel as megatron

    if cp_group is None or cp_group.size() == 1:
        return tensor
    _check(tensor, seq_dim, head_dim)
    ranks = cp_group.size()
    for size in split_sections or [tensor.shape[-1]]:
        if size % ranks:
            raise ConfigError(
                f"tensor_a2a_cp2hp: {size} features cannot be shared by {ranks} ranks"
            )
    tensor = _each(tensor, split_sections, lambda x: megatron._all_to_all_cp2hp(x, cp_group))
    if undo_attention_load_balancing:
        tensor = megatron._undo_attention_load_balancing(tensor, ranks)
    return tensor


def tensor_a2a_hp2cp(
    tensor: torch.Tensor,
    seq_dim: int,
    head_dim: int,
    cp_group: dist.ProcessGroup | None,
    split_sections: Sequence[int] | None = None,
    redo_attention_load_balancing: bool = True,
) -> torch.Tensor:
    """The inverse of :func:`tensor_a2a_cp2hp`. Collective, differentiable.

    Args:
        tensor: ``[P s, b, h / P]``, any dtype.
        seq_dim: As there, like ``head_dim`` and ``cp_group``.
        head_dim: 2 or -1.
        cp_group: Ranks that share the features.
        split_sections: Sizes of the parts on this rank.
        redo_attention_load_balancing: The tokens are ordered as in the sequence.

    Returns:
        ``[s, b, h]``.

    Raises:
        ConfigError: Another dimension; a sequence that 2 P does not divide.
    """
    from megatron.core.ssm import mamba_context_parallel as megatron

    if cp_group is None or cp_group.size() == 1:
        return tensor
    _check(tensor, seq_dim, head_dim)
    ranks = cp_group.size()
    if len(tensor) % (2 * ranks):
        raise ConfigError(
            f"tensor_a2a_hp2cp: {len(tensor)} tokens cannot be shared by {ranks} ranks with two "
            "chunks each"
        )
    if redo_attention_load_balancing:
        tensor = megatron._redo_attention_load_balancing(tensor, ranks)
    return _each(tensor, split_sections, lambda x: megatron._all_to_all_hp2cp(x, cp_group))


def _check(tensor: torch.Tensor, seq_dim: int, head_dim: int) -> None:
    if tensor.dim() != 3 or seq_dim != 0 or head_dim not in (2, -1):
        raise ConfigError(
            f"a tensor of {list(tensor.shape)} with seq_dim {seq_dim} and head_dim {head_dim}: it "
            "is [s, b, h], with 0 and -1"
        )


def _each(
    tensor: torch.Tensor,
    sections: Sequence[int] | None,
    exchange: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    parts = [tensor] if sections is None else torch.split(tensor, list(sections), dim=-1)
    return torch.cat([exchange(part) for part in parts], dim=-1)
