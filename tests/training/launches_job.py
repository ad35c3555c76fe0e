"""Launches of operators in a training step."""

from __future__ import annotations

from collections.abc import Sequence

from tests.features.fused_ranks import _Count
from tests.training.matrix_job import train


def launches(flags: Sequence[str]) -> dict[str, int]:
    """Train on this rank; calls of our operators for experts, by name."""
    with _Count() as count:
        train(flags)
    names = ("grouped_matmul", "grouped_outer", "groupmatmul_add", "matmul_add")
    return {name: count.ops[f"mindspeed::{name}"] for name in names}
