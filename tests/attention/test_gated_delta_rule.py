"""The gated delta rule by chunks equals its definition, token by token."""

from __future__ import annotations

import itertools

import pytest
import torch

from mindspeed.attention.gated_delta_rule import chunk_gated_delta_rule
from mindspeed.errors import ConfigError


def definition(q, k, v, g, beta, scale, state):
    """One head: fp64 ``[t, d]``, ``[t, d_v]``, ``[t]``; the recurrence as it is written."""
    outputs = []
    for t in range(len(q)):
        state = state * g[t].exp()
        state = state + torch.outer(k[t], beta[t] * (v[t] - k[t] @ state))
        outputs.append(scale * q[t] @ state)
    return torch.stack(outputs), state


def drawn(samples, length, heads, value_heads, dim=4, value_dim=6):
    generator = torch.Generator().manual_seed(length)
    q, k = (torch.randn(samples, length, heads, dim, generator=generator) for _ in range(2))
    v = torch.randn(samples, length, value_heads, value_dim, generator=generator)
    g = -torch.rand(samples, length, value_heads, generator=generator)
    beta = torch.rand(samples, length, value_heads, generator=generator)
    return [x.requires_grad_() for x in (q, k, v, g, beta)]


def expected(q, k, v, g, beta, ends, states, scale=None, normalised=False):
    """Outputs ``[b, t, n_v, d_v]`` and last states, fp64."""
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    if normalised:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    share = v.shape[2] // q.shape[2]
    out, last = torch.zeros_like(v), torch.zeros_like(states.double())
    for b in range(len(q)):
        for i, (start, end) in enumerate(itertools.pairwise(ends)):
            for n in range(v.shape[2]):
                rows = (x[b, start:end, n // share] for x in (q, k))
                own = (x[b, start:end, n] for x in (v, g, beta))
                part, state = definition(*rows, *own, scale, states[max(b, i), n].double())
                out[b, start:end, n], last[max(b, i), n] = part, state
    return out, last


@pytest.mark.parametrize(
    "samples, ends, heads, value_heads, options",
    [
        (2, [0, 11], 2, 2, {"chunk_size": 4}),
        (1, [0, 8], 1, 2, {"chunk_size": 8, "use_qk_l2norm_in_kernel": True}),
        (1, [0, 3, 10, 11], 2, 4, {"chunk_size": 4, "scale": 0.7}),
    ],
    ids=["padded", "grouped-normalised", "documents"],
)
def test_chunks_equal_the_recurrence(samples, ends, heads, value_heads, options):
    """Outputs, last state and gradients within 1e-4 of fp64."""
    inputs = drawn(samples, ends[-1], heads, value_heads)
    states = torch.randn(max(samples, len(ends) - 1), value_heads, 4, 6).requires_grad_()
    cu_seqlens = torch.tensor(ends) if len(ends) > 2 else None
    out, last = chunk_gated_delta_rule(
        *inputs, initial_state=states, output_final_state=True, cu_seqlens=cu_seqlens, **options
    )
    normalised = options.get("use_qk_l2norm_in_kernel", False)
    truth, states_truth = expected(*inputs, ends, states, options.get("scale"), normalised)
    torch.testing.assert_close(out.double(), truth, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(last.double(), states_truth, atol=1e-4, rtol=1e-4)
    weight = torch.randn_like(truth)
    leaves = [*inputs, states]
    ours = torch.autograd.grad((out * weight).sum() + last.sum(), leaves)
    theirs = torch.autograd.grad((truth * weight).sum() + states_truth.sum(), leaves)
    for mine, true in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, true, atol=1e-4, rtol=1e-4)


def test_heads_may_come_first_and_results_keep_the_dtype():
    inputs = [x.detach().bfloat16() for x in drawn(1, 5, 1, 2)]
    out, last = chunk_gated_delta_rule(*inputs)
    first, _ = chunk_gated_delta_rule(*(x.transpose(1, 2) for x in inputs), head_first=True)
    assert last is None and out.dtype is torch.bfloat16
    assert torch.equal(first.transpose(1, 2), out)


def test_what_does_not_fit_is_refused():
    inputs = drawn(1, 5, 2, 3)
    with pytest.raises(ConfigError, match="2 key heads, 3 value heads"):
        chunk_gated_delta_rule(*inputs)
    with pytest.raises(ConfigError, match=r"cu_seqlens \[0, 4\] with 1 samples of 5 tokens"):
        chunk_gated_delta_rule(*drawn(1, 5, 2, 2), cu_seqlens=torch.tensor([0, 4]))
