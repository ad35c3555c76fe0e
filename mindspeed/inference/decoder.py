"""Forward passes for decoding: token ids in, logits out, through all pipeline stages.

    first stage --hidden--> ... --hidden--> last stage: logits of all TP ranks gathered

With a KV cache (Megatron's ``StaticInferenceContext``) a pass computes only its new tokens. The
cache takes 2 x layers x batch size x length x kv heads x head size elements over all ranks. Without
(``recompute``) every pass runs the whole sequences, exactly as in training: slow, and the reference
that tests compare the cache with.

Communication: ``b x s x hidden`` elements per pass and stage boundary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from types import SimpleNamespace
from typing import Any

import torch

from mindspeed import device
from mindspeed.inference.parallel_groups import ModelParallelGroups
from mindspeed.models.megatron_delta_net import DeltaNet

# Of each layer keys and values [s, b, h, d], at consecutive positions.
KeysAndValues = dict[int, tuple[torch.Tensor, torch.Tensor]]


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
        """A copy of the sequences and their KV cache."""
        other = Decoder.__new__(Decoder)
        other.__dict__ |= self.__dict__
        if self._context is None:
            return other
        other._context = copy(self._context)
        memory = self._context.key_value_memory_dict
        other._context.key_value_memory_dict = {
            layer: tuple(tensor.clone() for tensor in pair) for layer, pair in memory.items()
        }
        return other

    @property
    def length(self) -> int:
        """Number of tokens that it has seen."""
        return self._context.sequence_len_offset if self._context else self._seen.shape[1]

    def resume(self, parts: Sequence[KeysAndValues], length: int) -> None:
        """Begin with the keys and values of a prompt's first ``length`` tokens, part by part.

        Of a new decoder with a cache only; the next call appends the other tokens.
        """
        if not length:
            return
        room = self._context.max_sequence_length  # type: ignore[union-attr]
        for layer, first in parts[0].items():
            pair = tuple(t.new_empty(room, *t.shape[1:]) for t in first)
            for index, whole in enumerate(pair):
                torch.cat([part[layer][index] for part in parts], out=whole[:length])
            self._context.key_value_memory_dict[layer] = pair  # type: ignore[union-attr]
        self._context.sequence_len_offset = length  # type: ignore[union-attr]

    def keys_and_values(self, start: int, end: int) -> KeysAndValues:
        """Copies of this rank's keys and values at positions ``[start, end)``."""
        memory = self._context.key_value_memory_dict  # type: ignore[union-attr]
        return {
            layer: (key[start:end].clone(), value[start:end].clone())
            for layer, (key, value) in memory.items()
        }

    @property
    def most_bytes_per_token(self) -> int:
        """Size of a token's keys and values, on the rank where it is largest. Collective."""
        return max(1, self._groups.largest(self.cache_bytes // self._context.max_sequence_length))  # type: ignore[union-attr]

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
        """Logits ``[b, s, v]`` after every token of int64 ``tokens [b, s]``, else as a call."""
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
        resumed = start > 0 and length > 1

        def stage() -> torch.Tensor:
            with _causal_after_cache(self._model) if resumed else nullcontext():
                return self._model(  # type: ignore[no-any-return]
                    tokens.to(self._device),
                    torch.arange(start, start + length, device=self._device).expand(batch_size, -1),
                    None if resumed else self._causal_mask(length),
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


@contextmanager
def _causal_after_cache(model: Any) -> Iterator[None]:
    """Several tokens after those of the cache: each sees the cache and those before it.

    Megatron masks nothing once there is a cache, because it appends one token at a time.
    """
    from megatron.core.transformer.attention import Attention

    # Not the enum's member: Megatron 0.12 has none, and only the name is read.
    kind = SimpleNamespace(name="causal_bottom_right")
    modules = [part.core_attention for part in model.modules() if isinstance(part, Attention)]
    for module in modules:
        module.forward = _WithMaskType(module.forward, kind)
    try:
        yield
    finally:
        for module in modules:
            del module.forward


class _WithMaskType:
    """A core attention's ``forward`` with another mask type than the layer's."""

    def __init__(self, forward: Any, kind: Any) -> None:
        self._forward, self._kind = forward, kind

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **{**kwargs, "attn_mask_type": self._kind})
