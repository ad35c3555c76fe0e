"""Checks of features that overlap a product with its collective, and what they attach."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mindspeed.features.feature import Megatron, Problem

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams
    from mindspeed.tensor_parallel.products import OverlappedProducts
    from mindspeed.tensor_parallel.strategy import Overlap

STRICT = "MINDSPEED_STRICT_FUSION"
READ_WEIGHTS = {"base_weights": "a product in parts reads a weight that is whole"}
"""What a feature that multiplies with weights by itself excludes."""


def strict() -> bool:
    """Whether a fused kernel that cannot run is an error."""
    return os.environ.get(STRICT, "0") == "1"


def common_problems(flag: str, megatron: Megatron) -> Iterator[Problem]:
    """Find options without which these features have no effect.

    A framework that calls ``mindspeed.configure`` may leave sharding undefined, which is no error.
    """
    from mindspeed import device, te

    if megatron.get("tensor_model_parallel_size", 2) == 1:
        yield Problem(
            flag,
            "--tensor-model-parallel-size is 1, so linear layers do not communicate",
            "remove it, or use more tensor-parallel ranks",
        )
    if megatron.get("fp8") or megatron.get("fp4"):
        yield Problem(
            flag,
            "products in fp8 and fp4 (--fp8-format, --fp4-format) run between plain collectives",
            "remove one",
        )
    local = megatron.get("transformer_impl") == "local"
    if not local and te.choose(device.current().name)[0] == "native":
        yield Problem(
            flag,
            "the linear layers of a native Transformer Engine communicate by themselves",
            "use --tp-comm-overlap instead, or MINDSPEED_TE=substitute, or --transformer-impl "
            "local",
        )


def fused_overlap() -> Overlap:
    """Select fused kernels for the products that gather or scatter."""
    from mindspeed.tensor_parallel.strategy import Overlap

    return Overlap(fused=True, operations=("gather_matmul", "matmul_scatter"), strict=strict())


def sequence_parallel_problem(flag: str, does: str, megatron: Megatron) -> Iterator[Problem]:
    """Find missing sequence parallelism, without which :func:`fused_overlap` has no effect.

    Args:
        flag: the flag that the user set.
        does: its effect on gathering and scattering, for messages.
    """
    if not megatron.get("sequence_parallel", True):
        yield Problem(
            flag,
            f"{does} gathering and scattering, which only --sequence-parallel has",
            "add --sequence-parallel",
        )


def rows_of_a_micro_batch(megatron: Megatron) -> int | None:
    """Rows ``s b`` of every product with a collective; None where they are unknown."""
    lengths_vary = megatron.get("variable_seq_lengths") or megatron.get("sft")
    length, samples = megatron.get("seq_length"), megatron.get("micro_batch_size")
    if lengths_vary or not length or not samples:
        return None
    return int(length) // (megatron.get("context_parallel_size") or 1) * int(samples)


def rows_problem(flag: str, m: int, parts: int, megatron: Megatron, fix: str) -> Iterator[Problem]:
    """Find rows per rank that are not a multiple of the number of parts.

    Args:
        flag: the flag that the user set.
        m: rows ``s b`` of the product.
        parts: the number that the user chose.
        fix: the change to make, with a placeholder for possible numbers.
    """
    from mindspeed.tensor_parallel.strategy import valid_parts

    ranks = megatron.get("tensor_model_parallel_size") or 1
    shared = ranks if megatron.get("sequence_parallel") else 1
    if m % (parts * shared):
        per_rank = f"{m} rows / {ranks} ranks with --sequence-parallel" if shared > 1 else "rows"
        possible = ", ".join(map(str, valid_parts(m // shared))) if m % shared == 0 else "none"
        yield Problem(
            flag,
            f"{m // shared} rows ({per_rank}) cannot be divided into {parts} parts; possible: "
            f"{possible}",
            fix,
        )


def attach_products(seams: Seams, owner: str, overlap: Overlap) -> OverlappedProducts:
    """Replace the products of ``te`` by overlapped ones; returns these.

    Args:
        owner: name of the feature.
        overlap: the selected overlap.
    """
    from mindspeed.te import kernels
    from mindspeed.tensor_parallel.products import OverlappedProducts

    plain: dict[str, Any] = {name: getattr(kernels, name) for name in overlap.operations}
    products = OverlappedProducts(overlap, plain)
    seams.use_kernels(owner=owner, **products.kernels())
    return products
