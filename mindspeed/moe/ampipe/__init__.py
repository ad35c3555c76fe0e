"""Ampipe: attention in chunks of the sequence, which hides the dispatch of the chunk before.

The programs give the order of a transformer layer in these chunks.
"""

from __future__ import annotations

from mindspeed.moe.program import Program

AMPIPE = Program.parse(
    "(attn route count> permute count< dispatch>) shared_fc1 anchor "
    "(dispatch< gather! arrange experts disarrange scatter! combine>) shared_fc2 "
    "combine< unpermute"
)
"""While chunk c is dispatched, chunk c + 1 attends; only the last combine has nothing beside it."""

TENSOR_OVERLAP = Program.parse(
    "(attn route count> permute count< dispatch>) shared_fc1 anchor "
    "[dispatch< gather> gather< arrange experts disarrange scatter> scatter< combine>] shared_fc2 "
    "combine< unpermute"
)
"""The collectives of sliced experts are hidden by the experts of other chunks, too."""
