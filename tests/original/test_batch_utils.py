"""The original's functions of a micro-batch: what they hold, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mindspeed.errors import ConfigError
from tests.support.lazy import needs

needs("megatron.core")


def cut_and_move() -> dict[str, Any]:
    """What this rank of two has of two documents, with positions of its own, and the refusals."""
    from megatron.core import parallel_state

    from mindspeed import session
    from mindspeed import utils as script
    from mindspeed.adaptor.current_batch import current_params

    refused = []

    def refuses(function: Callable[..., Any], *args: Any) -> None:
        with pytest.raises(ConfigError) as error:
            function(*args)
        refused.append(str(error.value))

    batch = {"tokens": torch.arange(8)[None], "labels": None, "attention_mask": None}
    script.set_actual_seq_len([3, 8])
    refuses(script.get_batch_on_this_cp_rank, batch)
    values = {"reset_attention_mask": True, "calculate_per_token_loss": True}
    session.install().configure({**values, "context_parallel_size": 2})
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    refuses(script.set_position_ids, torch.zeros(4, 1))
    part = script.get_batch_on_this_cp_rank(batch)
    refuses(script.set_position_ids, torch.zeros(8, 1))
    refuses(script.get_batch_on_this_cp_rank, {"tokens": None})
    counted = script.get_position_ids().flatten()
    script.set_position_ids(counted[:, None] + 10)
    moved = current_params().packed.positions.flatten()
    script.set_actual_seq_len(torch.tensor([0, 5]))
    ends = script.get_actual_seq_len()
    refuses(script.get_batch_on_this_cp_rank, batch)
    refuses(script.set_actual_seq_len, [4, 4])
    script.set_actual_seq_len(None)
    return {
        "tokens": part.pop("tokens").flatten(), "others": set(part), "counted": counted,
        "moved": moved, "ends": ends, "refused": refused,
        "left": (script.get_actual_seq_len(), script.get_position_ids()),
    }  # fmt: skip


def test_the_functions_return_the_last_sharded_micro_batch(ranks):
    parts = ranks(2, cut_and_move, setup="tests.support.warm")
    assert sorted(torch.cat([part["tokens"] for part in parts]).tolist()) == list(range(8))
    inside = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4])
    for part in parts:
        assert part["counted"].equal(inside[part["tokens"]])
        assert part["moved"].equal(part["counted"] + 10)
        assert part["others"] == {"labels", "attention_mask", "position_ids"}
        assert part["ends"] == [5] and part["left"] == (None, None)
        assert part["refused"] == [
            "set_actual_seq_len needs --reset-attention-mask",
            "set_position_ids of [4, 1]: before get_batch_on_this_cp_rank they restart at the "
            "documents of set_actual_seq_len, and are [8, 1]",
            "set_position_ids of [8, 1]: needs [4, 1]",
            "get_batch_on_this_cp_rank: the batch has no tensor, so no known length",
            "actual_seq_len ends at 5; the batch has 1 x 8 tokens",
            "actual_seq_len [4, 4]: ends of documents must grow",
        ]
