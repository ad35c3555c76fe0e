"""Loads of ranks while a small mixture of experts learns: what load-aware memory is measured on.

Four residual layers of 32 experts, top-4 with softmax afterwards and the balancing loss of Switch
Transformers (1e-2), predict the next state of a Markov chain with Zipf-distributed successors. All
experts are computed for all tokens: only the counts matter. ``python -m
tests.moe.recorded_routing`` records the first steps in ``recorded_routing.json``:
rows of every rank, ``[steps, layers, ranks]``.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

FILE, STEPS = Path(__file__).with_suffix(".json"), 30
LAYERS, EXPERTS, TOPK, RANKS = 4, 32, 4, 8
STATES, WIDTH, FFN, TOKENS = 256, 32, 16, 512


def train(steps: int, seed: int = 1) -> torch.Tensor:
    """Rows of every rank, int64 ``[steps, layers, ranks]``."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).requires_grad_()

    parameters = {
        "embedding": normal(STATES, WIDTH, scale=1.0),
        "router": normal(LAYERS, WIDTH, EXPERTS, scale=0.1),
        "first": normal(LAYERS, EXPERTS, WIDTH, FFN, scale=0.3),
        "second": normal(LAYERS, EXPERTS, FFN, WIDTH, scale=0.3),
        "head": normal(WIDTH, STATES, scale=0.1),
    }
    successors = torch.stack([torch.randperm(STATES, generator=generator) for _ in range(STATES)])
    zipf = 1.0 / torch.arange(1, STATES + 1) ** 1.6
    optimizer = torch.optim.Adam(parameters.values(), lr=1e-2)
    found = []
    for _ in range(steps):
        tokens = torch.multinomial(zipf, TOKENS, replacement=True, generator=generator)
        rank = torch.multinomial(zipf, TOKENS, replacement=True, generator=generator)
        logits, balance, counts = _forward(parameters, tokens)
        loss = torch.nn.functional.cross_entropy(logits, successors[tokens, rank])
        optimizer.zero_grad()
        (loss + 1e-2 * balance).backward()
        optimizer.step()
        found.append(counts.view(LAYERS, RANKS, -1).sum(-1).long())
    return torch.stack(found)


def _forward(
    parameters: dict[str, torch.Tensor], tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, balancing loss and tokens of every expert, ``[layers, experts]``."""
    x = parameters["embedding"][tokens]
    balance, counts = x.new_zeros(()), []
    for layer in range(LAYERS):
        normed = torch.nn.functional.layer_norm(x, (WIDTH,))
        scores = normed @ parameters["router"][layer]
        best, chosen = scores.topk(TOPK, dim=-1)
        weights = torch.zeros_like(scores).scatter(1, chosen, best.softmax(-1))
        mask = torch.zeros_like(scores).scatter(1, chosen, 1.0)
        balance = balance + EXPERTS * (mask.mean(0) / TOPK * scores.softmax(-1).mean(0)).sum()
        counts.append(mask.sum(0))
        inner = torch.einsum("nh,ehf->enf", normed, parameters["first"][layer]).relu()
        outer = torch.einsum("enf,efh->enh", inner, parameters["second"][layer])
        x = x + torch.einsum("enh,ne->nh", outer, weights)
    return x @ parameters["head"], balance, torch.stack(counts)


if __name__ == "__main__":
    FILE.write_text(json.dumps(train(STEPS).tolist()) + "\n")
