"""What tests of the registration share."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture
def clean_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as if neither Megatron nor any transformer_engine had been imported."""
    for name in list(sys.modules):
        if name.partition(".")[0] in ("transformer_engine", "megatron", "grouped_gemm"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "fused_weight_gradient_mlp_cuda", raising=False)
    monkeypatch.delenv("MINDSPEED_TE", raising=False)
