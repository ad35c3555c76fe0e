"""The overlapped layer on two ranks is the dense sum over all experts, in fp64 on one."""

from __future__ import annotations

import torch

from tests.moe import layer_ranks as jobs
from tests.moe.test_overlap import ADAPTOR
from tests.support.lazy import needs

needs("megatron.core")

LOCAL = jobs.EXPERTS // 2


def mlp(x, fc1, fc2):
    gate, up = (x @ fc1.t()).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up) @ fc2.t()


def dense(x, weights, ranks_weights):
    """Every expert on every token, weighted by the softmax over the two largest logits."""
    logits = x @ weights["router.weight"].t()
    chosen = logits.topk(2, -1)
    probs = torch.zeros_like(logits).scatter(-1, chosen.indices, chosen.values.softmax(-1))
    shared = (weights[f"shared_experts.linear_fc{i}.weight"] for i in (1, 2))
    out = mlp(x, *shared)
    for expert in range(jobs.EXPERTS):
        owner, index = divmod(expert, LOCAL)
        pair = (ranks_weights[owner][f"experts.linear_fc{i}.weight{index}"] for i in (1, 2))
        out = out + probs[..., expert, None] * mlp(x, *pair)
    return out


def test_outputs_and_all_gradients(ranks):
    results = ranks(2, jobs.with_weights, {"expert": 2}, {"overlap": True}, 9, setup=ADAPTOR)
    weights = [
        {name: w.double().requires_grad_() for name, w in result.extra["weights"].items()}
        for result in results
    ]
    inputs = [result.extra["input"].double().requires_grad_() for result in results]
    outputs = [dense(x, own, weights) for x, own in zip(inputs, weights, strict=True)]
    losses = [(y * r.extra["output_weight"]).sum() for y, r in zip(outputs, results, strict=True)]
    torch.autograd.backward(losses)
    for result, x, y, own in zip(results, inputs, outputs, weights, strict=True):
        close(result.output, y)
        close(result.gradients["input"], x.grad)
        assert result.gradients.keys() == {"input", *own}
        for name, weight in own.items():
            close(result.gradients[name], weight.grad)


def close(actual, truth):
    scale = float(truth.detach().abs().max())
    torch.testing.assert_close(actual.double(), truth.detach(), rtol=0, atol=1e-6 * scale)
