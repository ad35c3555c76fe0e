"""Ulysses by the original's function and classes: all-to-all, attend, all-to-all back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.adaptor.context_parallel.arguments import contiguous_parts, whole_mask
from mindspeed.attention import HeadAllToAll, Mask
from mindspeed.attention.strategy import Strategy
from mindspeed.errors import ConfigError
from mindspeed.te.context_parallel import attend

_CAUSAL, _BAND = (2, 3), 4


class GatherSizeCalculator(ABC):
    """Says how long the sequence is where ranks do not have equally many tokens of it."""

    @abstractmethod
    def calculate(self, *args: Any, **kwargs: Any) -> int | None:
        """Tokens of all ranks, from the arguments of the local attention; None: equal parts."""


class DefaultGatherSizeCalculator(GatherSizeCalculator):
    """Ranks have equally many tokens."""

    def calculate(self, *args: Any, **kwargs: Any) -> int | None:
        """None."""
        return None


class DynamicGatherSizeCalculator(GatherSizeCalculator):
    """The number of keys of the attention mask, the first positional argument after q, k, v."""

    def calculate(self, *args: Any, **kwargs: Any) -> int | None:
        """The last dimension of the mask; None without one."""
        mask = args[0] if args else None
        return mask.shape[-1] if isinstance(mask, torch.Tensor) else None


class UlyssesContextAttention(torch.nn.Module):
    """Wraps an attention module, which then gets the whole sequence of some heads.

    Args:
        local_attention: Called with ``[S, b, n / P, d]`` queries, keys, values and what else
            ``forward`` gets; returns ``[S, b, n / P * d]`` or ``[S, b, n / P, d]``.
        sequence_process_group: Ranks that share the sequence.
        scatter_idx: Dimension of heads: 2.
        gather_idx: Dimension of the sequence: 0.
        gather_size_calculator: For lengths that do not divide.

    Raises:
        ConfigError: Other dimensions.
    """

    def __init__(
        self,
        local_attention: Any,
        sequence_process_group: dist.ProcessGroup,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        gather_size_calculator: GatherSizeCalculator | None = None,
    ) -> None:
        super().__init__()
        if (scatter_idx, gather_idx) != (2, 0):
            raise ConfigError(
                f"UlyssesContextAttention: scatter_idx {scatter_idx} and gather_idx {gather_idx} "
                "must be 2 and 0: tensors are [s, b, n, d]"
            )
        self.local_attn, self.spg = local_attention, sequence_process_group
        self.gather_size_calculator = gather_size_calculator or DefaultGatherSizeCalculator()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend. Collective.

        Query, key and value are ``[s, b, n, d]`` of this rank, fp32, bf16 or fp16; the result is
        ``[s, b, n * d_v]`` in the dtype of the query.
        """
        rows, samples, heads = query.shape[:3]
        lengths = self._lengths(rows, self.gather_size_calculator.calculate(*args, **kwargs))
        layout = contiguous_parts(lengths, samples).sharding
        split = HeadAllToAll(layout, dist.get_rank(self.spg), self.spg)
        q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        q, k, v = (x.unflatten(0, (samples, -1)).transpose(0, 1) for x in split.to_heads(q, k, v))
        out = self.local_attn(q, k, v, *args, **kwargs)
        out = out.reshape(*q.shape[:3], -1).transpose(0, 1).flatten(0, 1)
        return (
            split.to_sequence(out, heads).unflatten(0, (samples, rows)).transpose(0, 1).flatten(2)
        )

    def _lengths(self, rows: int, total: int | None) -> list[int]:
        size = dist.get_world_size(self.spg)
        if total is None or total == rows * size:
            return [rows] * size
        lengths: list[Any] = [None] * size
        dist.all_gather_object(lengths, rows, group=self.spg)
        if sum(lengths) != total:
            raise ConfigError(f"ulysses: ranks have {lengths} tokens, the mask has {total}")
        return lengths


def ulyssesattn_context_parallel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_para: Mapping[str, Any],
    ulysses_comm_para: Mapping[str, Any],
) -> torch.Tensor:
    """Attend after an all-to-all from sequence to head shards. Collective.

    Args:
        query: ``[s, b, n, d]``: rank r has the r-th part of the sequence; any floating dtype.
        key: ``[s, b, groups, d]``.
        value: ``[s, b, groups, d_v]``.
        attn_para: ``scale``, ``keep_prob``, ``attention_mask`` (True is hidden), ``sparse_mode``
            (0: the mask, or none; 2, 3: causal; 4: ``pre_tokens`` and ``next_tokens``).
        ulysses_comm_para: ``spg``, the ranks that share the sequence, and ``cache_policy``.

    Returns:
        ``[s, b, n * d_v]`` in the dtype of the query.

    Raises:
        ConfigError: The mode is unknown.
    """
    group = ulysses_comm_para["spg"]
    rows, samples = query.shape[:2]
    batch = contiguous_parts([rows] * group.size(), samples)
    one = _mask(attn_para, batch.size, group)
    return attend(
        query, key, value, group,
        Strategy("ulysses", cache=ulysses_comm_para.get("cache_policy")),
        scale=attn_para.get("scale") or query.shape[-1] ** -0.5,
        mask=Mask.batch([one] * samples),
        packed=batch,
        dropout=1 - attn_para.get("keep_prob", 1.0),
    )  # fmt: skip


def _mask(attn_para: Mapping[str, Any], size: int, group: dist.ProcessGroup) -> Mask:
    mode = attn_para.get("sparse_mode", 0)
    if mode in _CAUSAL:
        return Mask.causal(size)
    if mode == _BAND:
        window = attn_para.get("pre_tokens", size), attn_para.get("next_tokens", 0)
        return Mask.documents((0, size), causal=False, window=window)
    if mode != 0:
        raise ConfigError(f"sparse_mode {mode}: with flash attention use 0, 2, 3 or 4")
    return whole_mask(attn_para.get("attention_mask"), size, False, group)
