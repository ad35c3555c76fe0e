"""User-defined masks become regions with exactly the same pairs."""

from __future__ import annotations

import random

import pytest
import torch

from mindspeed.attention import Mask
from mindspeed.attention.user_mask import (
    LONG,
    as_mask,
    get_attention_mask,
    mask_of_batch,
    set_attention_mask,
)
from mindspeed.errors import ConfigError

REGULAR = {
    "causal": (Mask.causal(50), 1),
    "full": (Mask.full(20), 1),
    "window": (Mask.causal(50, 7), 1),
    "both-sides": (Mask.documents((0, 50), causal=False, window=(4, 3)), 1),
    "documents": (Mask.documents((0, 5, 20, 21, 40)), 4),
    "prefix": (Mask.documents((0, 20, 50), prefix=6), 4),
}


@pytest.fixture
def no_mask_left():
    yield
    set_attention_mask(None)


@pytest.mark.parametrize("name", REGULAR)
def test_a_regular_mask_becomes_few_regions(name):
    mask, regions = REGULAR[name]
    keep = mask.dense()
    found = as_mask(~keep, mask.size)
    assert torch.equal(found.dense(), keep)
    assert len(found.regions) == regions
    assert as_mask(lambda q, k: keep[q, k], mask.size) == found
    assert as_mask(mask, mask.size) is mask
    assert torch.equal(as_mask(list(mask.regions), mask.size).dense(), keep)


def test_any_mask_is_covered_once():
    for seed in range(100):
        size = random.Random(seed).randint(1, 40)
        generator = torch.Generator().manual_seed(seed)
        keep = torch.rand(size, size, generator=generator) < random.Random(-seed).random()
        keep |= torch.eye(size, dtype=torch.bool)
        found = as_mask(~keep, size)
        assert torch.equal(found.dense(), keep)
        assert found.area() == int(keep.sum())  # no pair twice


def test_intervals_of_keys():
    sinks = torch.tensor([[[0, 2], [max(i - 3, 2), i + 1]] for i in range(12)])
    found = as_mask(sinks, 12)
    i, j = torch.arange(12)[:, None], torch.arange(12)
    assert torch.equal(found.dense(), (j < 2) | ((j >= 2) & (j >= i - 3) & (j <= i)))


def test_no_quadratic_memory_is_held():
    """1 GiB as a bool tensor; a callable is looked at in strips."""
    found = as_mask(
        torch.stack([torch.zeros(LONG), torch.arange(1, LONG + 1)], -1).long()[:, None], LONG
    )
    assert found == Mask.causal(LONG)
    assert as_mask(lambda q, k: (k <= q) & (k > q - 100), 5000) == Mask.causal(5000, 99)


def blind(row: int, size: int = 6) -> torch.Tensor:
    hidden = torch.ones(size, size).triu(1).bool()
    hidden[row] = True
    return hidden


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (blind(3), "mask row 3 of sample 2 has no visible key"),
        (blind(3).float(), r"bool tensor \[s, s\], True is masked, got float32 of shape \(6, 6\)"),
        (blind(3)[None], r"got bool of shape \(1, 6, 6\)"),
        (torch.ones(6, 5).bool(), r"got bool of shape \(6, 5\)"),
        (blind(7, 8).triu(1), "of 8 positions, a sample has 6"),
        ([(0, 6, 0, 6, 0, 0), (3, 6, 2, 6, 0, 0)], "share the pair"),
        (torch.tensor([[[0, 3], [2, 5]]] * 6), "mask row 0: its intervals of keys overlap"),
        (torch.tensor([[[0, 7]]] * 6), "an interval leaves the keys 0 to 6"),
        (lambda q, k: (k <= q).float(), "the callable must return a bool tensor"),
        ("causal", "str is not one of regions"),
    ],
)
def test_invalid_masks_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        as_mask(given, 6, sample=2)


def test_a_ragged_mask_of_a_long_sequence_is_refused(monkeypatch):
    monkeypatch.setattr("mindspeed.attention.user_mask.LONG", 32)
    keep = torch.eye(40, dtype=torch.bool)
    keep[5, ::6] = True
    with pytest.raises(ConfigError, match=r"mask row 5 has 7 intervals of visible keys.* callable"):
        as_mask(~keep, 40)
    assert torch.equal(as_mask(lambda q, k: keep[q, k], 40).dense(), keep)


@pytest.mark.usefixtures("no_mask_left")
def test_the_mask_of_the_process():
    assert mask_of_batch(6, 2) is None
    hidden = torch.ones(6, 6).triu(1).bool()
    set_attention_mask(hidden[None, None])
    assert mask_of_batch(6, 2) == Mask.batch([Mask.causal(6)] * 2)
    assert mask_of_batch(6, 2) is mask_of_batch(6, 2)
    set_attention_mask(torch.stack([hidden, torch.zeros_like(hidden)])[:, None])
    assert mask_of_batch(6, 2) == Mask.batch([Mask.causal(6), Mask.full(6)])
    with pytest.raises(ConfigError, match="of 2 samples, the micro-batch has 3"):
        mask_of_batch(6, 3)
    set_attention_mask(rule := lambda q, k: k <= q)
    assert get_attention_mask() is rule
    assert mask_of_batch(8, 1) == Mask.causal(8)
    with pytest.raises(ConfigError, match="mask row 4 of sample 0"):
        set_attention_mask(blind(4))
    assert get_attention_mask() is rule
    set_attention_mask(None)
    assert mask_of_batch(8, 1) is None
