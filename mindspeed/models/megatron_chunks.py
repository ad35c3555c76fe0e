"""Attention of Llama 4: chunks in layers with positions, a temperature in those without.

============================  ===============================================================
``--attention-chunk-size``    a token sees its own chunk of the sequence; layers with positions
``--nope-temperature``        queries times 1 + T log(1 + (position + 1) // floor); the others
============================  ===============================================================

A sequence that fits into a chunk, or stays below the floor, is computed as ever; packed documents
count each from its own start. Source: the class
of Llama 4 in transformers; arXiv 2501.19399 for the temperature.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mindspeed.errors import ConfigError
from mindspeed.models.extra_flags import ModelExtras


def problems(
    extras: ModelExtras, no_rope_freq: int | Sequence[int] | None, seq_length: int, ranks: int
) -> Iterator[str]:
    """Flags without effect, and sequences that ``ranks`` context-parallel ranks share."""
    chunk, temperature = extras.attention_chunk_size, extras.nope_temperature
    if temperature and not no_rope_freq:
        yield "--nope-temperature counts in layers without positions: give --no-rope-freq"
    if ranks > 1 and chunk and seq_length > chunk:
        yield (
            f"--attention-chunk-size {chunk}: ranks of --context-parallel-size "
            f"{ranks} cannot share a sequence of more than one chunk; take "
            f"--seq-length {chunk} at most, or --context-parallel-size 1"
        )
    elif ranks > 1 and temperature and seq_length >= extras.nope_temperature_floor:
        yield (
            f"--nope-temperature with --context-parallel-size {ranks}: allowed is --seq-length "
            f"below --nope-temperature-floor {extras.nope_temperature_floor}"
        )


@functools.cache
def with_chunks(attention: type) -> type:
    """A core attention that knows chunks and a temperature; they are set on the built module."""

    class ChunkedAttention(attention):  # type: ignore[misc]
        """Core attention within chunks of the sequence, or with scaled queries."""

        chunk: int | None = None
        temperature: tuple[float, int] | None = None

        def forward(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            mask: Any,
            *args: Any,
            packed_seq_params: Any = None,
            **kwargs: Any,
        ) -> Any:
            if packed_seq_params is not None:
                where = (packed_seq_params, self.chunk, self.temperature)
                query, kwargs["packed_seq_params"] = _in_documents(query, *where)
                return super().forward(query, key, value, mask, *args, **kwargs)
            forward = functools.partial(super().forward, **kwargs)
            first, end = key.shape[0] - query.shape[0], key.shape[0]
            if self.temperature is not None:
                positions = torch.arange(first, end, device=query.device)
                query = _scaled(query, positions[:, None], *self.temperature)
            chunk = self.chunk or end
            if end <= chunk:
                return forward(query, key, value, mask, *args)
            parts = []
            for start in range(first - first % chunk, end, chunk):
                rows = slice(max(start - first, 0), start + chunk - first)
                keys = slice(start, start + chunk)
                seen = None if mask is None else mask[..., rows, keys]
                parts.append(forward(query[rows], key[keys], value[keys], seen, *args))
            return torch.cat(parts)

    return ChunkedAttention


def _in_documents(
    query: Tensor, params: Any, chunk: int | None, temperature: tuple[float, int] | None
) -> tuple[Tensor, Any]:
    """Queries scaled by their positions in documents, and documents cut into chunks.

    Raises:
        ConfigError: A document of padded ones is so long that its positions count.
    """
    packed = getattr(params, "packed", None)
    ends = packed.cu_seqlens if packed is not None else tuple(params.cu_seqlens_q.tolist())
    longest = max(end - start for start, end in itertools.pairwise(ends))
    scaled = temperature is not None and longest >= temperature[1]
    if not scaled and longest <= (chunk or longest):
        return query, params
    if packed is None and params.cu_seqlens_q_padded is not None:
        raise ConfigError(
            f"a document of {longest} tokens, padded: this model's attention counts positions from "
            f"{chunk or temperature} on; pack documents without padding"
        )
    if scaled and temperature is not None:
        lengths = [end - start for start, end in itertools.pairwise(ends)]
        positions = torch.cat([torch.arange(n, device=query.device) for n in lengths])
        if packed is not None:
            positions = positions.view(packed.samples, -1).t()
        query = _scaled(query, positions, *temperature)
    if chunk and longest > chunk:
        starts = {at for a, b in itertools.pairwise(ends) for at in range(a, b, chunk)}
        parts = tuple(sorted({*ends, *starts}))
        params = copy.copy(params)
        cumulative = torch.tensor(parts, dtype=torch.int32, device=query.device)
        params.cu_seqlens_q = params.cu_seqlens_kv = cumulative
        params.max_seqlen_q = params.max_seqlen_kv = chunk
        if packed is not None:
            params.packed = replace(packed, cu_seqlens=parts)
    return query, params


def _scaled(query: Tensor, positions: Tensor, strength: float, floor: int) -> Tensor:
    """Queries ``[..., h, d]`` times the factors of their positions, ``[...]`` or ``[..., 1]``."""
    scales = 1.0 + strength * torch.log1p(torch.floor((positions.float() + 1.0) / floor))
    return (query * scales[..., None, None]).to(query.dtype)


def set_chunks(extras: ModelExtras, model: Any, qk_l2_norm: bool) -> None:
    """Tell each layer of a built stage whether it has chunks or a temperature.

    Layers without positions have no ``--qk-l2-norm`` either.
    """
    lacking = model.config.no_rope_freq or [0] * model.config.num_layers
    for layer in model.decoder.layers:
        attention = layer.self_attention
        core = attention.core_attention
        if not lacking[layer.layer_number - 1]:
            core.chunk = extras.attention_chunk_size
        else:
            if extras.nope_temperature:
                core.temperature = (extras.nope_temperature, extras.nope_temperature_floor)
            if qk_l2_norm:
                attention.q_layernorm = attention.k_layernorm = None
