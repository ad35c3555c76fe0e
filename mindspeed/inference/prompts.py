"""Prompts of ``generate`` in every accepted form: texts, ids, nested lists, padded tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed.errors import DataError


@dataclass(frozen=True)
class Prompts:
    """Normalised prompts.

    Attributes:
        entries: Texts, or lists of ids without padding.
        single: The caller gave one prompt, not a list of prompts.
    """

    entries: list[str | list[int]]
    single: bool

    @classmethod
    def of(
        cls,
        given: Any,
        attention_mask: torch.Tensor | None = None,
        pad_token_id: int | None = None,
    ) -> Prompts:
        """Normalise the prompts of a caller.

        Args:
            given: A text, ids, a list of either, or an integer tensor ``[s]`` or ``[b, s]``.
            attention_mask: ``[b, s]``, 0 at padding; only with a tensor.
            pad_token_id: Padding id at the start of a tensor, if there is no mask.

        Raises:
            DataError: It has another form.
        """
        if isinstance(given, torch.Tensor):
            return cls._of_tensor(given, attention_mask, pad_token_id)
        if attention_mask is not None:
            raise DataError("attention_mask needs a tensor of ids; lists have no padding")
        if isinstance(given, str):
            return cls([given], True)
        if not isinstance(given, Sequence) or isinstance(given, bytes):
            raise DataError(
                f"input_ids is a {type(given).__name__}; a text, token ids, a list of either or a "
                "tensor is expected"
            )
        if given and all(_is_id(item) for item in given):
            return cls([[int(item) for item in given]], True)
        return cls([_entry(item, index) for index, item in enumerate(given)], False)

    @classmethod
    def _of_tensor(
        cls, given: torch.Tensor, attention_mask: torch.Tensor | None, pad_token_id: int | None
    ) -> Prompts:
        if given.dim() not in (1, 2) or given.is_floating_point():
            raise DataError(
                f"input_ids is a tensor of shape {list(given.shape)} and dtype {given.dtype}; "
                "integer ids [s] or [b, s] are expected"
            )
        batch = given[None] if given.dim() == 1 else given
        if attention_mask is not None:
            mask = attention_mask.reshape(batch.shape).bool()
            if bool((mask[:, :-1] & ~mask[:, 1:]).any()):
                raise DataError(
                    "attention_mask: padding is expected on the left (tokenizer.padding_side)"
                )
        elif pad_token_id is not None:
            mask = (batch != pad_token_id).long().cumsum(-1) > 0
        else:
            mask = torch.ones_like(batch, dtype=torch.bool)
        return cls(
            [ids[keep].tolist() for ids, keep in zip(batch, mask, strict=True)], given.dim() == 1
        )


def _is_id(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _entry(item: Any, index: int) -> str | list[int]:
    if isinstance(item, str):
        return item
    if isinstance(item, torch.Tensor) and item.dim() == 1:
        return item.tolist()
    if isinstance(item, Sequence) and all(_is_id(token) for token in item):
        return [int(token) for token in item]
    raise DataError(f"prompt {index} is neither a text nor a list of token ids: {item!r:.60}")
