"""The last micro-batch that this thread has sharded: the original's functions that scripts call.

    generate_actual_seq_len(batch)              # or set_actual_seq_len([5, 12, 16])
    batch = get_batch_on_this_cp_rank(batch)
    loss = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])

In the original every layer calls these functions in its forward pass, so a layer recomputed during
another micro-batch reads the wrong documents. Here they only hold the micro-batch until
``GPTModel.forward`` begins, which passes it to the layers as an argument
(:mod:`mindspeed.adaptor.packed_documents`). :mod:`mindspeed.session.original_features` completes
them with ``get_batch_on_this_cp_rank``, which has to know whether a feature handles documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch

from mindspeed.adaptor import micro_batch
from mindspeed.attention.megatron import PlanPackedSeqParams
from mindspeed.attention.packed_batch import (
    CuSeqlens,
    cu_seqlens_of_samples,
    cu_seqlens_of_starts,
    shard,
)
from mindspeed.errors import ConfigError


@dataclass(frozen=True)
class _MicroBatch:
    ends: tuple[int, ...] | None = None
    params: PlanPackedSeqParams | None = None  # once it is sharded
    positions: torch.Tensor | None = None  # [tokens, 1], until then


_CURRENT: ContextVar[_MicroBatch] = ContextVar("micro-batch", default=_MicroBatch())  # noqa: B039


def set_actual_seq_len(actual_seq_len: Sequence[int] | torch.Tensor | None) -> None:
    """Set where the documents of the next micro-batch end.

    Args:
        actual_seq_len: Cumulative lengths over concatenated samples, with or without a leading
            0, as a sequence or an integer tensor ``[documents]``; None if every sample is one
            document.

    Raises:
        ConfigError: They do not increase.
    """
    if actual_seq_len is None:
        _CURRENT.set(_MicroBatch())
        return
    ends = tuple(map(int, actual_seq_len))
    if ends[:1] == (0,):
        ends = ends[1:]
    if not ends or any(end <= start for start, end in zip((0, *ends), ends, strict=False)):
        raise ConfigError(f"actual_seq_len {list(ends)}: ends of documents must grow")
    _CURRENT.set(_MicroBatch(ends))


def get_actual_seq_len() -> list[int] | None:
    """Ends of the documents of the current micro-batch, without a leading 0."""
    ends = _CURRENT.get().ends
    return None if ends is None else list(ends)


def generate_actual_seq_len(batch: Mapping[str, Any]) -> None:
    """:func:`set_actual_seq_len`: a document begins where ``batch["position_ids"]`` is 0."""
    set_actual_seq_len(cu_seqlens_of_starts(batch["position_ids"].cpu() == 0))


def shard_current_batch(batch: dict[str, Any]) -> dict[str, Any]:
    """This context-parallel rank's part of a micro-batch with documents. No communication.

    Args:
        batch: ``[b, s]`` tensors by name, None for tensors this pipeline stage does not need.
            ``position_ids`` are kept; where they are None, positions restart at each document.

    Returns:
        ``[b, tokens of this rank]`` tensors, and no attention mask.

    Raises:
        ConfigError: Documents do not fit the batch.
    """
    from megatron.core import parallel_state

    ends = _CURRENT.get().ends
    tensors = {
        name: x for name, x in batch.items() if name not in ("attention_mask", "position_ids")
    }
    positions = batch.get("position_ids")
    shape = next((x.shape for x in (*tensors.values(), positions) if x is not None), None)
    if shape is None:
        raise ConfigError("get_batch_on_this_cp_rank: the batch has no tensor, so no known length")
    part, params = micro_batch.shard_batch(
        tensors, _cu_seqlens(ends, *shape), shape[0], reset_mask=True, reset_positions=True
    )
    packed = params.packed
    assert packed is not None
    if positions is not None:
        rank = parallel_state.get_context_parallel_rank()
        part["position_ids"] = shard(positions, packed, rank)
        params.packed = replace(packed, positions=part["position_ids"])
    _CURRENT.set(_MicroBatch(ends, params))
    return {**part, "attention_mask": None}


def _cu_seqlens(ends: tuple[int, ...] | None, samples: int, size: int) -> CuSeqlens:
    alone = cu_seqlens_of_samples(samples, size)
    if ends is None:
        return alone
    if ends[-1] != samples * size:
        raise ConfigError(
            f"actual_seq_len ends at {ends[-1]}; the batch has {samples} x {size} tokens"
        )
    return tuple(sorted({*alone, *ends}))


def get_position_ids() -> torch.Tensor | None:
    """Positions of the current micro-batch, int64 ``[tokens of this rank, b]``, or None."""
    current = _CURRENT.get()
    if current.params is None or current.params.packed is None:
        return current.positions
    return current.params.packed.positions.t()


def set_position_ids(position_ids: torch.Tensor) -> None:
    """Replace the positions of the current micro-batch.

    Before ``get_batch_on_this_cp_rank``, as verl does, which passes ``packed_seq_params`` itself,
    they can only be those that restart at each document of :func:`set_actual_seq_len`.

    Args:
        position_ids: integers ``[tokens of this rank, b]``; before, ``[all tokens, 1]``.

    Raises:
        ConfigError: They have another shape, or differ before the micro-batch is sharded.
    """
    current, given = _CURRENT.get(), list(position_ids.shape)
    if current.params is None or current.params.packed is None:
        if current.ends is None:
            raise ConfigError(f"set_position_ids of {given}: needs set_actual_seq_len first")
        lengths = (
            end - start for start, end in zip((0, *current.ends), current.ends, strict=False)
        )
        restarting = torch.cat([torch.arange(length) for length in lengths])
        if not torch.equal(position_ids.cpu().long(), restarting[:, None]):
            raise ConfigError(
                f"set_position_ids of {given}: before get_batch_on_this_cp_rank they restart at "
                f"the documents of set_actual_seq_len, and are [{len(restarting)}, 1]"
            )
        _CURRENT.set(replace(current, positions=position_ids))
        return
    if position_ids.shape != current.params.packed.positions.t().shape:
        wanted = list(current.params.packed.positions.t().shape)
        raise ConfigError(f"set_position_ids of {given}: needs {wanted}")
    packed = replace(current.params.packed, positions=position_ids.t())
    _CURRENT.set(replace(current, params=replace(current.params, packed=packed)))


def set_current_params(params: PlanPackedSeqParams) -> None:
    """Begin a micro-batch that is sharded already."""
    _CURRENT.set(_MicroBatch(params=params))


def current_params() -> PlanPackedSeqParams | None:
    """The ``packed_seq_params`` of ``GPTModel.forward`` for scripts that pass none."""
    return _CURRENT.get().params
