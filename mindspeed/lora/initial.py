"""What an adapter begins as: ``--lora-init``, and the lengths of DoRA.

    kaiming, gaussian   A uniform or normal, B = 0: the model is the base model
    orthogonal          A and B of random numbers, their product nearly 0
    pissa               s B A is the best approximation of W of rank r, by its singular values
    pissa_niter_N       the same by N iterations of a randomised decomposition
    olora               B and A are the first r columns of Q and rows of R of W = Q R

The last three are taken out of the weight, ``W - s B0 A0``, so that the model is the base model
when training begins (arXiv 2404.02948, 2406.01775). What they began as is kept with the adapter:
base and adapter alone would be another model. Another program gets an adapter of twice the rank,
``[A; A0]`` and ``[B, -B0]``, of the base model as it is.

Each matrix is drawn, or decomposed, unsharded and seeded by its name, and a rank keeps its slice:
values do not depend on how the model is sharded. Decomposing gathers one weight at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from mindspeed.built_model import unwrap
from mindspeed.lora.attach import adapted_layers
from mindspeed.lora.config import WHOLE
from mindspeed.lora.drawing import ranks_of, seed_of, slice_of
from mindspeed.lora.linear import AdaptedLinear, AdaptedWeight, AdapterOptions
from mindspeed.lora.state import remember_base
from mindspeed.te import comm
from mindspeed.te.quantized_weight import dense


@torch.no_grad()
def begin(chunks: Iterable[Any]) -> None:
    """Let new adapters begin where the base model's weights, loaded by now, say. Collective."""
    for chunk in unwrap(chunks):
        for name, layer in adapted_layers(chunk):
            options = layer._lora
            if options.config.from_base:
                for entry in layer.adapted_weights(name):
                    _decompose(layer, entry)
        take_out(chunk)
        for name, layer in adapted_layers(chunk):
            if layer._lora.config.use_dora:
                _measure(name, layer)


@torch.no_grad()
def take_out(chunk: Any) -> None:
    """Take what the adapters of a stage began as out of its weights; they have it in A and B."""
    layers = [(n, one) for n, one in adapted_layers(chunk) if one._lora.config.from_base]
    if layers:
        remember_base(chunk)
    for name, layer in layers:
        for entry in layer.adapted_weights(name):
            assert entry.initial is not None
            entry.weight.copy_(entry.weight.float() - layer.delta(*entry.initial))


def _decompose(layer: AdaptedLinear, entry: AdaptedWeight) -> None:
    """A and B of the parts of a weight, as factors of it."""
    options = layer._lora
    rows = options.unordered(entry.weight.float())
    parts = dict(zip(options.parts, rows.split(tuple(options.parts.values())), strict=True))
    if WHOLE in entry.a:
        parts = {WHOLE: rows}
    assert entry.initial is not None
    for part, a in entry.a.items():
        whole = _gathered(options, parts[part], entry.b)
        seed = seed_of(layer, entry, part)
        scale = options.scale * options.ratios.get(part, 1.0)
        factor_a, factor_b = _factors(whole, a.shape[0], scale, options.config.init, seed)
        own = {part: entry.b[part]} if part in entry.b else dict(entry.b)
        a.copy_(slice_of(options, factor_a, "row", 1))
        start = 0
        for name, b in own.items():
            count = b.shape[0] * ranks_of(options, "column")
            b.copy_(slice_of(options, factor_b[start : start + count], "column", 0))
            entry.initial[1][name].copy_(b)
            start += count
        entry.initial[0][part].copy_(a)


def _factors(
    weight: torch.Tensor, r: int, scale: float, init: str, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A ``[r, in]`` and B ``[out, r]`` of a whole weight ``[out, in]``, fp32."""
    if init == "olora":
        q, triangle = torch.linalg.qr(weight)
        return triangle[:r].contiguous(), q[:, :r].contiguous()
    if "_niter_" in init:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            iterations = int(init.rpartition("_")[2])
            left, values, right = torch.svd_lowrank(weight, r, niter=iterations)
            right = right.t()
    else:
        left, values, right = torch.linalg.svd(weight, full_matrices=False)
    root = (values[:r] / scale).sqrt()
    return root[:, None] * right[:r], left[:, :r] * root


def _measure(name: str, layer: AdaptedLinear) -> None:
    """The lengths that the rows of a weight have with its adapter."""
    options = layer._lora
    for entry in layer.adapted_weights(name):
        merged = dense(entry.weight, torch.float32) + layer.delta(entry.a, entry.b)
        rows = options.unordered(options.lengths(merged))
        slices = zip(options.parts, rows.split(tuple(options.parts.values())), strict=True)
        for part, lengths in slices:
            if part in layer.lora_magnitude:
                layer.lora_magnitude[part].copy_(lengths)


def _gathered(options: AdapterOptions, rows: torch.Tensor, b: Any) -> torch.Tensor:
    """A part of a weight, fp32, from the shards of all ranks.

    A whole layer's parts are gathered one by one: each B holds the rows of its part alone.
    """
    shard = options.shard
    if shard.mode is None or shard.size == 1:
        return rows
    if shard.mode == "row":
        columns = comm.all_gather_first_dim(rows.t().contiguous(), shard.group)[0]
        return columns.t().contiguous()
    counts = [one.shape[0] for one in b.values()]
    blocks = rows.split(counts) if sum(counts) == rows.shape[0] else (rows,)
    return torch.cat(
        [comm.all_gather_first_dim(one.contiguous(), shard.group)[0] for one in blocks]
    )
