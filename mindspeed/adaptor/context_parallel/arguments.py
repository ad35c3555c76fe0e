"""The original's arguments as those of :func:`mindspeed.te.context_parallel.attend`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.attention import Mask, SequenceSharding
from mindspeed.attention.packed_batch import PackedBatch
from mindspeed.attention.strategy import Strategy
from mindspeed.attention.user_mask import as_mask
from mindspeed.errors import ConfigError
from mindspeed.te.attention import Documents
from mindspeed.te.context_parallel import attend, attend_thd

KEYS = frozenset(
    {
        "causal",
        "cp_group",
        "cp_size",
        "rank",
        "cp_global_ranks",
        "cp_group_for_send_recv_overlap",
        "cp_inner_ranks",
        "cp_outer_ranks",
        "cp_dkv_outer_ranks",
        "cp_group_for_intra_window",
        "cp_group_for_intra_window_send_recv_overlap",
        "pse",
        "pse_type",
        "cache_policy",
        "scheduling_info",
        "megatron_cp_in_bnsd",
    }
)
"""What ``cp_para`` may hold. Groups and ranks beyond ``cp_group`` follow from it."""

_SLOPES = 2


def check_keys(cp_para: Mapping[str, Any]) -> None:
    """Refuse what would be ignored.

    Raises:
        ConfigError: Names the unknown keys.
    """
    if unknown := sorted(cp_para.keys() - KEYS):
        raise ConfigError(f"cp_para: unknown keys {', '.join(unknown)}; there are {sorted(KEYS)}")


def attend_flat(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    n: int,
    cp_para: Mapping[str, Any],
    strategy: Strategy,
    *,
    softmax_scale: float | None,
    attn_mask: Any,
    dropout_p: float,
    packed_seq_params: Any = None,
    lengths: Sequence[int] | None = None,
    zigzag: bool,
) -> torch.Tensor:
    """Attend; the result is ``[s, b, n * d_v]`` in the dtype of q.

    Args:
        q: Queries ``[s, b, n * d]``, fp32, bf16 or fp16; k and v have its dtype.
        k: Keys ``[s, b, groups * d]``.
        v: Values ``[s, b, groups * d_v]``.
        n: Query heads.
        cp_para: The original's dictionary.
        strategy: The algorithm.
        softmax_scale: Factor on the scores; default ``1 / sqrt(d)``.
        attn_mask: True is hidden: ``[S, S]``, or this rank's queries, a list of tiles by key rank;
            None for the rule of ``cp_para["causal"]``.
        dropout_p: Probability of dropping a probability.
        packed_seq_params: ``cu_seqlens_q`` with or without a leading 0.
        lengths: Tokens of each rank where they differ.
        zigzag: Ranks own the two chunks of a causal ring; otherwise contiguous parts.
    """
    check_keys(cp_para)
    group, causal = cp_para["cp_group"], cp_para.get("causal", True)
    head = q.shape[-1] // n
    groups = k.shape[-1] // head
    rows, samples = q.shape[:2]
    heads = (q.unflatten(-1, (n, -1)), k.unflatten(-1, (groups, -1)), v.unflatten(-1, (groups, -1)))
    options: dict[str, Any] = {
        "scale": head**-0.5 if softmax_scale is None else softmax_scale,
        "dropout": dropout_p,
        "slopes": _slopes(cp_para),
    }
    strategy = replace(strategy, cache=cp_para.get("cache_policy"))
    cu_seqlens = _cu_seqlens(packed_seq_params, rows * samples, group.size())
    if zigzag and cu_seqlens is not None:
        documents = Documents(cu_seqlens, cu_seqlens)
        q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in heads)
        options |= {"causal": True, "window": None}
        out = attend_thd(q, k, v, documents, group, strategy, **options)
        return out.unflatten(0, (samples, rows)).transpose(0, 1)
    if zigzag:
        return attend(*heads, group, strategy, causal=True, **options)
    batch = contiguous_parts(lengths or [rows] * group.size(), samples)
    if cu_seqlens is not None:
        mask = Mask.documents(tuple(cu_seqlens.tolist()))
    else:
        one = whole_mask(attn_mask, batch.size, causal, group)
        mask = Mask.batch([one] * samples)
    return attend(*heads, group, strategy, mask=mask, packed=batch, **options)


def contiguous_parts(lengths: Sequence[int], samples: int) -> PackedBatch:
    """Every sample sharded into consecutive parts of these lengths."""
    ends = [0, *itertools.accumulate(lengths)]
    size = ends[-1]
    own = tuple(
        tuple((a + n * size, b + n * size) for n in range(samples))
        for a, b in itertools.pairwise(ends)
    )
    samples_end = tuple(range(0, (samples + 1) * size, size))
    return PackedBatch(
        samples_end, samples, size, SequenceSharding(own), torch.empty(0, dtype=torch.int64)
    )


def whole_mask(given: Any, size: int, causal: bool, group: dist.ProcessGroup) -> Mask:
    """The mask of a sample. Collective where every rank has the rows of its queries."""
    if given is None or (causal and isinstance(given, torch.Tensor) and given.shape[-1] != size):
        # The original's compressed causal mask is 2048 x 2048 for any size.
        return Mask.causal(size) if causal else Mask.full(size)
    if isinstance(given, Sequence):
        mine = torch.cat([tile.reshape(tile.shape[-2:]) for tile in given], -1).to(torch.uint8)
        rows: list[Any] = [None] * group.size()
        dist.all_gather_object(rows, mine.cpu(), group=group)
        given = torch.cat(rows).bool()
    return as_mask(given.reshape(given.shape[-2:]).bool(), size)


def _slopes(cp_para: Mapping[str, Any]) -> torch.Tensor | None:
    pse, kind = cp_para.get("pse"), cp_para.get("pse_type")
    if pse is None:
        return None
    if kind != _SLOPES:
        raise ConfigError(
            f"cp_para: pse_type {kind} makes a bias of the whole sequence, which is split; use 2 "
            "with the slopes of ALiBi"
        )
    return pse.float().flatten()  # type: ignore[no-any-return]


def _cu_seqlens(packed: Any, rows: int, ranks: int) -> torch.Tensor | None:
    """int64 ``cu_seqlens`` over all ranks, from 0; None without documents."""
    if packed is None or packed.cu_seqlens_q is None:
        return None
    cu_seqlens = torch.as_tensor(packed.cu_seqlens_q, dtype=torch.int64).cpu()
    if not len(cu_seqlens) or cu_seqlens[0] != 0:
        cu_seqlens = torch.cat([cu_seqlens.new_zeros(1), cu_seqlens])
    total = int(cu_seqlens[-1])
    if total not in (rows, rows * ranks):
        raise ConfigError(f"cu_seqlens_q ends at {total}; {ranks} ranks have {rows} rows each")
    return cu_seqlens if total == rows * ranks else cu_seqlens * ranks
