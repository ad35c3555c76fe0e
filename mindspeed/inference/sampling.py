"""How the next token is chosen from logits ``[b, v]``.

Greedy takes the largest logit. Sampling divides by the temperature, keeps the ``top_k`` largest,
of those the smallest set that holds ``top_p`` of their probability, and draws from what is left:
the order Hugging Face uses, with both filters at once if both are given. Draws come from a CPU
generator of their own, so that text depends on ``seed`` alone and not on the device or on what
else draws random numbers in the process.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mindspeed.errors import ConfigError


@dataclass(frozen=True)
class SamplingOptions:
    """What is generated and how it is chosen."""

    max_new_tokens: int = 128
    greedy: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1234

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"--max-new-tokens {self.max_new_tokens}: at least 1 is needed")
        if not self.greedy and self.temperature <= 0:
            raise ConfigError(
                f"--temperature {self.temperature}: sampling needs a value above 0; "
                "for the most likely token use --greedy"
            )
        if self.top_k < 0:
            raise ConfigError(f"--top-k {self.top_k}: 0 (all tokens) or more is allowed")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"--top-p {self.top_p}: above 0 up to 1 (all tokens) is allowed")


def next_token_probabilities(logits: torch.Tensor, options: SamplingOptions) -> torch.Tensor:
    """Probabilities ``[b, v]`` that sampling draws from, in fp32."""
    scores = logits.float() / options.temperature
    if 0 < options.top_k < scores.shape[-1]:
        smallest_kept = scores.topk(options.top_k).values[:, -1:]
        scores = scores.masked_fill(scores < smallest_kept, float("-inf"))
    if options.top_p < 1:
        descending, order = scores.sort(descending=True)
        before = descending.softmax(-1).cumsum(-1).roll(1, dims=-1)
        before[:, 0] = 0.0  # the most likely token always stays
        dropped = (before >= options.top_p).scatter(-1, order, before >= options.top_p)
        scores = scores.masked_fill(dropped, float("-inf"))
    return scores.softmax(-1)


def choose(
    logits: torch.Tensor, options: SamplingOptions, generator: torch.Generator
) -> torch.Tensor:
    """Next token ids ``[b]`` on the CPU."""
    if options.greedy:
        return logits.argmax(-1).cpu()
    probabilities = next_token_probabilities(logits, options).cpu()
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]
