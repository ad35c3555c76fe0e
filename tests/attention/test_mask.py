"""Masks as banded rectangles, against the dense mask."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from mindspeed.attention import Mask, Region
from mindspeed.attention.mask import INF
from mindspeed.errors import ConfigError

limits = st.one_of(st.integers(-12, 12), st.just(INF))


def dense(region: Region, size: int = 12) -> torch.Tensor:
    return Mask(size, (region,)).dense()


@given(
    ranges=st.tuples(*[st.integers(0, 12)] * 4),
    band=st.tuples(limits, limits),
    window=st.tuples(*[st.integers(0, 12)] * 4),
)
@settings(max_examples=300, deadline=None)
def test_a_region_is_counted_and_cropped_as_the_dense_one(ranges, band, window) -> None:
    q0, q1, k0, k1 = (*sorted(ranges[:2]), *sorted(ranges[2:]))
    region = Region(q0, q1, k0, k1, -band[0], band[1])
    keep = dense(region)
    assert region.area() == int(keep.sum())
    a, b, c, d = (*sorted(window[:2]), *sorted(window[2:]))
    inside = torch.zeros_like(keep)
    inside[a:b, c:d] = keep[a:b, c:d]
    part = region.crop(a, b, c, d)
    if part is None:
        assert not inside.any()
        return
    assert torch.equal(dense(part), inside)
    trimmed = inside[part.q0 : part.q1, part.k0 : part.k1]
    assert bool(trimmed.any(0).all()) and bool(trimmed.any(1).all())
    assert part.area() == int(inside.sum())


def blocks(*parts: torch.Tensor) -> torch.Tensor:
    return torch.block_diag(*parts).bool()


def test_documents_do_not_see_each_other_and_empty_ones_are_left_out() -> None:
    triangle = [torch.ones(n, n).tril() for n in (3, 1, 5)]
    mask = Mask.documents((0, 3, 3, 4, 9))
    assert torch.equal(mask.dense(), blocks(*triangle))
    assert mask.area() == 6 + 1 + 15 and len(mask.regions) == 3


def test_window_prefix_and_both_directions() -> None:
    ones = torch.ones(7, 7)
    assert torch.equal(Mask.causal(7, window=2).dense(), (ones.tril() - ones.tril(-3)).bool())
    two_sided = Mask.documents((0, 7), causal=False, window=(1, 2))
    assert torch.equal(two_sided.dense(), (ones.tril(2) - ones.tril(-2)).bool())
    prefix = ones.tril()
    prefix[:, :3] = 1
    assert torch.equal(Mask.documents((0, 7), prefix=3).dense(), prefix.bool())
    assert bool(Mask.full(4).dense().all())


def test_a_batch_is_one_sequence() -> None:
    mask = Mask.batch([Mask.causal(3), Mask.full(2)])
    assert torch.equal(mask.dense(), blocks(torch.ones(3, 3).tril(), torch.ones(2, 2)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mask.documents((0, 5, 3)), r"cu_seqlens must ascend from 0; given \[0, 5, 3\]"),
        (lambda: Mask.documents((1, 5)), "cu_seqlens must ascend from 0"),
        (lambda: Mask.causal(5, window=-1), "must not be negative"),
        (lambda: Mask.of_regions(4, [Region(0, 2, 0, 4)]), "mask row 2 has no visible key"),
        (
            lambda: Mask.of_regions(4, [Region(0, 4, 0, 4), Region(1, 2, 3, 4)]),
            r"share the pair \(query 1, key 3\)",
        ),
    ],
)
def test_wrong_masks_are_refused(make, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
