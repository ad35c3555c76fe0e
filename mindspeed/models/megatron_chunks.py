"""Attention of Llama 4: chunks in layers with positions, a temperature in those without.

============================  ===============================================================
``--attention-chunk-size``    a token sees its own chunk of the sequence; layers with positions
``--nope-temperature``        queries times 1 + T log(1 + (position + 1) // floor); the others
============================  ===============================================================

A sequence that fits into a chunk, or stays below the floor, is computed as ever. Source: the class
of Llama 4 in transformers; arXiv 2501.19399 for the temperature.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mindspeed.errors import ConfigError


def problems(args: argparse.Namespace) -> Iterator[str]:
    """Flags without effect, and sequences that ranks share."""
    chunk, temperature = args.attention_chunk_size, args.nope_temperature
    shared = args.context_parallel_size > 1
    if temperature and not args.no_rope_freq:
        yield "--nope-temperature counts in layers without positions: give --no-rope-freq"
    if shared and chunk and args.seq_length > chunk:
        yield (
            f"--attention-chunk-size {chunk}: ranks of --context-parallel-size "
            f"{args.context_parallel_size} cannot share a sequence of more than one chunk; take "
            f"--seq-length {chunk} at most, or --context-parallel-size 1"
        )
    elif shared and temperature and args.seq_length >= args.nope_temperature_floor:
        yield (
            f"--nope-temperature with --context-parallel-size {args.context_parallel_size}: "
            f"allowed is --seq-length below --nope-temperature-floor {args.nope_temperature_floor}"
        )


@functools.cache
def with_chunks(attention: type) -> type:
    """A core attention that knows chunks and a temperature; they are set on the built module."""

    class ChunkedAttention(attention):  # type: ignore[misc]
        """Core attention within chunks of the sequence, or with scaled queries."""

        chunk: int | None = None
        temperature: tuple[float, int] | None = None

        def forward(
            self, query: Tensor, key: Tensor, value: Tensor, mask: Any, *args: Any, **kwargs: Any
        ) -> Any:
            forward = functools.partial(super().forward, **kwargs)
            first, end = key.shape[0] - query.shape[0], key.shape[0]
            chunk = self.chunk or end
            limit = self.temperature[1] - 1 if self.temperature else chunk
            if kwargs.get("packed_seq_params") is not None and end > limit:
                raise ConfigError(
                    f"documents packed into {end} tokens: this model's attention counts positions "
                    f"of a document beyond {limit}; take --seq-length {limit} at most, or do not "
                    "pack"
                )
            if self.temperature is not None:
                scales = temperatures(*self.temperature, first, end, query.device)
                query = (query * scales).to(query.dtype)
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


def temperatures(strength: float, floor: int, first: int, end: int, device: torch.device) -> Tensor:
    """Factors of the queries at positions ``first`` to ``end``, fp32 ``[s, 1, 1, 1]``."""
    positions = torch.arange(first, end, dtype=torch.float32, device=device)
    scales = 1.0 + strength * torch.log1p(torch.floor((positions + 1.0) / floor))
    return scales.view(-1, 1, 1, 1)


def set_chunks(args: argparse.Namespace, model: Any) -> None:
    """Tell each layer of a built stage whether it has chunks or a temperature.

    Layers without positions have no ``--qk-l2-norm`` either.
    """
    lacking = model.config.no_rope_freq or [0] * args.num_layers
    for layer in model.decoder.layers:
        attention = layer.self_attention
        core = attention.core_attention
        if not lacking[layer.layer_number - 1]:
            core.chunk = args.attention_chunk_size
        else:
            if args.nope_temperature:
                core.temperature = (args.nope_temperature, args.nope_temperature_floor)
            if args.qk_l2_norm:
                attention.q_layernorm = attention.k_layernorm = None
