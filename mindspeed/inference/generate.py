"""Continue token sequences with a GPT under tensor and pipeline parallelism.

The prompt goes through the model once, then one token at a time; Megatron's
``StaticInferenceContext`` keeps the keys and values. Prompts of different length run in one batch
without padding: the batch starts at the shortest, and longer ones are fed their own next token
instead of the model's until they end.

    first stage --hidden--> ... --hidden--> last stage: logits of all TP ranks gathered
         ^                                       | first rank of the last stage chooses
         +------------- token ids, broadcast ----+ over the model-parallel group

Per step and stage boundary ``b x s x hidden`` elements travel, and ``b`` ids are broadcast: all
ranks see the same ids and cannot diverge.

Megatron's ``StaticInferenceEngine`` is not used: it sends the whole logits to every stage through a
function that insists on CUDA tensors, cannot combine top-k with top-p, maps padded vocabulary
entries to the last real token, and is announced to be removed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mindspeed import device
from mindspeed.errors import DataError
from mindspeed.inference.sampling import SamplingOptions, choose


@dataclass(frozen=True)
class ModelRanks:
    """This rank's neighbours in the pipeline and the ranks that share one copy of the model."""

    pipeline: dist.ProcessGroup
    model: dist.ProcessGroup

    @classmethod
    def of_megatron(cls) -> ModelRanks:
        """The groups of ``megatron.core.parallel_state``."""
        from megatron.core import parallel_state

        return cls(
            parallel_state.get_pipeline_model_parallel_group(),
            parallel_state.get_model_parallel_group(),
        )

    @property
    def first(self) -> bool:
        return self.pipeline.rank() == 0

    @property
    def last(self) -> bool:
        return self.pipeline.rank() == self.pipeline.size() - 1

    @property
    def chooser(self) -> int:
        """Global rank of the first tensor-parallel rank of the last stage.

        Megatron numbers the ranks of a model so that tensor parallelism varies fastest.
        """
        stage_size = self.model.size() // self.pipeline.size()
        return dist.get_global_rank(self.model, self.model.size() - stage_size)

    def neighbour(self, step: int) -> int:
        """Global rank of the same place ``step`` stages on."""
        return dist.get_global_rank(self.pipeline, self.pipeline.rank() + step)


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    options: SamplingOptions,
    *,
    ranks: ModelRanks,
    vocab_size: int,
    eod: int | None = None,
) -> list[list[int]]:
    """Return the new tokens of every prompt; ``eod`` ends a sequence and is not returned."""
    output: list[list[int]] = [[] for _ in prompts]
    for step in stream(model, prompts, options, ranks=ranks, vocab_size=vocab_size, eod=eod):
        for row, token in step.items():
            output[row].append(token)
    return output


@torch.inference_mode()
def stream(
    model: Any,
    prompts: Sequence[Sequence[int]],
    options: SamplingOptions,
    *,
    ranks: ModelRanks,
    vocab_size: int,
    eod: int | None = None,
) -> Iterator[dict[int, int]]:
    """Yield ``{row: new token}`` after every step; the same on every rank of the model.

    Args:
        model: This rank's stage, a ``GPTModel`` without wrappers. It is put into evaluation mode.
        prompts: Token ids of each prompt, at least one.
        options: How many tokens, and how they are chosen.
        ranks: The ranks that hold the model.
        vocab_size: Entries of the tokenizer; the model's padded entries are never chosen.
        eod: The id that ends a sequence; None to go on to the last token.

    Raises:
        DataError: A prompt is empty, or has ids outside the vocabulary, or is too long.
    """
    _check(model, prompts, options, vocab_size)
    model.eval()
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    ends = lengths + options.max_new_tokens
    tokens = torch.zeros(len(prompts), int(ends.max()), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    context = _context(len(prompts), tokens.shape[1])
    generator = torch.Generator().manual_seed(options.seed)
    running = torch.ones(len(prompts), dtype=torch.bool)
    start, end = 0, int(lengths.min())
    while bool(running.any()) and end < tokens.shape[1]:
        logits = _forward(model, tokens[:, start:end], context, ranks)
        chosen = torch.zeros(len(prompts), dtype=torch.long)
        if logits is not None and dist.get_rank() == ranks.chooser:
            chosen = choose(logits[:, -1, :vocab_size], options, generator)
        chosen = _broadcast(chosen, ranks)
        fresh = running & (lengths <= end)  # rows past their prompt
        ended = fresh & (chosen == eod) if eod is not None else torch.zeros_like(fresh)
        fresh &= ~ended
        tokens[fresh, end] = chosen[fresh]
        start, end = end, end + 1
        running &= ~ended & (ends > end)
        yield {row: int(chosen[row]) for row in fresh.nonzero()[:, 0].tolist()}


def _context(batch: int, length: int) -> Any:
    from megatron.core.inference.contexts import StaticInferenceContext

    return StaticInferenceContext(batch, length)


def _forward(
    model: Any, tokens: torch.Tensor, context: Any, ranks: ModelRanks
) -> torch.Tensor | None:
    """One pass of ``tokens`` ``[b, s]`` through all stages; logits ``[b, 1, v]`` on the last."""
    place = device.current().torch_device()
    batch, length = tokens.shape
    start = context.sequence_len_offset
    positions = torch.arange(start, start + length, device=place).expand(batch, -1)
    if length == 1 and start:
        context.enable_decode_mode()
    if not ranks.first:
        shape = (length, batch, model.config.hidden_size)
        hidden = torch.empty(shape, dtype=_pipeline_dtype(model), device=place)
        dist.recv(hidden, src=ranks.neighbour(-1), group=ranks.pipeline)
        model.set_input_tensor(hidden)
    output = model(
        tokens.to(place),
        positions,
        _causal_mask(length, place),
        inference_context=context,
        runtime_gather_output=True,
    )
    context.sequence_len_offset += length
    if ranks.last:
        return output
    dist.send(output.to(_pipeline_dtype(model)).contiguous(), ranks.neighbour(1), ranks.pipeline)
    return None


def _broadcast(chosen: torch.Tensor, ranks: ModelRanks) -> torch.Tensor:
    """The chooser's ids on every rank."""
    if ranks.model.size() == 1:
        return chosen
    chosen = chosen.to(device.current().torch_device())
    dist.broadcast(chosen, src=ranks.chooser, group=ranks.model)
    return chosen.cpu()


def _causal_mask(length: int, place: torch.device) -> torch.Tensor | None:
    """Megatron's form: True is hidden. A single token sees all keys there are."""
    if length == 1:
        return None
    return torch.ones(1, 1, length, length, dtype=torch.bool, device=place).triu(1)


def _pipeline_dtype(model: Any) -> torch.dtype:
    return model.config.pipeline_dtype or model.config.params_dtype


def _check(
    model: Any, prompts: Sequence[Sequence[int]], options: SamplingOptions, vocab_size: int
) -> None:
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise DataError("every prompt needs at least one token")
    if any(not 0 <= token < vocab_size for prompt in prompts for token in prompt):
        raise DataError(f"a prompt has token ids outside the vocabulary of {vocab_size:,} entries")
    longest = max(map(len, prompts)) + options.max_new_tokens
    limit = model.max_sequence_length
    if model.position_embedding_type == "learned_absolute" and longest > limit:
        raise DataError(
            f"prompt and new tokens are {longest:,} tokens long, the model has {limit:,} learned "
            "positions; shorten the prompt or lower --max-new-tokens"
        )
