"""``group_list`` of grouped operators: sizes of groups of rows, or their cumulative sums."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from numbers import Integral
from typing import TypeGuard

import torch

from mindspeed.ops._check import Check


def cumulative(
    check: Check,
    argument: str,
    groups: torch.Tensor | Sequence[int] | None,
    x: torch.Tensor,
    *,
    sizes: bool = False,
) -> torch.Tensor:
    """Return the cumulative group sizes, ``[E]`` int64 on the device of ``x``.

    Args:
        check: checks of the calling function.
        argument: name of ``groups`` there.
        groups: sizes or cumulative sums, a list of numbers or an int64 tensor.
        x: ``[T, ...]``, the rows that are grouped.
        sizes: ``groups`` holds sizes.

    Raises:
        OperatorError: nothing given; wrong dtype or device; values (checked where reading them is
        free)
            that decrease, are negative or do not end at T.
    """
    if not isinstance(groups, torch.Tensor):
        if not _is_list_of_integers(groups):
            what = f"a group for each of the {x.shape[0]} rows, an int64 tensor or a list"
            check.fail(argument, what, groups)
        groups = torch.tensor(groups, dtype=torch.int64).to(x.device)
    check.dtype((torch.int64,), **{argument: groups})
    check.rank(1, **{argument: groups})
    check.require(groups.numel() > 0, argument, "at least one group", groups)
    check.require(
        groups.device == x.device, argument, f"the device of the rows, {x.device}", groups.device
    )
    ends = groups.cumsum(0) if sizes else groups
    if check.values_known(groups):
        given, rows = groups.tolist(), x.shape[0]
        if sizes:
            fits = min(given) >= 0 and sum(given) == rows
            check.require(fits, argument, f"sizes that add up to the {rows} rows", given)
        else:
            fits = given[-1] == rows and given == sorted(given) and given[0] >= 0
            check.require(fits, argument, f"sums that never decrease and end at {rows}", given)
    return ends


def _is_list_of_integers(groups: object) -> TypeGuard[Sequence[int]]:
    kinds = (Integral, torch.SymInt)
    return isinstance(groups, (list, tuple)) and all(isinstance(n, kinds) for n in groups)


def sample_ends(sizes: Sequence[int]) -> torch.Tensor:
    """Cumulative sums of ``sizes``, int64 ``[E]`` on the CPU, for the samples of an operator."""
    return torch.tensor(list(accumulate(sizes)), dtype=torch.int64)
