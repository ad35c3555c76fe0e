"""What load-aware experts keep when the recorded routing of a young model is replayed."""

from __future__ import annotations

import json

import pytest
import torch

from mindspeed.instruments import saved_for_backward
from mindspeed.moe.interpreter import Chunk
from mindspeed.moe.request import LayerRequest
from mindspeed.moe.save.policy import ALL, X_ONLY
from mindspeed.moe.save.stage import ExpertSaving
from tests.moe.recorded_routing import FILE, RANKS, TOKENS, TOPK

WIDTH, FFN = 8, 28  # as Mixtral's, f = 3.5 h


class GatedActivation(torch.autograd.Function):
    """silu(a) b p, as fused kernels compute it: it keeps its inputs."""

    @staticmethod
    def forward(ctx, x, probs):
        ctx.save_for_backward(x, probs)
        a, b = x.chunk(2, -1)
        return torch.nn.functional.silu(a) * b * probs.unsqueeze(-1)

    @staticmethod
    def backward(ctx, grad):
        x, probs = (saved.detach().requires_grad_() for saved in ctx.saved_tensors)
        with torch.enable_grad():
            a, b = x.chunk(2, -1)
            out = torch.nn.functional.silu(a) * b * probs.unsqueeze(-1)
        return torch.autograd.grad(out, (x, probs), grad)


class Experts(torch.nn.Module):
    """One expert in place of all of a rank."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.linear_fc1 = torch.nn.Linear(WIDTH, 2 * FFN, bias=False)
        self.linear_fc2 = torch.nn.Linear(FFN, WIDTH, bias=False)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)

    def forward(self, rows, sizes, probs):
        return self.linear_fc2(GatedActivation.apply(self.linear_fc1(rows), probs)), None


def kept_and_gradients(experts, scale, count):
    """Bytes kept of ``count`` rows, and all gradients."""
    generator = torch.Generator().manual_seed(count)
    rows = torch.randn(count, WIDTH, generator=generator).requires_grad_()
    probs = torch.rand(count, generator=generator).requires_grad_()
    hidden = torch.zeros(TOKENS // RANKS, WIDTH)
    saving = ExpertSaving(LayerRequest(recompute_above=scale), None, TOPK, 1)
    chunk = Chunk(tensors={"hidden": hidden})
    with saved_for_backward(experts) as saved:
        out, _ = saving.run(chunk, experts, rows, torch.tensor([count]), probs)
        kept = saved.live_bytes - probs.nbytes
        gradients = torch.autograd.grad(out.square().sum(), [rows, probs, *experts.parameters()])
        assert saved.live_bytes <= out.nbytes  # the square's, while out lives
    return kept, gradients


@pytest.fixture(scope="module")
def recorded():
    return torch.tensor(json.loads(FILE.read_text()))  # [steps, layers, ranks]


def replayed(recorded, scale):
    """Peak of the fullest rank over steps, 1.0 balanced; share of rows that are recomputed."""
    experts, sizes = Experts(), {}
    for count in recorded.unique().tolist():
        sizes[count], _ = kept_and_gradients(experts, scale, count)
    kept = recorded.clone().apply_(sizes.__getitem__).sum(1)  # all layers of a rank
    balanced = recorded.shape[1] * TOKENS // RANKS * TOPK * ALL.elements(WIDTH, FFN) * 4
    above = recorded * RANKS > scale * TOKENS * TOPK
    share = float((recorded * above).sum() / recorded.sum())
    return round(float(kept.max()) / balanced, 2), round(share, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scale", "peak", "recomputed"),
    [(1e9, 1.64, 0.0), (2.0, 1.59, 0.19), (1.5, 1.14, 0.48), (1.25, 0.93, 0.63)],
)
def test_the_peak_is_flat_for_little_recomputation(recorded, scale, peak, recomputed):
    assert replayed(recorded, scale) == (peak, recomputed)


def test_bytes_and_gradients_on_both_sides_of_the_scale():
    experts, balanced = Experts(), TOKENS // RANKS * TOPK
    whole, few = ALL.elements(WIDTH, FFN) * 4, X_ONLY.elements(WIDTH, FFN) * 4
    assert kept_and_gradients(experts, 1.25, balanced * 5 // 4)[0] == balanced * 5 // 4 * whole
    kept, gradients = kept_and_gradients(experts, 1.25, balanced * 5 // 4 + 1)
    assert kept == (balanced * 5 // 4 + 1) * few
    _, expected = kept_and_gradients(experts, 1e9, balanced * 5 // 4 + 1)
    assert all(one.equal(other) for one, other in zip(gradients, expected, strict=True))
    assert kept_and_gradients(experts, 1.25, 0)[0] == 0
