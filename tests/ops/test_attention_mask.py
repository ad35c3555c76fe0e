"""One mask per process and device, whatever the sequence length."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from mindspeed.errors import ConfigError
from mindspeed.model.transformer import (
    generate_attention_mask,
    get_attention_mask,
    set_attention_mask,
)
from mindspeed.ops.visibility import prefix_mask


def test_compressed_mask_is_4_mib_for_any_length_and_made_once():
    mask = generate_attention_mask(True, "cpu", seq_length=32768)
    assert mask.untyped_storage().nbytes() == 4 << 20  # 1 GiB for the full one
    assert torch.equal(mask, torch.ones(2048, 2048).triu(1).bool())
    assert generate_attention_mask(True, torch.device("cpu")) is mask
    assert get_attention_mask() is mask


def test_models_of_two_lengths_get_their_own_masks():
    short, long = (generate_attention_mask(False, "cpu", size) for size in (8, 12))
    assert short.shape == (8, 8)
    assert torch.equal(long, torch.ones(12, 12).triu(1).bool())
    assert generate_attention_mask(False, "cpu", 8) is short


def test_prefix_mask():
    mask = prefix_mask("cpu")
    assert mask.shape == (3072, 2048)
    assert not mask[2048:, :1024].any()
    assert mask[2048:, 1024:].all()


def test_user_mask_until_it_is_reset():
    mask = torch.eye(5).bool()
    set_attention_mask(mask)
    try:
        assert get_attention_mask() is mask
    finally:
        set_attention_mask(None)
    assert get_attention_mask() is generate_attention_mask(True, "cpu")
    for wrong in (torch.eye(5), torch.ones(5).bool()):
        with pytest.raises(ConfigError, match="attention mask: expected a bool tensor"):
            set_attention_mask(wrong)


def test_fake_masks_are_not_cached():
    with FakeTensorMode():
        assert isinstance(generate_attention_mask(False, "cpu", 77), FakeTensor)
    assert not isinstance(generate_attention_mask(False, "cpu", 77), FakeTensor)
