"""A and B as they are drawn, before a weight of the base model is known.

Each matrix is drawn unsharded, seeded by its name, and a rank keeps its slice: values do not depend
on how the model is sharded. What depends on the base: :mod:`mindspeed.lora.initial`.
"""

from __future__ import annotations

import math
import zlib

import torch

from mindspeed.lora.config import EMBEDDING
from mindspeed.lora.linear import AdaptedLinear, AdaptedWeight, AdapterOptions


@torch.no_grad()
def draw(name: str, layer: AdaptedLinear) -> None:
    """Draw the A and B that do not depend on the base; those that do are zero.

    Args:
        name: Of the layer in the whole model.
    """
    config = layer._lora.config
    for entry in layer.adapted_weights(name):
        for b in entry.b.values():
            torch.nn.init.zeros_(b)
        for part, a in entry.a.items():
            seed = seed_of(layer, entry, part)
            generator = torch.Generator().manual_seed(seed)
            whole = torch.empty(a.shape[0], a.shape[1] * ranks_of(layer._lora, "row"))
            if name == EMBEDDING:
                whole.normal_(generator=generator)
            elif config.from_base:
                whole.zero_()
            elif config.init == "orthogonal":
                whole = _orthogonal(layer._lora, entry, part, whole, generator)
            elif config.init == "gaussian":
                whole.normal_(std=1 / a.shape[0], generator=generator)
            else:
                bound = 1 / math.sqrt(whole.shape[1])
                whole.uniform_(-bound, bound, generator=generator)
            a.copy_(slice_of(layer._lora, whole, "row", 1))
    for magnitudes in getattr(layer, "lora_magnitude", {}).values():
        torch.nn.init.ones_(magnitudes)
    for bias in getattr(layer, "lora_bias", {}).values():
        torch.nn.init.zeros_(bias)


def _orthogonal(
    options: AdapterOptions,
    entry: AdaptedWeight,
    part: str,
    whole: torch.Tensor,
    generator: torch.Generator,
) -> torch.Tensor:
    """A, and B in place, whose rows and columns are combined by halves of an orthogonal matrix."""
    r = whole.shape[0]
    turn, _ = torch.linalg.qr(torch.randn(r, r, generator=generator))
    a = torch.randn(whole.shape[1], r // 2, generator=generator).mm(turn[0::2]).t() / 10
    for b in ({part: entry.b[part]} if part in entry.b else dict(entry.b)).values():
        count = b.shape[0] * ranks_of(options, "column")
        matrix = torch.randn(count, r // 2, generator=generator).mm(turn[1::2]) / 10
        b.copy_(slice_of(options, matrix, "column", 0))
    return a


def seed_of(layer: AdaptedLinear, entry: AdaptedWeight, part: str) -> int:
    """The seed of the matrices of one part of a weight."""
    return layer._lora.config.seed + zlib.crc32(f"{entry.name}.{part}".encode())


def ranks_of(options: AdapterOptions, mode: str) -> int:
    """Among how many ranks a matrix that is sharded in layers of ``mode`` is divided."""
    return options.shard.size if options.shard.mode == mode else 1


def slice_of(options: AdapterOptions, whole: torch.Tensor, mode: str, dim: int) -> torch.Tensor:
    """This rank's slice of a whole matrix.

    Args:
        options: Of the layer.
        whole: Any shape, any dtype.
        mode: The layers in which such a matrix is sharded, ``row`` for A and ``column`` for B.
        dim: Along which.
    """
    split = ranks_of(options, mode)
    return whole.chunk(split, dim)[options.shard.rank if split > 1 else 0]
