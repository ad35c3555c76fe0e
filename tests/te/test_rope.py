"""Rotary embedding against complex multiplication."""

from __future__ import annotations

import pytest
import torch

from mindspeed.te import kernels
from mindspeed.te.rope import apply_fused_qkv_rotary_pos_emb, apply_rotary_pos_emb, packed_positions
from mindspeed.testing import assert_close_with_grads

SIZE = 6


def frequencies(length, interleaved=False):
    angles = torch.arange(length)[:, None] * torch.tensor([1.0, 0.3, 0.05])[None]
    full = angles.repeat_interleave(2, -1) if interleaved else torch.cat([angles, angles], -1)
    return full[:, None, None, :]


def turned(x, positions, interleaved):
    """Rotate [s, b, h, d] by multiplying complex pairs with e^(i angle)."""
    angles = torch.tensor([1.0, 0.3, 0.05]) * positions[:, None]
    factor = torch.polar(torch.ones_like(angles), angles)[:, None, None, :]
    front, rest = x[..., :SIZE], x[..., SIZE:]
    if interleaved:
        pairs = torch.view_as_complex(front.unflatten(-1, (3, 2)).contiguous()) * factor
        return torch.cat([torch.view_as_real(pairs).flatten(-2), rest], -1)
    pairs = torch.complex(front[..., :3], front[..., 3:]) * factor
    return torch.cat([pairs.real, pairs.imag, rest], -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_rotation(layout, interleaved):
    freqs = frequencies(9, interleaved)
    swap = (lambda x: x.transpose(0, 1)) if layout == "bshd" else (lambda x: x)
    assert_close_with_grads(
        lambda x: swap(apply_rotary_pos_emb(swap(x), freqs, layout, interleaved=interleaved)),
        lambda x: turned(x, torch.arange(7.0), interleaved),
        (torch.randn(7, 2, 3, 8),),
        rtol=0,
        atol=1e-6,
    )


def test_start_positions_shift_each_sequence():
    x, freqs = torch.randn(4, 2, 3, SIZE), frequencies(9)
    out = apply_rotary_pos_emb(x, freqs, start_positions=torch.tensor([0, 5]))
    for b, start in enumerate((0, 5)):
        expected = turned(x[:, b : b + 1], torch.arange(4.0) + start, False)
        torch.testing.assert_close(out[:, b : b + 1], expected, rtol=0, atol=1e-6)


def test_packed_documents_start_at_position_zero():
    x, freqs = torch.randn(8, 3, SIZE), frequencies(9)
    out = apply_rotary_pos_emb(x, freqs, "thd", cu_seqlens=torch.tensor([0, 3, 8]))
    positions = torch.tensor([0.0, 1, 2, 0, 1, 2, 3, 4])
    torch.testing.assert_close(out, turned(x[:, None], positions, False)[:, 0], rtol=0, atol=1e-6)


def test_positions_of_the_two_chunks_of_a_context_parallel_rank():
    cu_seqlens = torch.tensor([0, 8, 12])
    ranks = [packed_positions(cu_seqlens, 6, 2, rank).tolist() for rank in (0, 1)]
    assert ranks == [[0, 1, 6, 7, 0, 3], [2, 3, 4, 5, 1, 2]]


def test_cosine_and_sine_are_cached_until_freqs_or_documents_change(monkeypatch):
    seen = []
    rotate = kernels.rotate
    monkeypatch.setattr(
        kernels, "rotate", lambda t, cos, *rest: seen.append(cos) or rotate(t, cos, *rest)
    )
    x, freqs, cu_seqlens = torch.randn(8, 3, SIZE), frequencies(9), torch.tensor([0, 3, 8])

    def packed(documents):
        return apply_rotary_pos_emb(x, freqs, "thd", cu_seqlens=documents)

    for documents in (cu_seqlens, cu_seqlens, torch.tensor([0, 4, 8]), cu_seqlens):
        packed(documents)
    assert seen[1].data_ptr() == seen[0].data_ptr()
    assert not torch.equal(seen[2], seen[0])
    assert torch.equal(seen[3], seen[0])
    before = apply_rotary_pos_emb(x[:, None], freqs)
    apply_rotary_pos_emb(x[:, None], freqs)
    assert seen[5].data_ptr() == seen[4].data_ptr()
    freqs.mul_(2)
    assert not torch.equal(apply_rotary_pos_emb(x[:, None], freqs), before)
    assert not torch.equal(packed(cu_seqlens), seen[0])


def test_tokens_after_the_last_document_are_padding():
    assert packed_positions(torch.tensor([0, 2, 3]), 5).tolist() == [0, 1, 0, 0, 0]
    assert packed_positions(torch.tensor([0]), 2).tolist() == [0, 0]
    assert packed_positions(torch.tensor([0, 0, 2], dtype=torch.int32), 2).tolist() == [0, 1]


def test_joint_projection_is_split_and_rotated():
    torch.manual_seed(0)
    freqs = frequencies(5)
    joint = torch.randn(5, 2, 2, 4 * SIZE)
    q, k, v = apply_fused_qkv_rotary_pos_emb(joint, freqs, freqs, [2 * SIZE, SIZE, SIZE])
    position = torch.arange(5.0)
    query = joint[..., : 2 * SIZE].reshape(5, 2, 4, SIZE)
    torch.testing.assert_close(q, turned(query, position, False), rtol=0, atol=1e-6)
    key = joint[..., 2 * SIZE : 3 * SIZE]
    torch.testing.assert_close(k, turned(key, position, False), rtol=0, atol=1e-6)
    assert torch.equal(v, joint[..., 3 * SIZE :])


def test_too_few_positions_are_named():
    with pytest.raises(ValueError, match="cover 3 positions, the sequence has 4"):
        apply_rotary_pos_emb(torch.randn(4, 1, 1, SIZE), frequencies(3))
