"""Continuous batching: requests enter and leave the running batch at any token.

    step 1   A prefill     A A A            first tokens of A's sequences
    step 2   B prefill     A A A B          B has entered: one decode pass for all sequences
    step 3                 A A   B          one sequence of A has ended

A step prefills at most one new request, samples a token for every running sequence and runs one
decode pass for all of them. No request waits for another one to end. Every
sequence is sampled with its request's options and its own random generator, so a request gets the
same tokens as if it ran alone.

Megatron's static KV cache has one length for the whole batch. Here every sequence keeps its own
cache, and each attention layer runs once per sequence, with that sequence's cache and position:

    embedding  [ whole batch ]       MLP  [ whole batch ]       output layer  [ whole batch ]
    attention  [0] [1] [2] ...            (dense or experts)

All other layers read their weights once for the batch; with grouped-query attention they hold four
fifths of the parameters, in MoE models nearly all. Because attention sees one sequence at a time,
every variant (sliding window, ALiBi, latent attention) gives the same result as without batching.
Models that keep no keys and values (gated delta nets) run whole texts, one sequence at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.transformer.attention import Attention

from mindspeed import device
from mindspeed.inference.decoder import Decoder
from mindspeed.inference.generate import (
    TokenScores,
    check_prompts,
    pack_token_scores,
    unpack_token_scores,
)
from mindspeed.inference.grammar import Matcher, mask_all
from mindspeed.inference.prefix_cache import PrefixCache
from mindspeed.inference.sampling import (
    SamplingOptions,
    generator_of,
    process_logits,
    sample_tokens,
)
from mindspeed.inference.text_generator import OutputChunk, TextGenerator
from mindspeed.inference.text_stream import TextStream


class RaggedBatchContext(StaticInferenceContext):
    """The inference contexts of several sequences that decode one token each in the next pass.

    Args:
        contexts: One per sequence, with room for one more token.
    """

    def __init__(self, contexts: Sequence[StaticInferenceContext]) -> None:
        # Megatron computes rotary embeddings of the longest; each sequence uses its part.
        super().__init__(len(contexts), max(c.max_sequence_length for c in contexts))
        self.contexts = list(contexts)
        for context in contexts:
            context.enable_decode_mode()
        self.enable_decode_mode()
        self.sequence_len_offset = max(c.sequence_len_offset for c in contexts)

    def positions(self) -> torch.Tensor:
        """Position of each sequence's next token, int64 ``[b, 1]`` on the CPU."""
        return torch.tensor([[context.sequence_len_offset] for context in self.contexts])

    def advance(self) -> None:
        """Count the token that this pass appended to every sequence."""
        for context in self.contexts:
            context.sequence_len_offset += 1


@contextmanager
def attention_per_sequence(model: Any) -> Iterator[None]:
    """Within this context the model's attention layers accept a :class:`RaggedBatchContext`.

    Args:
        model: A ``GPTModel``, one pipeline stage.
    """
    modules = [module for module in model.modules() if isinstance(module, Attention)]
    for module in modules:
        module.forward = _PerSequence(module.forward)
    try:
        yield
    finally:
        for module in modules:
            del module.forward


