"""The checks of the documented attention functions, and their translation into a problem."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed.ops._check import ArgumentCheck
from mindspeed.ops.attention_problem import ALIBI, ALIBI_SQRT, axis
from mindspeed.ops.visibility import (
    CUT_BEHIND,
    CUT_IN_FRONT,
    MASK_ONLY,
    MODES,
    PREFIX,
    PREFIX_FULL,
    UNCUT,
)

LAYOUTS = ("BSH", "SBH", "BSND", "BNSD", "TND")
MERGED_HEADS = {"SBH": "SBND", "BSH": "BSND"}
LARGEST_HEAD = 768
PREFIX_MASK = (3072, 2048)
TRIANGLE_MASK = (2048, 2048)

Lengths = Sequence[int] | Tensor | None
Start = Sequence[int] | None


class AttentionArguments:
    """Checked q, k and v with an axis for the heads, and the checks of everything else.

    Attributes:
        order: letters of their axes.
        packed: whether the layout is TND.
    """

    def __init__(
        self,
        check: ArgumentCheck,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        heads: int,
        layout: str,
    ) -> None:
        self.check, self.heads = check, heads
        check.floating(query=query, key=key, value=value)
        known = isinstance(layout, str) and layout.upper() in LAYOUTS
        check.require(known, "input_layout", f"one of {', '.join(LAYOUTS)}", layout)
        name = layout.upper()
        self.order, self.packed = MERGED_HEADS.get(name, name), name == "TND"
        check.rank(len(name), query=query, key=key, value=value)
        check.integer(head_num=heads)
        check.require(heads > 0, "head_num", "a positive number", heads)
        self.q, self.k, self.v = query, key, value
        if name in MERGED_HEADS:
            self._split_heads()
        self._agree()

    def _split_heads(self) -> None:
        hidden = self.q.shape[-1]
        fits = hidden > 0 and hidden % self.heads == 0
        self.check.require(fits, "head_num", f"a divisor of {hidden}", self.heads)
        size = hidden // self.heads
        fits = self.k.shape[-1] > 0 and self.k.shape[-1] % size == 0
        self.check.require(fits, "key", f"heads of size {size}", tuple(self.k.shape))
        groups = self.k.shape[-1] // size
        fits = self.v.shape[-1] % groups == 0
        self.check.require(fits, "value", f"{groups} heads like the key", tuple(self.v.shape))
        self.q = self.q.unflatten(-1, (self.heads, size))
        self.k, self.v = (x.unflatten(-1, (groups, -1)) for x in (self.k, self.v))

    def _agree(self) -> None:
        require, q, k, v = self.check.require, self.q, self.k, self.v
        heads, groups, size = self._size(q, "N"), self._size(k, "N"), q.shape[-1]
        require(heads == self.heads, "head_num", f"the query's heads, {heads}", self.heads)
        divides = groups > 0 and heads % groups == 0
        require(divides, "key", f"a number of heads that divides {heads}", groups)
        require(k.shape[-1] == size, "key", f"head size {size}", k.shape[-1])
        like_key = v.shape[:-1] == k.shape[:-1]
        require(like_key, "value", f"shape {(*k.shape[:-1], 'D_v')}", tuple(v.shape))
        require(0 < v.shape[-1] <= size, "value", f"a head size of at most {size}", v.shape[-1])
        require(size <= LARGEST_HEAD, "query", f"a head size of at most {LARGEST_HEAD}", size)
        if not self.packed:
            batch, other = self._size(q, "B"), self._size(k, "B")
            require(other == batch, "key", f"batch size {batch}", other)

    def _size(self, x: Tensor, name: str) -> int:
        return x.shape[axis(self.order, name)]

    def check_numbers(
        self, padding_mask: Tensor | None, keep_prob: float, **numbers: float
    ) -> None:
        """Refuse a padding mask, which no device supports, and probabilities outside their range.

        Args:
            padding_mask: must be None.
            keep_prob: probability to keep, in (0, 1].
            **numbers: other arguments that must be numbers.
        """
        self.check.number(keep_prob=keep_prob, **numbers)
        self.check.require(padding_mask is None, "padding_mask", "None", padding_mask)
        self.check.require(0 < keep_prob <= 1, "keep_prob", "a number in (0, 1]", keep_prob)

    def options(
        self,
        mode: int,
        mask: Tensor | None,
        band: tuple[int, int],
        prefix: Sequence[int] | None,
        ends: tuple[Lengths, Lengths],
        pse: Tensor | None,
        pse_type: int,
        starts: tuple[Start, Start],
    ) -> dict[str, Any]:
        """Return checked fields of ``AttentionProblem``.

        Args:
            mask: ``atten_mask``, bool or uint8: ``[B, N, Sq, Skv]``, ``[B, 1, Sq, Skv]``,
                ``[1, 1, Sq, Skv]``, ``[Sq, Skv]``, or the compressed mask of the mode.
            band: ``(pre_tokens, next_tokens)``.
            prefix: one number per batch entry, or None.
            ends: ``(actual_seq_qlen, actual_seq_kvlen)``.
            pse: dtype of the query, broadcastable to ``[B, N, Sq, Skv]``; for ``pse_type`` 2 and 3
                fp32 slopes ``[N]`` or ``[B, N]``.
            pse_type: 0 to 3.
            starts: ``(q_start_idx, kv_start_idx)``.
        """
        check = self.check
        check.choice(MODES, sparse_mode=mode)
        if mode in (CUT_BEHIND, CUT_IN_FRONT):
            check.require(self.packed, "input_layout", f"TND for sparse_mode {mode}", self.order)
            check.require(pse is None, "pse", f"None for sparse_mode {mode}", pse)
        lengths = self._lengths(*ends)
        sequences = lengths["cu_q"].numel() - 1 if self.packed else self._size(self.q, "B")
        self._check_bias(pse, pse_type, sequences, lengths)
        check.integer(pre_tokens=band[0], next_tokens=band[1])
        names = ("q_start_idx", "kv_start_idx")
        q_start, k_start = map(self._start, names, starts)
        return {
            "layout": self.order,
            "pse": pse,
            "pse_type": pse_type,
            "q_start": q_start,
            "k_start": k_start,
            **lengths,
            **self._rules(mode, mask, band, prefix, sequences, lengths),
        }

    def _start(self, name: str, given: Start) -> int:
        if given is None:
            return 0
        listed = isinstance(given, (list, tuple)) and len(given) < 2
        self.check.require(listed, name, "a list of one number", given)
        for one in given:
            self.check.integer(**{name: one})
        return given[0] if given else 0

    def _rules(
        self,
        mode: int,
        mask: Tensor | None,
        band: tuple[int, int],
        prefix: Sequence[int] | None,
        sequences: int,
        lengths: dict[str, Tensor],
    ) -> dict[str, Any]:
        """The fields that hide keys; without a mask every key is visible."""
        if mask is None:
            return {"mode": MASK_ONLY}
        self.check.dtype((torch.bool, torch.uint8), atten_mask=mask)
        self.check.same("device", query=self.q, atten_mask=mask)
        rules: dict[str, Any] = {"mode": mode, "pre": band[0], "next": band[1]}
        if mode in (PREFIX_FULL, PREFIX):
            given = prefix is not None and len(prefix) == sequences
            wanted = f"{sequences} numbers for sparse_mode {mode}"
            self.check.require(given, "prefix", wanted, prefix)
            rules["prefix"] = list(prefix or ())
        if mode in (UNCUT, MASK_ONLY, PREFIX_FULL):
            fits = not (self.packed and mode == PREFIX_FULL)
            self.check.require(fits, "sparse_mode", "6 for a prefix with TND", mode)
            allowed = self._mask_shapes(lengths)
        else:
            allowed = [PREFIX_MASK if mode == PREFIX else TRIANGLE_MASK]
        wanted = f"shape {' or '.join(map(str, allowed))} for sparse_mode {mode}"
        self.check.require(tuple(mask.shape) in allowed, "atten_mask", wanted, tuple(mask.shape))
        return {**rules, "mask": mask.bool()} if mode in (UNCUT, MASK_ONLY) else rules

    def _mask_shapes(self, lengths: dict[str, Tensor]) -> list[tuple[int, ...]]:
        if self.packed:  # the longest sequence's; shorter ones take its top left corner
            return [tuple(int(x.diff().max()) for x in lengths.values())]
        batch, matrix = self._size(self.q, "B"), (self._size(self.q, "S"), self._size(self.k, "S"))
        return [(batch, self.heads, *matrix), (batch, 1, *matrix), (1, 1, *matrix), matrix]

    def _check_bias(
        self, pse: Tensor | None, pse_type: int, sequences: int, lengths: dict[str, Tensor]
    ) -> None:
        self.check.choice(range(4), pse_type=pse_type)
        if pse is None:
            return
        self.check.same("device", query=self.q, pse=pse)
        if pse_type in (ALIBI, ALIBI_SQRT):
            self.check.dtype((torch.float32,), pse=pse)
            allowed = [(self.heads,), (sequences, self.heads)]
            fits = tuple(pse.shape) in allowed
            self.check.require(fits, "pse", f"slopes of shape {allowed}", tuple(pse.shape))
            if self.packed:
                square = torch.equal(lengths["cu_q"], lengths["cu_k"])
            else:
                square = self._size(self.q, "S") == self._size(self.k, "S")
            self.check.require(square, "pse_type", "0 or 1 where Sq is not Skv", pse_type)
            return
        self.check.same("dtype", query=self.q, pse=pse)
        self.check.require(not self.packed, "pse_type", "2 or 3 with TND", pse_type)
        full = self._mask_shapes(lengths)[0]
        fits = pse.dim() == 4 and all(n in (1, m) for n, m in zip(pse.shape, full, strict=True))
        self.check.require(fits, "pse", f"a shape that broadcasts to {full}", tuple(pse.shape))

    def _lengths(self, q_ends: Lengths, k_ends: Lengths) -> dict[str, Tensor]:
        names = ("actual_seq_qlen", "actual_seq_kvlen")
        if not self.packed:
            for name, ends in zip(names, (q_ends, k_ends), strict=True):
                self.check.require(ends is None, name, "None unless the layout is TND", ends)
            return {}
        cu_q = self._running_sums(names[0], q_ends, self.q.shape[0])
        cu_k = self._running_sums(names[1], k_ends, self.k.shape[0])
        count = cu_q.numel() - 1
        self.check.require(
            cu_k.numel() - 1 == count, names[1], f"{count} sequences", cu_k.numel() - 1
        )
        return {"cu_q": cu_q, "cu_k": cu_k}

    def _running_sums(self, name: str, ends: Lengths, tokens: int) -> Tensor:
        """Ends with a leading 0 and without sequences that are not there, on the CPU."""
        check = self.check
        given_ends = isinstance(ends, (Tensor, list, tuple)) and len(ends) > 0
        check.require(given_ends, name, "the ends of the sequences", ends)
        assert ends is not None
        if not isinstance(ends, Tensor):
            for one in ends:
                check.integer(**{name: one})
        given = torch.as_tensor(ends)
        whole = given.dim() == 1 and not given.is_floating_point()
        check.require(whole, name, "whole numbers", ends)
        given = given.to("cpu", torch.int64)
        if check.values_known(given):
            while given.numel() > 1 and given[-1] == 0:
                given = given[:-1]
            rising = bool((given.diff() >= 0).all()) and int(given[0]) >= 0
            check.require(rising, name, "numbers that do not decrease", given.tolist())
            check.require(int(given[-1]) == tokens, name, f"{tokens} at the end", int(given[-1]))
        return torch.cat([given.new_zeros(1), given])
