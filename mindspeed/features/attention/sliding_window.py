"""Sliding window: a query attends to some keys before its own and some after.

``--window-size L,R`` is Megatron's, with ``--window-attn-skip-freq`` for layers that see all keys;
``--sparse-mode 4 --pre-tockens L --next-tockens R`` is the same window in every causal layer. It
goes with both layer specs and every algorithm of context parallelism: a window is a band of the
plan's mask, so only keys inside it are multiplied, and where an algorithm fetches what is needed,
only those travel. Layers with and without a window share the batch's layout.

Keys after a query's own (R > 0) are attended to with ``--attention-mask-type general`` only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.flags import flag
from mindspeed.ranges import MAX_SIZE, Range

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams
    from mindspeed.attention.mask import Mask
    from mindspeed.te.masks import Window

_WHOLE_SEQUENCE = 65536
_BAND = 4
_TOKENS = "--pre-tockens, --next-tockens"


class SlidingWindow(Feature, level=1, seams=("kernels",)):
    """Queries see keys in a window only, under every algorithm of context parallelism."""

    sparse_mode: int = flag(
        0, "0, 2, 3: causal; 4: window of --pre-tockens and --next-tockens", range=Range(0, 4)
    )
    pre_tockens: int = flag(
        _WHOLE_SEQUENCE,
        "keys before its own that a query sees (mode 4)",
        range=Range(0, MAX_SIZE, shown=False),
    )
    next_tockens: int = flag(
        0,
        "keys after its own for a query (mode 4)",
        range=Range(0, MAX_SIZE, shown=False),
    )

    def enabled(self, megatron: Megatron) -> bool:
        return self.sparse_mode != 0 or self._changed() or bool(megatron.get("window_size"))

    def _changed(self) -> bool:
        return (self.pre_tockens, self.next_tockens) != (_WHOLE_SEQUENCE, 0)

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        size = megatron.get("window_size")
        if self.sparse_mode not in (0, 2, 3, _BAND):
            yield Problem(
                f"sparse_mode {self.sparse_mode}", "with flash attention use 0, 2, 3 or 4"
            )
        if self._changed() and self.sparse_mode != _BAND:
            yield Problem(_TOKENS, "no window without it", "add --sparse-mode 4")
        if self.sparse_mode == _BAND and size:
            yield Problem("--sparse-mode 4", "--window-size is a window too", "give one")
        if self.sparse_mode == _BAND and megatron.get("window_attn_skip_freq"):
            yield Problem(
                "--window-attn-skip-freq",
                "chooses layers for --window-size; --sparse-mode 4 is for all",
                "give --window-size instead of --sparse-mode 4",
            )
        if size and min(size) < -1:
            yield Problem("--window-size", f"{tuple(size)} is negative", "use -1 for no limit")
        after = self.next_tockens if self.sparse_mode == _BAND else size[1] if size else 0
        if after > 0 and megatron.get("attention_mask_type", "causal") != "general":
            yield Problem(
                "--window-size" if size else "--next-tockens",
                f"{after} keys after a query's own, in causal layers",
                "use 0, or add --attention-mask-type general",
            )

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        from mindspeed.attention.packed_batch import document_mask

        everywhere = (self.pre_tockens, self.next_tockens)

        def sharding_mask(cu_seqlens: tuple[int, ...], samples: int) -> Mask | None:
            """The mask of the window if every layer has it; else that of layers without one."""
            if megatron.get("window_attn_skip_freq"):
                return None
            size = everywhere if self.sparse_mode == _BAND else megatron.get("window_size")
            if not size:
                return None
            before, after = (cu_seqlens[-1] if side < 0 else side for side in size)
            return document_mask(cu_seqlens, after == 0, (before, after))

        def mask_type_and_window(mask_type: str, window: Window) -> tuple[str, Window]:
            if "causal" not in mask_type:
                return mask_type, window
            if self.sparse_mode == _BAND and window in (None, (-1, 0)):
                window = everywhere
            if window is not None and window[1] > 0:
                mask_type = "padding" if "padding" in mask_type else "no_mask"
            return mask_type, window

        seams.use_kernels(
            owner=self.name, mask_type_and_window=mask_type_and_window, sharding_mask=sharding_mask
        )
