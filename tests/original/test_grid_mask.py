"""The original's hooks for user-defined masks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mindspeed.attention import Mask
from mindspeed.attention.user_mask import mask_of_batch
from mindspeed.core.context_parallel import utils
from mindspeed.errors import ConfigError
from mindspeed.features.attention.context_parallel import ContextParallel
from mindspeed.journal import Journal


@pytest.fixture
def hooks(monkeypatch):
    def replace(grid, tiles=None):
        monkeypatch.setattr(utils, "generate_adaptive_cp_grid_mask_by_user", grid)
        if tiles is not None:
            monkeypatch.setattr(utils, "generate_adaptive_cp_mask_list_by_user", tiles)

    return replace


def test_grid_mask_of_full_tiles(hooks):
    hooks(lambda ranks: torch.ones(ranks, ranks).tril())
    mask = utils.mask_by_user(12, 3)
    block_causal = torch.ones(3, 3).tril().bool()
    assert torch.equal(mask.dense(), block_causal.repeat_interleave(4, 0).repeat_interleave(4, 1))


def test_grid_mask_of_partial_tiles(hooks):
    asked = []

    def tiles(order, scheduling, rank, ranks):
        asked.append((rank, [row[rank] for row in scheduling]))
        hidden = torch.ones(4, 4, dtype=torch.bool).triu(1)
        return [hidden if part == rank else None for part in range(ranks)]

    hooks(lambda ranks: torch.ones(ranks, ranks).tril(), tiles)
    assert torch.equal(utils.mask_by_user(12, 3).dense(), Mask.causal(12).dense())
    assert asked == [(0, [0, -1, -1]), (1, [3, 4, -1]), (2, [6, 7, 8])]


@pytest.mark.parametrize(
    ("grid", "size", "message"),
    [
        (None, 12, "generate_adaptive_cp_grid_mask_by_user returned None; replace it in"),
        (torch.ones(2, 2), 12, r"returned \[2, 2\] for 12 tokens on 3 ranks; it must be \[3, 3\]"),
        (torch.ones(3, 3), 13, "the parts equal"),
        (torch.zeros(3, 3), 12, "mask row 0 .*has no visible key"),
    ],
)
def test_invalid_values_are_refused(hooks, grid, size, message):
    hooks(lambda ranks: grid)
    with pytest.raises(ConfigError, match=message):
        utils.mask_by_user(size, 3)


def test_the_flag_sets_the_mask_of_the_process(hooks, capsys):
    hooks(lambda ranks: torch.ones(ranks, ranks).tril())
    feature = ContextParallel(
        context_parallel_algo="adaptive_cp_algo", adaptive_cp_manually_set_mask_list=True
    )
    seams = SimpleNamespace(journal=Journal(), use_kernels=lambda **functions: None)
    feature.attach(seams, {"seq_length": 12, "context_parallel_size": 3})
    assert capsys.readouterr().out == "context parallel: 3 ranks, adaptive_cp_algo\n"
    assert mask_of_batch(12, 1) == utils.mask_by_user(12, 3)
    seams.journal.undo()
    assert mask_of_batch(12, 1) is None
