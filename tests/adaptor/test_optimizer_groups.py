"""Param groups load into an optimizer of another structure."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest

from mindspeed.adaptor.repairs.optimizer.optimizer_groups import with_param_groups
from mindspeed.errors import CheckpointError

FLAT = {"lr_mult": 1.0, "is_decoupled_lr": False}


def group(wd_mult: float, expert: bool, **more):
    return {**FLAT, "wd_mult": wd_mult, "is_expert_parallel": expert, **more}


def part(*groups, first: int = 0):
    """An optimizer with one parameter in each group."""
    own = [{**g, "params": [first + i]} for i, g in enumerate(groups)]
    inner = SimpleNamespace(param_groups=own, state_dict=lambda: {"param_groups": own})
    return SimpleNamespace(optimizer=inner)


def ids(*numbers: int):
    """What the sharded part of a state dict says of groups: whose parameters they hold."""
    return [{"params": [number]} for number in numbers]


DECAY, PLAIN = {"lr": 0.5, "step": 7}, {"lr": 0.25}  # no step: rank 0 has no such parameters
SAVED_AS_ONE = [group(1.0, False, **DECAY), group(0.0, False, **PLAIN)]
SAVED_AS_TWO = {
    0: {"param_groups": SAVED_AS_ONE},
    1: {"param_groups": [group(1.0, True, lr=0.125, step=7)]},
}


def test_param_groups_of_dense_and_experts_load_into_one_optimizer():
    """Expert parallelism is off now: the groups of the experts' optimizer lose their tensors."""
    optimizer = part(group(0.0, False), group(1.0, False))
    state = {"state": {0: "a", 1: "b"}, "param_groups": ids(0, 1), **copy.deepcopy(SAVED_AS_TWO)}
    loaded = with_param_groups(SimpleNamespace(chained_optimizers=[optimizer]), state)
    assert loaded == {
        "state": {0: "a", 1: "b"},
        "param_groups": [
            group(0.0, False, lr=0.25, step=7, params=[0]),
            group(1.0, False, lr=0.5, step=7, params=[1]),
        ],
    }


def test_param_groups_of_one_optimizer_load_into_dense_and_experts():
    parts = [part(group(1.0, False), group(0.0, False)), part(group(1.0, True))]
    state = {
        0: {"state": {0: "a", 1: "b"}, "param_groups": ids(0, 1)},
        1: {"state": {0: "c"}, "param_groups": ids(0)},
        "state": {"common_step": 3},
        "param_groups": SAVED_AS_ONE,
    }
    loaded = with_param_groups(SimpleNamespace(chained_optimizers=parts), state)
    assert list(loaded) == [0, 1]  # Megatron counts the entries
    assert loaded[1] == {
        "state": {0: "c", "common_step": 3},
        "param_groups": [group(1.0, True, lr=0.5, step=7, params=[0])],
    }


def test_the_distributed_optimizer_gets_groups_and_the_kind_of_its_state():
    saved = {
        i: {"optimizer": one, "param_state_sharding_type": "fully_reshardable"}
        for i, one in copy.deepcopy(SAVED_AS_TWO).items()
    }
    optimizer = part(group(1.0, False), group(0.0, False))
    loaded = with_param_groups(optimizer, {"param_state": "tensors", **saved})
    assert loaded == {
        "param_state": "tensors",
        "param_state_sharding_type": "fully_reshardable",
        "optimizer": {
            "param_groups": [
                group(1.0, False, lr=0.5, step=7),
                group(0.0, False, lr=0.25, step=7),
            ]
        },
    }


@pytest.mark.parametrize("half", [False, True])
def test_an_optimizer_that_is_not_distributed_reads_a_distributed_one(half):
    optimizer = part(group(1.0, False), group(0.0, False))
    inner = {"state": {0: "a", 1: "b"}, "param_groups": ids(0, 1)}
    state = {"optimizer": inner, "fp32_from_fp16_params": "copies"} if half else inner
    saved = {"param_groups": SAVED_AS_ONE}
    if half:  # its groups were saved where a 16-bit optimizer has them, in another number
        inner = {**inner, "param_groups": ids(0, 1)}
        state = {**state, 0: {"optimizer": saved}}
    else:
        state = {**state, "optimizer": saved, "param_state_sharding_type": "fully_reshardable"}
    loaded = with_param_groups(optimizer, state)
    groups = (loaded["optimizer"] if half else loaded)["param_groups"]
    assert [(g["lr"], g["step"], g["params"]) for g in groups] == [(0.5, 7, [0]), (0.25, 7, [1])]


def test_a_state_dict_of_the_same_structure_is_left_alone():
    optimizer = part(group(1.0, False), group(0.0, False))
    groups = [{**g, "params": [i]} for i, g in enumerate(SAVED_AS_ONE)]
    state = {"state": {}, "param_groups": groups}
    assert with_param_groups(optimizer, state) is state
    legacy = [state, state]
    assert with_param_groups(SimpleNamespace(chained_optimizers=[optimizer] * 2), legacy) is legacy


def test_a_missing_param_group_is_named():
    optimizer = part({**group(1.0, False), "is_decoupled_lr": True})
    state = {"state": {}, "param_groups": ids(0), **copy.deepcopy(SAVED_AS_TWO)}
    with pytest.raises(CheckpointError, match=r"no parameter group with .*--no-load-optim"):
        with_param_groups(optimizer, state)
