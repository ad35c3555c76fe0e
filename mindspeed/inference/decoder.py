"""Tokens in, logits of the last one out: passes through all stages of a model.

    first stage --hidden--> ... --hidden--> last stage: logits of all TP ranks gathered

With the cache (Megatron's ``StaticInferenceContext``) a pass costs what its own tokens cost; keys
and values of the rest are kept: 2 x layers x rows x length x kv heads x head size elements over all
ranks. Without (``recompute``) every pass runs the whole sequences, exactly as training does: slow,
and the truth that the cache is compared with.

Per pass and stage boundary ``b x s x hidden`` elements travel.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch

from mindspeed import device
from mindspeed.inference.ranks import ModelRanks


class Decoder:
    """Sequences that grow together, one row each.

    Args:
        model: This rank's stage, a ``GPTModel`` without wrappers.
        ranks: The ranks that hold the model.
        rows: Number of sequences.
        length: Tokens that the longest may reach.
        recompute: Keep no cache.
    """

    def __init__(
        self, model: Any, ranks: ModelRanks, rows: int, length: int, recompute: bool = False
    ) -> None:
        self._model, self._ranks = model, ranks
        self._place = device.current().torch_device()
        self._seen = torch.empty(rows, 0, dtype=torch.long)
        self._context = None
        if not recompute:
            from megatron.core.inference.contexts import StaticInferenceContext

            self._context = StaticInferenceContext(rows, length)

    @property
    def context(self) -> Any:
        """Megatron's, which holds keys and values."""
        return self._context

    def copy(self) -> Decoder:
        """The same sequences once more, to go on differently; with a cache only."""
        other = Decoder.__new__(Decoder)
        other.__dict__ |= self.__dict__
        other._context = copy(self._context)
        memory = self._context.key_value_memory_dict  # type: ignore[union-attr]
        other._context.key_value_memory_dict = {  # type: ignore[union-attr]
            layer: tuple(tensor.clone() for tensor in pair) for layer, pair in memory.items()
        }
        return other

    @property
    def cache_bytes(self) -> int:
        """Memory of this rank's keys and values."""
        pairs = self._context.key_value_memory_dict.values() if self._context else ()
        return sum(t.numel() * t.element_size() for pair in pairs for t in pair)

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """Append ``tokens`` ``[b, s]``; logits ``[b, v]`` behind them, on the last stage only."""
        output = self._append(tokens)
        return None if output is None else output[:, -1]

    def everywhere(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """As a call, with a cache only; logits ``[b, s, v]`` behind each of ``tokens``."""
        self._context.materialize_only_last_token_logits = False  # type: ignore[union-attr]
        try:
            return self._append(tokens)
        finally:
            self._context.materialize_only_last_token_logits = True  # type: ignore[union-attr]

    def _append(self, tokens: torch.Tensor) -> torch.Tensor | None:
        if self._context is None:
            self._seen = tokens = torch.cat((self._seen, tokens), dim=1)
        start = self._context.sequence_len_offset if self._context else 0
        rows, length = tokens.shape
        if length == 1 and start:
            self._context.enable_decode_mode()  # type: ignore[union-attr]

        def stage() -> torch.Tensor:
            return self._model(  # type: ignore[no-any-return]
                tokens.to(self._place),
                torch.arange(start, start + length, device=self._place).expand(rows, -1),
                self._causal_mask(length),
                inference_context=self._context,
                runtime_gather_output=True,
            )

        output = self._ranks.run_stage(self._model, rows, length, stage)
        if self._context is not None:
            self._context.sequence_len_offset += length
        return output

    def select(self, rows: torch.Tensor) -> None:
        """Go on with these rows: row ``i`` becomes a copy of row ``rows[i]``.

        Repeats a prompt for several continuations, follows beams to their parents, drops what has
        ended. Only the part of the cache that is in use is copied.
        """
        if torch.equal(rows, torch.arange(self._rows)):
            return
        if self._context is None:
            self._seen = self._seen[rows]
            return
        rows, used = rows.to(self._place), self._context.sequence_len_offset
        for layer, pair in self._context.key_value_memory_dict.items():
            new = [t.new_empty(t.shape[0], len(rows), *t.shape[2:]) for t in pair]
            for target, source in zip(new, pair, strict=True):
                torch.index_select(source[:used], 1, rows, out=target[:used])
            self._context.key_value_memory_dict[layer] = tuple(new)
        self._context.max_batch_size = len(rows)

    @property
    def _rows(self) -> int:
        return self._context.max_batch_size if self._context else len(self._seen)

    def _causal_mask(self, length: int) -> torch.Tensor | None:
        """Megatron's form: True is hidden. A single token sees all keys there are."""
        if length == 1:
            return None
        return torch.ones(1, 1, length, length, dtype=torch.bool, device=self._place).triu(1)
