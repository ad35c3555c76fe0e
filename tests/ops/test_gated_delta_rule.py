"""The gated delta rule by chunks equals its definition, token by token, in fp64."""

from __future__ import annotations

import itertools

import pytest
import torch

from mindspeed.ops import OperatorError
from mindspeed.ops.gated_delta_rule import chunk_gated_delta_rule


def definition(q, k, v, g, beta, scale, state):
    """One head: fp64 ``[t, d]``, ``[t, d_v]``, ``[t]``; the recurrence as it is written."""
    outputs = []
    for t in range(len(q)):
        state = state * g[t].exp()
        state = state + torch.outer(k[t], beta[t] * (v[t] - k[t] @ state))
        outputs.append(scale * q[t] @ state)
    return torch.stack(outputs) if outputs else v, state


def drawn(samples, length, heads, value_heads, dim=4, value_dim=6, dtype=torch.float64):
    generator = torch.Generator().manual_seed(length)
    options = {"generator": generator, "dtype": dtype}
    q, k = (torch.randn(samples, length, heads, dim, **options) for _ in range(2))
    v = torch.randn(samples, length, value_heads, value_dim, **options)
    g = -torch.rand(samples, length, value_heads, **options)
    beta = torch.rand(samples, length, value_heads, **options)
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
        (3, [0, 1], 1, 3, {}),
        (1, [0, 4, 4, 12], 3, 3, {"chunk_size": 4, "use_qk_l2norm_in_kernel": True}),
        (1, [0, 70], 1, 1, {"use_qk_l2norm_in_kernel": True}),
    ],
    ids=["padded", "grouped-normalised", "documents", "one-token", "empty-document", "two-chunks"],
)
def test_chunks_equal_the_recurrence(samples, ends, heads, value_heads, options):
    """Outputs, last state and all gradients within 1e-9 of their size."""
    inputs = drawn(samples, ends[-1], heads, value_heads)
    documents = max(samples, len(ends) - 1)
    states = torch.randn(documents, value_heads, 4, 6, dtype=torch.float64).requires_grad_()
    cu_seqlens = torch.tensor(ends) if len(ends) > 2 else None
    out, last = chunk_gated_delta_rule(
        *inputs, initial_state=states, output_final_state=True, cu_seqlens=cu_seqlens, **options
    )
    normalised = options.get("use_qk_l2norm_in_kernel", False)
    truth, states_truth = expected(*inputs, ends, states, options.get("scale"), normalised)
    assert_close(out, truth)
    assert_close(last, states_truth)
    weight = torch.randn_like(truth)
    leaves = [*inputs, states]
    ours = torch.autograd.grad((out * weight).sum() + last.sin().sum(), leaves)
    theirs = torch.autograd.grad((truth * weight).sum() + states_truth.sin().sum(), leaves)
    for mine, true in zip(ours, theirs, strict=True):
        assert_close(mine, true)


def assert_close(found, truth):
    bound = 1e-9 * max(1.0, float(truth.abs().max()))
    torch.testing.assert_close(found, truth, rtol=0, atol=bound)


def test_the_state_carries_a_sequence_on():
    """Two halves, the second with the last state of the first, are the whole; so is each token."""
    inputs = [x.detach() for x in drawn(2, 12, 1, 2)]
    whole, last = chunk_gated_delta_rule(*inputs, output_final_state=True, chunk_size=8)
    for size in (6, 1):
        parts, state = [], None
        for at in range(0, 12, size):
            mine = (x[:, at : at + size] for x in inputs)
            out, state = chunk_gated_delta_rule(
                *mine, initial_state=state, output_final_state=True, chunk_size=4
            )
            parts.append(out)
        assert_close(torch.cat(parts, 1), whole)
        assert_close(state, last)


def test_nothing_gives_nothing():
    inputs = drawn(1, 0, 1, 2)
    out, last = chunk_gated_delta_rule(*inputs, output_final_state=True)
    assert out.shape == (1, 0, 2, 6) and not last.any()
    (grad,) = torch.autograd.grad(out.sum() + last.sum(), inputs[0])
    assert grad.shape == inputs[0].shape


def test_the_backward_keeps_the_arguments_only():
    """Of eager torch's formula, autograd would keep every intermediate result, in fp32."""
    inputs = drawn(1, 256, 2, 2, dtype=torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True)
    assert sum(x.nbytes for x in kept) == sum(x.nbytes for x in inputs)


def test_heads_may_come_first_and_results_keep_the_dtype():
    inputs = [x.detach().bfloat16() for x in drawn(1, 5, 1, 2)]
    out, last = chunk_gated_delta_rule(*inputs)
    first, _ = chunk_gated_delta_rule(*(x.transpose(1, 2) for x in inputs), head_first=True)
    assert last is None and out.dtype is torch.bfloat16
    assert torch.equal(first.transpose(1, 2), out)


def test_what_does_not_fit_is_refused():
    inputs = drawn(1, 5, 2, 3)
    with pytest.raises(OperatorError, match="a multiple of the 2 heads of q, got 3"):
        chunk_gated_delta_rule(*inputs)
    with pytest.raises(OperatorError, match=r"ascending from 0 to 5, got \[0, 4\] with 1 samples"):
        chunk_gated_delta_rule(*drawn(1, 5, 2, 2), cu_seqlens=torch.tensor([0, 4]))
