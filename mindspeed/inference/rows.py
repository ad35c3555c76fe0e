"""One pass for rows of different lengths, each with a cache of its own.

Megatron's cache has one length for all rows of a batch. Here every row has its own cache, and where
a pass comes to an attention, each row goes through it alone, with its cache and at its position:

    embedding  [ all rows ]       MLP  [ all rows ]       output layer  [ all rows ]
    attention  [0] [1] [2] ...         (dense or experts)

Everything else reads its weights once for all rows: with grouped queries four fifths of the model
and more, with experts nearly all of it. What a row gets is what it gets alone, whatever attention
the model has (windows, ALiBi, latent attention), because it is alone there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.transformer.attention import Attention


class Rows(StaticInferenceContext):
    """The contexts of several rows that take one token each in the next pass.

    Args:
        contexts: One row each, with room for a token.
    """

    def __init__(self, contexts: Sequence[StaticInferenceContext]) -> None:
        # The longest: Megatron makes rotary embeddings of this length, rows take their part.
        super().__init__(len(contexts), max(c.max_sequence_length for c in contexts))
        self.contexts = list(contexts)
        for context in contexts:
            context.enable_decode_mode()
        self.enable_decode_mode()
        self.sequence_len_offset = max(c.sequence_len_offset for c in contexts)

    def positions(self) -> torch.Tensor:
        """Where each row's token stands, ``[b, 1]``."""
        return torch.tensor([[context.sequence_len_offset] for context in self.contexts])

    def advance(self) -> None:
        """The pass is over."""
        for context in self.contexts:
            context.sequence_len_offset += 1


@contextmanager
def attention_by_rows(model: Any) -> Iterator[None]:
    """Inside, the model's attentions understand :class:`Rows`.

    Args:
        model: A ``GPTModel``, one pipeline stage.
    """
    modules = [module for module in model.modules() if isinstance(module, Attention)]
    for module in modules:
        module.forward = _RowByRow(module.forward)
    try:
        yield
    finally:
        for module in modules:
            del module.forward


class _RowByRow:
    """An attention's ``forward`` (``[s, b, h]``), called once for each row of :class:`Rows`."""

    def __init__(self, forward: Any) -> None:
        self._forward = forward

    def __call__(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        context = kwargs.pop("inference_context", None)
        if not isinstance(context, Rows):
            return self._forward(hidden, *args, inference_context=context, **kwargs)
        outputs, bias = [], None
        for row, alone in enumerate(context.contexts):
            part = hidden[:, row : row + 1]
            output, bias = self._forward(part, *args, inference_context=alone, **kwargs)
            outputs.append(output)
        return torch.cat(outputs, dim=1), bias
