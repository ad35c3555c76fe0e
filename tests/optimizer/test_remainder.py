"""A bf16 parameter and its 16-bit remainder are the fp32 master weight."""

from __future__ import annotations

import pytest
import torch

from mindspeed.optimizer.remainder import Remainder, packed, unpacked

LOW = torch.arange(-(2**16), 2**16, dtype=torch.int64)  # across a bf16 value and its neighbours


def stored(value: torch.Tensor, codec: Remainder) -> tuple[torch.Tensor, torch.Tensor]:
    """The bf16 parameter, and the decoded master weight, of ``value``."""
    param = torch.zeros_like(value, dtype=torch.bfloat16)
    rest, extra = codec.allocate(param), codec.allocate_extra(param)
    codec.encode(value, rest, extra, param)
    return param, codec.decode(rest, extra, param)


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True])
def test_all_low_patterns_of_many_upper_halves(exact):
    """2 ** 17 patterns around 256 bf16 values of both signs, from subnormal numbers to infinity."""
    uppers = torch.arange(0, 0x7F80, 0x7F80 // 126, dtype=torch.int64)
    uppers = torch.cat([uppers, torch.tensor([1, 0x7F7F])])
    for upper in torch.cat([uppers, uppers + 0x8000]):
        bits = ((upper << 16) + LOW) & 0xFFFFFFFF
        value = (bits - ((bits >> 31) << 32)).to(torch.int32).view(torch.float32)
        value = value[~value.isnan()]
        param, back = stored(value, Remainder(exact))
        assert torch.equal(param.view(torch.int16), value.bfloat16().view(torch.int16))
        lost = back.view(torch.int32) != value.view(torch.int32)
        ties = (value.view(torch.int32) & 0x1FFFF) == 0x8000  # half way above an even bf16
        assert torch.equal(lost, torch.zeros_like(lost) if exact else ties)
        assert torch.equal(back.view(torch.int32) + lost.int(), value.view(torch.int32))
        again, twice = stored(back, Remainder(exact))
        assert torch.equal(again, param) and torch.equal(twice, back)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("pattern", [0x7FFFFFFF, 0x7F800001, 0x7FC00000, -1])
def test_a_nan_stays_one(exact, pattern):
    value = torch.tensor([pattern] * 9, dtype=torch.int32).view(torch.float32)
    assert value.isnan().all()
    assert all(result.isnan().all() for result in stored(value, Remainder(exact)))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (8,), (3, 5), (0,)], ids=str)
def test_shapes_and_strides(exact, shape):
    value = torch.randn(*shape, 2)[..., 0]
    param, back = stored(value, Remainder(exact))
    assert torch.equal(param, value.bfloat16()) and torch.equal(back, value)


def test_the_exact_form_costs_an_eighth_of_a_byte_more():
    param = torch.zeros(1001, dtype=torch.bfloat16)
    assert Remainder().allocate(param).nbytes == 2002
    assert Remainder().allocate_extra(param) is None
    assert Remainder(exact=True).allocate_extra(param).nbytes == 126


@pytest.mark.parametrize("count", [0, 1, 8, 21])
def test_flags_are_packed_eight_a_byte(count):
    flags = torch.arange(count) % 3 == 0
    assert packed(flags).tolist() == [
        sum(int(flag) << i for i, flag in enumerate(flags[start : start + 8].tolist()))
        for start in range(0, count, 8)
    ]
    assert torch.equal(unpacked(packed(flags), count).bool(), flags)
