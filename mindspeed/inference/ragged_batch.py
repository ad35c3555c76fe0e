"""One decode pass for a ragged batch: sequences of different lengths, each with its own KV cache.

Megatron's static KV cache has one length for the whole batch. Here every sequence keeps its own
cache, and each attention layer runs once per sequence, with that sequence's cache and position:

    embedding  [ whole batch ]       MLP  [ whole batch ]       output layer  [ whole batch ]
    attention  [0] [1] [2] ...            (dense or experts)

All other layers read their weights once for the batch; with grouped-query attention they hold four
fifths of the parameters, in MoE models nearly all. Because attention sees one sequence at a time,
every variant (sliding window, ALiBi, latent attention) gives the same result as without batching.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.transformer.attention import Attention


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
