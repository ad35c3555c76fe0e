"""Keys and values of prompts that have been computed, kept for requests that begin alike.

    request 1   [system prompt . . . . . ][question 1]        computed, kept in blocks of 16 tokens
    request 2   [system prompt . . . . . ][question 2]        blocks are copied, question 2 computed
    request 3   [system prompt . . . . . ][question 1][answer 1][question 3]

A block is found by its tokens and by the block before it, so keys and values are those of the whole
text up to there. The least recently used blocks are dropped first, a block never before those that
follow it. Every rank keeps its own layers and heads of the same blocks: what is found follows from
the tokens alone, and ranks cannot diverge.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed.inference.decoder import Decoder, KeysAndValues
from mindspeed.models.megatron_delta_net import DeltaNet

BLOCK = 16  # tokens
GIB = 1 << 30


@dataclass(frozen=True)
class _Block:
    number: int
    content: KeysAndValues


class PrefixCache:
    """Blocks of tokens and their keys and values on this rank.

    Args:
        max_bytes: Of all blocks, on the rank with the largest ones.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._blocks = OrderedDict[tuple[int, tuple[int, ...]], _Block]()
        self._numbers = itertools.count(1)
        self._capacity: int | None = None  # blocks

    @property
    def bytes(self) -> int:
        """Size of all blocks on this rank."""
        tensors = (t for b in self._blocks.values() for pair in b.content.values() for t in pair)
        return sum(t.numel() * t.element_size() for t in tensors)

    def restore(self, tokens: Sequence[int], decoder: Decoder) -> int:
        """Give a new decoder the keys and values of the longest known beginning of a prompt.

        The last token is always left to compute, because its logits are needed.

        Returns:
            Number of tokens of that beginning.
        """
        found = self._walk(tokens[:-1])
        decoder.resume([self._blocks[key].content for key in found], len(found) * BLOCK)
        self._touch(found)
        return len(found) * BLOCK

    def keep(self, tokens: Sequence[int], decoder: Decoder) -> None:
        """Keep the keys and values of a sequence. Collective.

        Args:
            tokens: Those that the decoder has seen.
            decoder: Of one sequence.
        """
        if self._capacity is None:
            self._capacity = self.max_bytes // (BLOCK * decoder.most_bytes_per_token)
        found = self._walk(tokens)
        for index in range(len(found), min(len(tokens) // BLOCK, self._capacity)):
            parent = self._blocks[found[-1]].number if found else 0
            start = index * BLOCK
            key = (parent, tuple(tokens[start : start + BLOCK]))
            content = decoder.keys_and_values(start, start + BLOCK)
            self._blocks[key] = _Block(next(self._numbers), content)
            found.append(key)
        self._touch(found)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)

    def _walk(self, tokens: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
        """Keys of the known blocks that the tokens begin with."""
        found: list[tuple[int, tuple[int, ...]]] = []
        number = 0
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            key = (number, tuple(tokens[start : start + BLOCK]))
            if key not in self._blocks:
                break
            found.append(key)
            number = self._blocks[key].number
        return found

    def _touch(self, keys: Sequence[tuple[int, tuple[int, ...]]]) -> None:
        """Mark as used, the first block last: it is dropped after those that follow it."""
        for key in reversed(keys):
            self._blocks.move_to_end(key)


def why_not_shared(model: Any) -> str | None:
    """Why texts that begin alike have no keys and values in common; None: they have.

    Args:
        model: This rank's stage of a ``GPTModel``.
    """
    if any(isinstance(part, DeltaNet) for part in model.modules()):
        return "gated delta nets keep a state, which cannot be cut to a shorter text"
    if getattr(getattr(model, "rotary_pos_emb", None), "depends_on_length", False):
        return "the rotary embedding depends on the length of the whole text"
    if model.config.moe_expert_capacity_factor is not None:
        return "experts with a capacity drop tokens, by all tokens of a pass"
    return None
