"""The original's context-parallel functions compute attention of the whole sequence."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mindspeed.core.context_parallel.ring_context_parallel import ringattn_context_parallel
from mindspeed.core.context_parallel.ulysses_context_parallel import (
    UlyssesContextAttention,
    ulyssesattn_context_parallel,
)
from mindspeed.errors import ConfigError
from tests.original import context_ranks

GROUP = SimpleNamespace(size=lambda: 2)
QKV = [torch.zeros(4, 1, 16)] * 3


@pytest.mark.slow
def test_every_call_signature(ranks):
    for found in ranks(4, context_ranks.errors, timeout=240):
        for way, error in found.items():
            assert error < 1e-12, way


@pytest.mark.parametrize(
    ("para", "more", "message"),
    [
        ({"cp_rank": 0}, {}, "cp_para: unknown keys cp_rank; there are"),
        ({"pse": torch.zeros(2), "pse_type": 1}, {}, "pse_type 1 makes a bias"),
        (
            {},
            {"packed_seq_params": SimpleNamespace(cu_seqlens_q=torch.tensor([3, 7]))},
            "cu_seqlens_q ends at 7; 2 ranks have 4 rows each",
        ),
    ],
)
def test_ring_refuses(para, more, message):
    with pytest.raises(ConfigError, match=message):
        ringattn_context_parallel(*QKV, 2, {"cp_group": GROUP, **para}, **more)


def test_ulysses_refuses():
    with pytest.raises(ConfigError, match="must be 2 and 0"):
        UlyssesContextAttention(None, GROUP, scatter_idx=1)
    heads = [torch.zeros(4, 1, 2, 8)] * 3
    with pytest.raises(ConfigError, match="sparse_mode 7: with flash attention use 0, 2, 3 or 4"):
        ulyssesattn_context_parallel(*heads, {"sparse_mode": 7}, {"spg": GROUP})
