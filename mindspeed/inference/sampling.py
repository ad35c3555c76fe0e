"""Sampling of the next token from logits ``[b, v]``.

    logits -> + bias -> penalties -> no end token before min_new_tokens  greedy: the argmax
                     -> / temperature -> top_k -> top_p -> min_p         sampling: a random draw

The order is Hugging Face's; the filters may be combined. Bias, presence and frequency penalty are
OpenAI's. Every sequence draws from its own CPU
generator, seeded with ``seed`` and the index of the sequence, so its text depends neither on the
device, nor on the parallel layout, nor on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from mindspeed.errors import ConfigError

_GOLDEN = 0x9E3779B97F4A7C15  # spreads consecutive seeds over all 64 bits


@dataclass(frozen=True)
class Constraint:
    """What an answer must be.

    Attributes:
        kind: ``json_schema``, ``json_object`` or ``regex``.
        text: The schema or the expression.
    """

    kind: str
    text: str = ""


@dataclass(frozen=True)
class SamplingOptions:
    """Number of tokens to generate, and sampling options.

    Attributes:
        max_new_tokens: Maximum number of new tokens per sequence.
        greedy: Take the most likely token, or with several beams the most likely beams.
        temperature: Divides the logits before sampling.
        top_k: Sample from the ``top_k`` most likely tokens; 0 keeps all.
        top_p: Sample from the smallest set of most likely tokens whose probabilities sum to this.
        min_p: Drop tokens less likely than this fraction of the most likely one.
        seed: Random seed.
        min_new_tokens: No end token before this many new tokens.
        repetition_penalty: Divides positive logits of tokens that occurred, multiplies negative.
        presence_penalty: Subtracted from logits of tokens that have been generated.
        frequency_penalty: The same, for each time that they have been.
        logit_bias: Token ids, and what is added to their logits.
        num_beams: Width of a beam search; 1 disables it.
        length_penalty: A finished beam scores its log-probability / length ** penalty.
        early_stopping: End a beam search when ``num_beams`` sequences have finished instead of
            when no running beam can improve on them.
        num_return_sequences: Continuations per prompt.
        stop: Strings that end a sequence; they are not part of its text.
        shown: Special tokens that are part of its text.
        constraint: What the text must be.
        logprobs: Also return the log-probability of each new token and of the N most likely tokens.
        recompute: Run the whole sequence for every token instead of keeping a KV cache.
    """

    max_new_tokens: int = 128
    greedy: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 1234
    min_new_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool = False
    num_return_sequences: int = 1
    stop: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()
    constraint: Constraint | None = None
    logprobs: int | None = None
    recompute: bool = False

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem:
            raise ConfigError(problem)

    def _problem(self) -> str | None:
        if self.max_new_tokens < 1:
            return f"--max-new-tokens {self.max_new_tokens}: at least 1 is needed"
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            return (
                f"--min-new-tokens {self.min_new_tokens}: 0 up to --max-new-tokens "
                f"{self.max_new_tokens} is allowed"
            )
        if not self.greedy and not self.temperature > 0:
            return (
                f"--temperature {self.temperature}: sampling needs a value above 0; "
                "for the most likely token use --greedy"
            )
        if self.top_k < 0:
            return f"--top-k {self.top_k}: 0 (all tokens) or more is allowed"
        if not 0 < self.top_p <= 1:
            return f"--top-p {self.top_p}: above 0 up to 1 (all tokens) is allowed"
        if not 0 <= self.min_p <= 1:
            return f"--min-p {self.min_p}: 0 (all tokens) up to 1 is allowed"
        if not self.repetition_penalty > 0:
            return f"--repetition-penalty {self.repetition_penalty}: a value above 0 is needed"
        return self._number_problem()

    def _number_problem(self) -> str | None:
        if self.constraint is not None and self.num_beams > 1:
            return f"--num-beams {self.num_beams}: a beam search follows no schema or expression"
        if self.constraint is not None and self.min_new_tokens:
            return (
                f"min_tokens {self.min_new_tokens}: an answer by a schema or an expression ends "
                "where that does"
            )
        if self.num_beams < 1:
            return f"--num-beams {self.num_beams}: at least 1 is needed"
        if self.num_return_sequences < 1:
            return f"--num-return-sequences {self.num_return_sequences}: at least 1 is needed"
        one_answer = self.greedy or self.num_beams > 1
        if one_answer and self.num_return_sequences > self.num_beams:
            return (
                f"--num-return-sequences {self.num_return_sequences} is more than --num-beams "
                f"{self.num_beams}: a search returns at most its beams; raise --num-beams, or "
                "sample without beams"
            )
        if any(not stop for stop in self.stop):
            return "--stop '': an empty string would end every text at once"
        if self.logprobs is not None and self.logprobs < 0:
            return f"--logprobs {self.logprobs}: 0 (sampled tokens only) or more is allowed"
        return None


def generator_of(seed: int, index: int) -> torch.Generator:
    """Random generator of sequence ``index``."""
    return torch.Generator().manual_seed((seed * _GOLDEN + index) % 2**63)


def process_logits(
    scores: torch.Tensor,
    tokens: torch.Tensor,
    options: SamplingOptions,
    eos: Collection[int],
    new_tokens: Sequence[int],
) -> torch.Tensor:
    """Apply bias, penalties and minimum length, as for greedy decoding, sampling and beams.

    Args:
        scores: Logits, or in beam search log-probabilities, fp32 ``[b, v]``.
        tokens: Prompt and new tokens, int64 ``[b, s]``.
        options: Bias, penalties and minimum number of new tokens.
        eos: Ids that end a sequence.
        new_tokens: Number of new tokens of each sequence.

    Returns:
        Processed scores, fp32 ``[b, v]``.
    """
    if options.logit_bias:
        scores = scores + _bias(options.logit_bias, scores)
    if options.presence_penalty or options.frequency_penalty:
        scores = scores - _penalties(tokens, options, new_tokens, scores)
    if options.repetition_penalty != 1:
        tokens = tokens.to(scores.device)
        seen = scores.gather(1, tokens)
        penalty = options.repetition_penalty
        seen = torch.where(seen < 0, seen * penalty, seen / penalty)
        scores = scores.scatter(1, tokens, seen)
    early = [count < options.min_new_tokens for count in new_tokens]
    if eos and any(early):
        scores = scores.clone()
        rows = torch.tensor(early, device=scores.device).nonzero()
        scores[rows, torch.tensor(sorted(eos), device=scores.device)] = float("-inf")
    return scores


def _bias(given: Sequence[tuple[int, float]], scores: torch.Tensor) -> torch.Tensor:
    """What is added to each logit, ``[v]``, like ``scores`` ``[b, v]``."""
    bias = scores.new_zeros(scores.shape[1])
    for token, value in given:
        bias[token] += value
    return bias


def _penalties(
    tokens: torch.Tensor,
    options: SamplingOptions,
    new_tokens: Sequence[int],
    scores: torch.Tensor,
) -> torch.Tensor:
    """What tokens ``[b, s]`` that have been generated lose, ``[b, v]``, like ``scores``."""
    rows = [
        row[len(row) - count :].bincount(minlength=scores.shape[1])
        for row, count in zip(tokens, new_tokens, strict=True)
    ]
    times = torch.stack(rows).to(scores)
    return times * options.frequency_penalty + (times > 0) * options.presence_penalty


def filter_scores(
    scores: torch.Tensor, options: SamplingOptions, at_least: int = 1
) -> torch.Tensor:
    """Set scores ``[b, v]`` outside the filters to -inf; keep ``at_least`` tokens.

    The result has the dtype of ``scores``, a floating one.
    """
    top_k = max(options.top_k, at_least) if options.top_k else 0
    if 0 < top_k < scores.shape[-1]:
        smallest_kept = scores.topk(top_k).values[:, -1:]
        scores = scores.masked_fill(scores < smallest_kept, float("-inf"))
    if options.top_p < 1:
        descending, order = scores.sort(descending=True)
        before = descending.softmax(-1).cumsum(-1).roll(1, dims=-1)
        before[:, :at_least] = 0.0
        dropped = (before >= options.top_p).scatter(-1, order, before >= options.top_p)
        scores = scores.masked_fill(dropped, float("-inf"))
    if options.min_p > 0:
        probabilities = scores.softmax(-1)
        limit = options.min_p * probabilities.amax(-1, keepdim=True)
        kept = probabilities.topk(at_least).values[:, -1:]
        scores = scores.masked_fill(probabilities < torch.minimum(limit, kept), float("-inf"))
    return scores


def next_token_probabilities(logits: torch.Tensor, options: SamplingOptions) -> torch.Tensor:
    """Probabilities that sampling draws from, fp32 ``[b, v]``, of ``logits`` ``[b, v]``."""
    return filter_scores(logits.float() / options.temperature, options).softmax(-1)


def sample_tokens(
    logits: torch.Tensor, options: SamplingOptions, generators: Sequence[torch.Generator]
) -> torch.Tensor:
    """Next token ids, int64 ``[b]`` on the CPU, from ``logits`` ``[b, v]``; one generator per row.

    A draw is the first token at which the cumulative probability exceeds a uniform number.
    """
    if options.greedy:
        return logits.argmax(-1).cpu()
    sums = next_token_probabilities(logits, options).cpu().double().cumsum(-1)
    uniform = [torch.rand(1, dtype=torch.float64, generator=g) for g in generators]
    drawn = torch.searchsorted(sums, torch.stack(uniform) * sums[:, -1:], right=True)[:, 0]
    return drawn.clamp(max=sums.shape[1] - 1)  # the product may round up to the total