class _PerSequence:
    """An attention layer's ``forward`` (hidden states ``[1, b, h]``), called once per sequence."""

    def __init__(self, forward: Any) -> None:
        self._forward = forward

    def __call__(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        context = kwargs.pop("inference_context", None)
        if not isinstance(context, RaggedBatchContext):
            return self._forward(hidden, *args, inference_context=context, **kwargs)
        outputs, bias = [], None
        for index, sequence in enumerate(context.contexts):
            part = hidden[:, index : index + 1]
            output, bias = self._forward(part, *args, inference_context=sequence, **kwargs)
            outputs.append(output)
        return torch.cat(outputs, dim=1), bias


@dataclass(frozen=True)
class PromptScores:
    """Log-probabilities of a prompt's own tokens.

    Attributes:
        index: Sequence of the request, as in :class:`~.text_generator.OutputChunk`.
        tokens: Ids of the prompt.
        scores: Of every token but the first, which has no context.
    """

    index: int
    tokens: tuple[int, ...]
    scores: tuple[TokenScores, ...]


@dataclass(frozen=True)
class CachedPrompt:
    """A prompt whose beginning was not computed again.

    Attributes:
        tokens: Number of tokens whose keys and values a request before has left.
    """

    tokens: int


@dataclass
class _Sequence:
    """One running continuation."""

    index: int  # within its request
    tokens: list[int]
    prompt_length: int
    text: TextStream
    random: torch.Generator
    decoder: Decoder
    logits: torch.Tensor | None  # [v] after the last token; on the last pipeline stage only
    matcher: Matcher | None

    @property
    def new_tokens(self) -> int:
        return len(self.tokens) - self.prompt_length


@dataclass
class _Request:
    options: SamplingOptions
    eos: frozenset[int]
    sequences: list[_Sequence] = field(default_factory=list)


class ContinuousBatcher:
    """A model and the requests that it is answering. Every method is collective.

    Args:
        generator: The model.
        prefixes: Keys and values that requests leave for those that begin alike; None: nothing.
    """

    def __init__(self, generator: TextGenerator, prefixes: PrefixCache | None = None) -> None:
        self._generator, self._groups = generator, generator.groups
        self._prefixes = prefixes
        self._requests: dict[Hashable, _Request] = {}

    @property
    def batch_size(self) -> int:
        """Number of running sequences."""
        return sum(len(request.sequences) for request in self._requests.values())

    def __contains__(self, key: Hashable) -> bool:
        return key in self._requests

    @torch.inference_mode()
    def add(
        self,
        key: Hashable,
        prompts: Sequence[Sequence[int]],
        options: SamplingOptions,
        prompt_scores: bool = False,
    ) -> list[PromptScores | CachedPrompt]:
        """Prefill a request's prompts and add its sequences to the batch.

        Args:
            key: New key of the request.
            prompts: Token ids of each prompt.
            options: Sampling options; beam search is not supported.
            prompt_scores: Also score the tokens of the prompts, with ``options.logprobs``.

        Raises:
            DataError: A prompt is empty, has ids outside the vocabulary, or is too long.
        """
        generator = self._generator
        check_prompts(generator.stage, prompts, options, generator.vocab_size)
        generator.stage.eval()
        request = _Request(options, generator.end_tokens(options))
        detokenize = generator.detokenizer(options.shown)
        events: list[PromptScores | CachedPrompt] = []
        for prompt_index, prompt in enumerate(prompts):
            decoder, logits, scores, cached = self._prefill(prompt, options, prompt_scores)
            if cached:
                events.append(CachedPrompt(cached))
            for copy in range(options.num_return_sequences):
                index = prompt_index * options.num_return_sequences + copy
                if prompt_scores:
                    events.append(PromptScores(index, tuple(prompt), scores))
                request.sequences.append(
                    _Sequence(
                        index,
                        list(prompt),
                        len(prompt),
                        TextStream(detokenize, prompt, options.stop),
                        generator_of(options.seed, index),
                        decoder if copy == 0 else decoder.copy(),
                        logits,
                        generator.matcher(options),
                    )
                )
        self._requests[key] = request
        return events

    def remove(self, key: Hashable) -> None:
        """Drop a request; a no-op if it has ended."""
        self._requests.pop(key, None)

    @torch.inference_mode()
    def step(self) -> Iterator[tuple[Hashable, OutputChunk]]:
        """Sample one token for every sequence, yield the new output, then run one decode pass."""
        for key, request in list(self._requests.items()):
            for chunk in self._sample(request):
                yield key, chunk
            if not request.sequences:
                del self._requests[key]
        sequences = [s for request in self._requests.values() for s in request.sequences]
        if sequences:
            self._decode(sequences)

    def _prefill(
        self, prompt: Sequence[int], options: SamplingOptions, prompt_scores: bool
    ) -> tuple[Decoder, torch.Tensor | None, tuple[TokenScores, ...], int]:
        """Decoder with the prompt's KV cache, logits ``[v]`` after it, scores of its tokens.

        Last the number of tokens that were in the prefix cache: none where all are to be scored.
        """
        max_length = len(prompt) + options.max_new_tokens
        decoder = Decoder(self._generator.stage, self._groups, 1, max_length)
        tokens = torch.tensor([list(prompt)])
        if not prompt_scores:
            cached = 0 if self._prefixes is None else self._prefixes.restore(prompt, decoder)
            logits = decoder(tokens[:, cached:])
            self._keep(prompt, decoder)
            return decoder, None if logits is None else logits[0], (), cached
        all_logits = decoder.all_positions(tokens)
        self._keep(prompt, decoder)
        top_n = options.logprobs or 0
        packed = torch.zeros(len(prompt) - 1, 1 + 2 * top_n)
        if all_logits is not None and self._groups.is_sampling_rank:
            logits = all_logits[0, :-1, : self._generator.vocab_size].float()
            packed = pack_token_scores(logits, tokens[0, 1:], top_n)
        scores = tuple(
            unpack_token_scores(values) for values in self._groups.broadcast(packed).tolist()
        )
        return decoder, None if all_logits is None else all_logits[0, -1], scores, 0

    def _keep(self, tokens: Sequence[int], decoder: Decoder) -> None:
        if self._prefixes is not None:
            self._prefixes.keep(tokens, decoder)

    def _sample(self, request: _Request) -> list[OutputChunk]:
        """Sample one token for each of the request's sequences and drop those that ended."""
        sequences, options = request.sequences, request.options
        sampled = torch.zeros(len(sequences), dtype=torch.long)
        top_n = options.logprobs
        packed = torch.zeros(len(sequences), 1 + 2 * (top_n or 0))
        if self._groups.is_sampling_rank:
            vocab_size = self._generator.vocab_size
            logits = torch.stack([s.logits[:vocab_size].float() for s in sequences])  # type: ignore[index]
            for index, sequence in enumerate(sequences):
                context = torch.tensor([sequence.tokens])
                scores = process_logits(
                    logits[index : index + 1], context, options, request.eos, [sequence.new_tokens]
                )
                scores = mask_all(scores, [sequence.matcher])
                sampled[index] = sample_tokens(scores, options, [sequence.random])[0]
            if top_n is not None:
                packed = pack_token_scores(logits, sampled, top_n)
        tokens = self._groups.broadcast(sampled).tolist()
        token_scores: list[TokenScores | None] = [None] * len(sequences)
        if top_n is not None:
            token_scores = [
                unpack_token_scores(values) for values in self._groups.broadcast(packed).tolist()
            ]
        chunks = [
            self._append(request, sequence, token, scores)
            for sequence, token, scores in zip(sequences, tokens, token_scores, strict=True)
        ]
        ended = [chunk.finish is not None for chunk in chunks]
        for sequence in itertools.compress(sequences, ended):
            length = sequence.decoder.length  # without the last token, which nothing has read
            self._keep(sequence.tokens[:length], sequence.decoder)
        request.sequences = [s for s, done in zip(sequences, ended, strict=True) if not done]
        return chunks

    def _append(
        self, request: _Request, sequence: _Sequence, token: int, scores: TokenScores | None
    ) -> OutputChunk:
        """Append a sampled token to its sequence; the text that is certain now."""
        text = sequence.text
        if token in request.eos:
            end = None if scores is None else token
            return OutputChunk(sequence.index, text.finish(), None, scores, "stop", end)
        sequence.tokens.append(token)
        if sequence.matcher is not None:
            sequence.matcher.accept(token)
        new_text, finish = text.push(token), None
        if text.stopped:
            finish = "stop"
        elif sequence.new_tokens == request.options.max_new_tokens:
            finish = "length"
        if finish is not None:
            new_text += text.finish()
            finish = "stop" if text.stopped else finish
        return OutputChunk(sequence.index, new_text, token, scores, finish)

    def _decode(self, sequences: Sequence[_Sequence]) -> None:
        """Run the last token of every sequence through the model."""
        passes = dict[Any, list[_Sequence]]()
        for sequence in sequences:
            passes.setdefault(self._pass_of(sequence), []).append(sequence)
        for together in passes.values():
            if together[0].decoder.context is not None:
                self._decode_together(together)
                continue
            (alone,) = together
            logits = alone.decoder(torch.tensor([alone.tokens[-1:]]))
            alone.logits = None if logits is None else logits[0]

    def _pass_of(self, sequence: _Sequence) -> Any:
        """The same for sequences that share a pass: all, if the model allows it."""
        context = sequence.decoder.context
        if context is None:
            return id(sequence)
        alike = getattr(self._generator.stage, "rotary_pos_emb", None)
        return context.max_sequence_length if getattr(alike, "depends_on_length", False) else 0

    def _decode_together(self, sequences: Sequence[_Sequence]) -> None:
        model, target = self._generator.stage, device.current().torch_device()
        context = RaggedBatchContext([sequence.decoder.context for sequence in sequences])
        last_tokens = torch.tensor([[sequence.tokens[-1]] for sequence in sequences])

        def stage() -> torch.Tensor:
            with attention_per_sequence(model):
                return model(  # type: ignore[no-any-return]
                    last_tokens.to(target),
                    context.positions().to(target),
                    None,
                    inference_context=context,
                    runtime_gather_output=True,
                )

        output = self._groups.run_stage(model, len(sequences), 1, stage)
        context.advance()
        for index, sequence in enumerate(sequences):
            sequence.logits = None if output is None else output[index, -1]
