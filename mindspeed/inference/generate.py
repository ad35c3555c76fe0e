"""Autoregressive generation with a GPT under tensor and pipeline parallelism.

The prompt goes through the model once (prefill), then one token at a time (:mod:`.decoder`).
Prompts of different length share a batch without padding: the prefill stops at the length of the
shortest; longer prompts are then fed their own next token instead of a sampled one until they end.

    first stage --hidden--> ... --hidden--> last stage
         ^                                       | its TP rank 0 samples
         +------------- token ids, broadcast ----+ over the model-parallel group

Each step broadcasts ``b`` ids, so all ranks see the same ids and cannot diverge. Every rank derives
from the ids alone which sequences have ended.

Megatron's ``StaticInferenceEngine`` is not used: it sends the whole logits to every stage through a
function that insists on CUDA tensors, cannot combine top-k with top-p, maps padded vocabulary
entries to the last real token, has no beam search, and is announced to be removed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mindspeed.errors import DataError
from mindspeed.inference.decoder import Decoder
from mindspeed.inference.grammar import Matcher, mask_all
from mindspeed.inference.parallel_groups import ModelParallelGroups
from mindspeed.inference.sampling import (
    SamplingOptions,
    generator_of,
    process_logits,
    sample_tokens,
)

__all__ = [
    "DecodeStep",
    "ModelParallelGroups",
    "TokenScores",
    "check_prompts",
    "decode_steps",
    "generate",
    "stream",
]


@dataclass(frozen=True)
class TokenScores:
    """Log-probabilities at one position, computed from the unprocessed logits.

    Attributes:
        sampled: Log-probability of the token that was sampled.
        top: ``(id, log-probability)`` of the most likely tokens, as many as requested.
    """

    sampled: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class DecodeStep:
    """Output of one step. Keys are sequence indices.

    Attributes:
        tokens: New token of each sequence.
        finished: ``"stop"`` (end token or stop string) or ``"length"`` of sequences that ended.
        scores: Log-probabilities of the new tokens, if requested.
    """

    tokens: dict[int, int]
    finished: dict[int, str]
    scores: dict[int, TokenScores] = field(default_factory=dict)


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    options: SamplingOptions,
    *,
    groups: ModelParallelGroups,
    vocab_size: int,
    eod: int | Collection[int] | None = None,
) -> list[list[int]]:
    """Return the new tokens of every prompt; ``eod`` ends a sequence and is not returned."""
    output: list[list[int]] = [[] for _ in prompts]
    for step in stream(model, prompts, options, groups=groups, vocab_size=vocab_size, eod=eod):
        for index, token in step.items():
            output[index].append(token)
    return output


def stream(
    model: Any,
    prompts: Sequence[Sequence[int]],
    options: SamplingOptions,
    *,
    groups: ModelParallelGroups,
    vocab_size: int,
    eod: int | Collection[int] | None = None,
) -> Iterator[dict[int, int]]:
    """Yield ``{sequence index: new token}`` after every step; the same on all ranks."""
    eos = end_token_set(eod)
    for step in decode_steps(
        model, prompts, options, groups=groups, vocab_size=vocab_size, eos=eos
    ):
        yield step.tokens


def end_token_set(eod: int | Collection[int] | None) -> frozenset[int]:
    if eod is None:
        return frozenset()
    return frozenset({eod} if isinstance(eod, int) else eod)


@torch.inference_mode()
def decode_steps(
    model: Any,
    prompts: Sequence[Sequence[int]],
    options: SamplingOptions,
    *,
    groups: ModelParallelGroups,
    vocab_size: int,
    eos: Collection[int] = (),
    should_stop: Callable[[int, int], bool] | None = None,
    seed_offsets: Sequence[int] | None = None,
    matchers: Sequence[Matcher] | None = None,
) -> Iterator[DecodeStep]:
    """Generate greedily or by sampling, step by step; the same on all ranks of the model.

    Sequence ``i * num_return_sequences + j`` is continuation ``j`` of prompt ``i``.

    Args:
        model: This rank's stage, a ``GPTModel`` without wrappers. It is put into evaluation mode.
        prompts: Token ids of each prompt, at least one.
        options: Sampling options and limits.
        groups: Process groups of the model.
        vocab_size: Entries of the tokenizer; padded vocabulary entries are never sampled.
        eos: Ids that end a sequence; they are not returned.
        should_stop: Called on every rank with sequence index and new token, in order; True ends
            the sequence.
        seed_offsets: Added to ``options.seed`` for each sequence; default: its index.
        matchers: Of each sequence, for its grammar.

    Raises:
        DataError: A prompt is empty, has ids outside the vocabulary, or is too long.
    """
    check_prompts(model, prompts, options, vocab_size)
    model.eval()
    copies = options.num_return_sequences
    batch = _Batch(prompts, copies, options.max_new_tokens)
    offsets = range(len(prompts) * copies) if seed_offsets is None else seed_offsets
    generators = [generator_of(options.seed, offset) for offset in offsets]
    decoder = Decoder(model, groups, len(prompts), batch.tokens.shape[1], options.recompute)
    logits = decoder(batch.tokens[::copies, : batch.length])
    decoder.select(torch.arange(len(prompts)).repeat_interleave(copies))
    if logits is not None:
        logits = logits.repeat_interleave(copies, dim=0)
    while True:
        running = batch.running
        sampled, scores = _sample(
            logits, batch, options, vocab_size, eos, generators, groups, matchers
        )
        step = batch.append(sampled, scores, eos, should_stop)
        for sequence, token in step.tokens.items() if matchers else ():
            matchers[sequence].accept(token)  # type: ignore[index]
        yield step
        if not batch.running:
            return
        position = {sequence: i for i, sequence in enumerate(running)}
        decoder.select(torch.tensor([position[sequence] for sequence in batch.running]))
        logits = decoder(batch.tokens[batch.running, batch.length - 1 : batch.length])


class _Batch:
    """The tokens of all sequences and which of them are still running. The same on every rank.

    Attributes:
        tokens: int64 ``[sequences, longest]``.
        length: Tokens per sequence that the model has processed or is about to process.
        running: Indices of the sequences that have not ended.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], copies: int, new_tokens: int) -> None:
        self.prompt_lengths = [len(prompt) for prompt in prompts for _ in range(copies)]
        self.length = min(self.prompt_lengths)
        self.running = list(range(len(self.prompt_lengths)))
        self._new_tokens = new_tokens
        longest = max(self.prompt_lengths) + new_tokens
        self.tokens = torch.zeros(len(self.running), longest, dtype=torch.long)
        for index in self.running:
            prompt = prompts[index // copies]
            self.tokens[index, : len(prompt)] = torch.tensor(prompt)

    @property
    def sampling(self) -> list[int]:
        """Positions in ``running`` of sequences past their prompt, whose next token is sampled."""
        return [i for i, s in enumerate(self.running) if self.prompt_lengths[s] <= self.length]

    def append(
        self,
        sampled: list[int],
        scores: list[TokenScores] | None,
        eos: Collection[int],
        should_stop: Callable[[int, int], bool] | None,
    ) -> DecodeStep:
        """Append the sampled tokens to the sequences that are past their prompt."""
        step = DecodeStep({}, {})
        for i in self.sampling:
            sequence, token = self.running[i], sampled[i]
            if token in eos:
                step.finished[sequence] = "stop"
                continue
            self.tokens[sequence, self.length] = token
            step.tokens[sequence] = token
            if scores is not None:
                step.scores[sequence] = scores[i]
            if should_stop is not None and should_stop(sequence, token):
                step.finished[sequence] = "stop"
            elif self.length + 1 == self.prompt_lengths[sequence] + self._new_tokens:
                step.finished[sequence] = "length"
        self.length += 1
        self.running = [s for s in self.running if s not in step.finished]
        return step


def _sample(
    logits: torch.Tensor | None,
    batch: _Batch,
    options: SamplingOptions,
    vocab_size: int,
    eos: Collection[int],
    generators: Sequence[torch.Generator],
    groups: ModelParallelGroups,
    matchers: Sequence[Matcher] | None,
) -> tuple[list[int], list[TokenScores] | None]:
    """Next token of every running sequence and, if requested, its scores; on every rank.

    ``logits`` ``[running, v]`` exist on the last pipeline stage only.
    """
    sampled = torch.zeros(len(batch.running), dtype=torch.long)
    # Sequences inside their prompt draw nothing, so that batching does not change their output.
    positions = batch.sampling
    if logits is not None and groups.is_sampling_rank and positions:
        raw = logits[:, :vocab_size].float()
        sequences = [batch.running[i] for i in positions]
        new_tokens = [batch.length - batch.prompt_lengths[s] for s in sequences]
        context = batch.tokens[sequences, : batch.length]
        scores = process_logits(raw[positions], context, options, eos, new_tokens)
        if matchers:
            scores = mask_all(scores, [matchers[s] for s in sequences])
        sampled[positions] = sample_tokens(scores, options, [generators[s] for s in sequences])
    sampled = groups.broadcast(sampled)
    if options.logprobs is None:
        return sampled.tolist(), None
    packed = torch.zeros(len(batch.running), 1 + 2 * options.logprobs)
    if logits is not None and groups.is_sampling_rank:
        packed = pack_token_scores(logits[:, :vocab_size].float(), sampled, options.logprobs)
    scored = [unpack_token_scores(values) for values in groups.broadcast(packed).tolist()]
    return sampled.tolist(), scored


def pack_token_scores(logits: torch.Tensor, sampled: torch.Tensor, top_n: int) -> torch.Tensor:
    """Scores as one tensor that can be broadcast.

    Ids stay exact as fp32 numbers: vocabularies are smaller than 2^24.

    Args:
        logits: fp32 ``[b, v]``.
        sampled: int64 ``[b]``, on the CPU.
        top_n: Number of most likely tokens.

    Returns:
        fp32 ``[b, 1 + 2 * top_n]`` on the CPU: log-probability of ``sampled``, the ``top_n``
        largest log-probabilities, their ids.
    """
    logprobs = logits.log_softmax(-1).cpu()
    values, tokens = logprobs.topk(min(top_n, logprobs.shape[1]))
    return torch.cat((logprobs.gather(1, sampled[:, None]), values, tokens.float()), dim=1)


def unpack_token_scores(values: Sequence[float]) -> TokenScores:
    """The scores in one row of :func:`pack_token_scores`."""
    top_n = (len(values) - 1) // 2
    logprobs, tokens = values[1 : 1 + top_n], values[1 + top_n :]
    return TokenScores(values[0], tuple(zip(map(int, tokens), logprobs, strict=True)))


def check_prompts(
    model: Any, prompts: Sequence[Sequence[int]], options: SamplingOptions, vocab_size: int
) -> None:
    """Refuse prompts that the model cannot continue; the same on every rank, before it runs."""
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise DataError("every prompt needs at least one token")
    if any(not 0 <= token < vocab_size for prompt in prompts for token in prompt):
        raise DataError(f"a prompt has token ids outside the vocabulary of {vocab_size:,} entries")
    if outside := [token for token, _ in options.logit_bias if not 0 <= token < vocab_size]:
        raise DataError(f"logit_bias: the vocabulary of {vocab_size:,} entries has no {outside[0]}")
    if options.logprobs is not None and options.logprobs > vocab_size:
        raise DataError(f"--logprobs {options.logprobs}: the vocabulary has {vocab_size:,} entries")
    longest = max(map(len, prompts)) + options.max_new_tokens
    limit, kind = model.max_sequence_length, model.position_embedding_type
    if longest <= limit:
        return
    if kind == "learned_absolute":
        raise DataError(
            f"prompt and new tokens are {longest:,} tokens long, the model has {limit:,} learned "
            "positions; shorten the prompt or lower --max-new-tokens"
        )
    if kind == "rope":
        warnings.warn(
            f"prompt and new tokens may reach {longest:,} tokens, the model was trained for "
            f"{limit:,} positions: its output beyond them may be worthless",
            stacklevel=2,
        )
