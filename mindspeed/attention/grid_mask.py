"""A user's mask for adaptive context parallelism, by the original's functions.

    from mindspeed.core.context_parallel import utils
    utils.generate_adaptive_cp_grid_mask_by_user = lambda ranks: torch.ones(ranks, ranks).tril()

With ``--adaptive-cp-manually-set-mask-list --attention-mask-type general`` the two functions are
called once, before training, on every rank alike. (``mindspeed.model.transformer`` has
``set_attention_mask``, which takes more forms and no tiles.)
"""

from __future__ import annotations

from typing import Any

import torch

from mindspeed.attention import Mask, Region
from mindspeed.attention.user_mask import as_mask
from mindspeed.errors import ConfigError


def generate_adaptive_cp_grid_mask_by_user(cp_size: int) -> Any:
    """Replace this: ``[P, P]``, not 0 where a part of the queries sees a part of the keys.

    The sequence is in P equal parts.
    """
    return None


def generate_adaptive_cp_mask_list_by_user(
    seq_order: list[int], scheduling: list[list[int]], cp_rank: int, cp_size: int
) -> list[torch.Tensor | None] | None:
    """Replace this where parts see each other in part: a rank's tiles, True is masked.

    Args:
        seq_order: The order of tokens: as they are.
        scheduling: ``scheduling[i][r]``: tile ``r * P + i`` of rank r's queries with the i-th part
            of the keys, or -1 where they see nothing of it.
        cp_rank: The rank whose tiles are returned.
        cp_size: P.

    Returns:
        For each i a bool ``[S / P, S / P]``, or None where all or nothing is seen; None for all.
    """
    return None


def mask_by_user(size: int, ranks: int) -> Mask:
    """The mask of a sequence by the two functions.

    Raises:
        ConfigError: There is no grid, it has another shape, or a query sees nothing.
    """
    grid = generate_adaptive_cp_grid_mask_by_user(ranks)
    name = "generate_adaptive_cp_grid_mask_by_user"
    if grid is None:
        raise ConfigError(
            f"--adaptive-cp-manually-set-mask-list: {name} returned None; replace it in "
            "mindspeed.core.context_parallel.utils before training starts"
        )
    grid = torch.as_tensor(grid) != 0
    if tuple(grid.shape) != (ranks, ranks) or size % ranks:
        raise ConfigError(
            f"--adaptive-cp-manually-set-mask-list: {name} returned {list(grid.shape)} for {size} "
            f"tokens on {ranks} ranks; it must be [{ranks}, {ranks}], and the parts equal"
        )
    tile = size // ranks
    schedule = [
        [rank * ranks + part if grid[rank, part] else -1 for rank in range(ranks)]
        for part in range(ranks)
    ]
    lists = [
        generate_adaptive_cp_mask_list_by_user(list(range(size)), schedule, rank, ranks)
        for rank in range(ranks)
    ]
    if all(tiles is None for tiles in lists):
        parts = [(r * tile, (r + 1) * tile) for r in range(ranks)]
        seen = [Region(*parts[int(r)], *parts[int(c)]) for r, c in grid.nonzero()]
        return Mask.of_regions(size, seen)
    hidden = ~grid.repeat_interleave(tile, 0).repeat_interleave(tile, 1)
    for rank, tiles in enumerate(lists):
        for part, mask in enumerate(tiles or ()):
            if mask is not None:
                rows = slice(rank * tile, (rank + 1) * tile)
                hidden[rows, part * tile : (part + 1) * tile] |= mask.bool().cpu()
    return as_mask(hidden, size)
