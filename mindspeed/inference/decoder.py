"""Forward passes for decoding: token ids in, logits out, through all pipeline stages.

    first stage --hidden--> ... --hidden--> last stage: logits of all TP ranks gathered

With a KV cache (Megatron's ``StaticInferenceContext``) a pass computes only its new tokens. The
cache takes 2 x layers x batch size x length x kv heads x head size elements over all ranks. Without
(``recompute``) every pass runs the whole sequences, exactly as in training: slow, and the reference
that tests compare the cache with.

Communication: ``b x s x hidden`` elements per pass and stage boundary.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch

from mindspeed import device
from mindspeed.errors import ConfigError
from mindspeed.inference.parallel_groups import ModelParallelGroups
from mindspeed.models.megatron_delta_net import DeltaNet


class Decoder:
    """A batch of sequences of equal length that grow together.

    Args:
        model: This rank's stage, a ``GPTModel`` without wrappers.
        groups: Process groups of the model.
        batch_size: Number of sequences.
        max_length: Maximum tokens per sequence.
        recompute: Keep no KV cache; so it is where a layer keeps something else (gated delta nets).
    """

    def __init__(
        self,
        model: Any,
        groups: ModelParallelGroups,
        batch_size: int,
        max_length: int,
        recompute: bool = False,
    ) -> None:
        self._model, self._groups = model, groups
        self._device = device.current().torch_device()
        self._seen = torch.empty(batch_size, 0, dtype=torch.long)
        self._context = None
        recompute = recompute or any(isinstance(part, DeltaNet) for part in model.modules())
        if not recompute:
            from megatron.core.inference.contexts import StaticInferenceContext

            self._context = StaticInferenceContext(batch_size, max_length)

    @property
    def context(self) -> Any:
        """Megatron's inference context, which holds the KV cache."""
        return self._context

    def copy(self) -> Decoder:
        """A copy of the sequences and their KV cache.

        Raises:
            ConfigError: There is no cache.
        """
        if self._context is None:
            raise ConfigError(
                "requests are not batched for models with gated delta nets, which keep a state and "
                "no keys and values: use mindspeed generate or mindspeed evaluate"
            )
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
        """Size of this rank's KV cache in bytes."""
        pairs = self._context.key_value_memory_dict.values() if self._context else ()
        return sum(t.numel() * t.element_size() for pair in pairs for t in pair)

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """Append int64 ``tokens`` ``[b, s]``; on the last stage logits ``[b, v]`` after them."""
        output = self._append(tokens)
        return None if output is None else output[:, -1]

    def all_positions(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """As a call with int64 ``tokens [b, s]``, but logits ``[b, s, v]`` after every token."""
        if self._context is None:
            output = self._append(tokens)
            return None if output is None else output[:, -tokens.shape[1] :]
        self._context.materialize_only_last_token_logits = False  # type: ignore[union-attr]
        try:
            return self._append(tokens)
        finally:
            self._context.materialize_only_last_token_logits = True  # type: ignore[union-attr]

    def _append(self, tokens: torch.Tensor) -> torch.Tensor | None:
        if self._context is None:
            self._seen = tokens = torch.cat((self._seen, tokens), dim=1)
        start = self._context.sequence_len_offset if self._context else 0
        batch_size, length = tokens.shape
        if length == 1 and start:
            self._context.enable_decode_mode()  # type: ignore[union-attr]

        def stage() -> torch.Tensor:
            return self._model(  # type: ignore[no-any-return]
                tokens.to(self._device),
                torch.arange(start, start + length, device=self._device).expand(batch_size, -1),
                self._causal_mask(length),
                inference_context=self._context,
                runtime_gather_output=True,
            )

        output = self._groups.run_stage(self._model, batch_size, length, stage)
        if self._context is not None:
            self._context.sequence_len_offset += length
        return output

    def select(self, indices: torch.Tensor) -> None:
        """Reindex the batch: sequence ``i`` becomes a copy of sequence ``indices[i]``.

        Repeats a prompt for several continuations, follows beams to their parents, drops ended
        sequences. Only the used part of the KV cache is copied.

        Args:
            indices: int64 ``[new batch size]`` on the CPU.
        """
        if torch.equal(indices, torch.arange(self._batch_size)):
            return
        if self._context is None:
            self._seen = self._seen[indices]
            return
        indices, used = indices.to(self._device), self._context.sequence_len_offset
        for layer, pair in self._context.key_value_memory_dict.items():
            new = [t.new_empty(t.shape[0], len(indices), *t.shape[2:]) for t in pair]
            for target, source in zip(new, pair, strict=True):
                torch.index_select(source[:used], 1, indices, out=target[:used])
            self._context.key_value_memory_dict[layer] = tuple(new)
        self._context.max_batch_size = len(indices)

    @property
    def _batch_size(self) -> int:
        return self._context.max_batch_size if self._context else len(self._seen)

    def _causal_mask(self, length: int) -> torch.Tensor | None:
        """bool ``[1, 1, s, s]``, True where masked; None for one token, which sees all keys."""
        if length == 1:
            return None
        return torch.ones(1, 1, length, length, dtype=torch.bool, device=self._device).triu(1)
