"""DeepSpeed's mixture of experts in the trainer.

Without drops and losses of its own, its top-2 gate is Megatron's router: losses are those of one
rank of the Megatron model, from whose checkpoint all runs start. With drops, losses do not depend
on where the experts are.
"""

from __future__ import annotations

import pytest

from tests.training.one_rank import assert_same_training, column
from tests.training.test_layouts import DISTRIBUTED, MOE, MOE_PATTERN, PP, TP

DEEPSPEED = "--moe-model-type deepspeed_moe"
NO_DROP, ROOM = f"{DEEPSPEED} --moe-no-drop", f"{DEEPSPEED} --moe-train-capacity-factor 4"
WINDOW = f"{NO_DROP} --moe-dynamic-padding"
EP = "--expert-model-parallel-size 2"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SELECTIVE = "--recompute-granularity selective --recompute-modules moe"
OVERLAP = "--moe-alltoall-overlap-comm"
SHARED = f"{MOE} --moe-shared-expert-intermediate-size 128"
LAYOUTS = {
    "padded": (2, MOE, f"{ROOM} {EP}"),
    "padded-tensor": (4, SHARED, f"{ROOM} {EP} {TP} --sequence-parallel {OVERLAP}"),
    "padded-expert-tensor-pipeline": (
        4,
        MOE,
        f"{ROOM} {TP} {PP} --sequence-parallel --expert-tensor-parallel-size 2",
    ),
    "exact-recompute": (2, SHARED, f"{NO_DROP} {EP} {OVERLAP} {FULL}"),
    "exact-local": (2, f"{MOE} --transformer-impl local", f"{NO_DROP} {EP} {DISTRIBUTED}"),
    "window-recompute": (2, MOE, f"{WINDOW} {EP} {SELECTIVE} --enable-token-rearrange-opt"),
    "window-pipeline": (
        4,
        MOE,
        f"{WINDOW} {EP} {PP} --num-layers-per-virtual-pipeline-stage 1 {DISTRIBUTED} "
        f"--overlap-grad-reduce --overlap-param-gather {OVERLAP} {FULL}",
    ),
    "padded-zero-memory": (2, SHARED, f"{ROOM} {EP} --moe-zero-memory level1"),
    "window-zero-memory": (2, SHARED, f"{WINDOW} {EP} --moe-zero-memory level0 {OVERLAP}"),
    "window-adaptive": (2, MOE, f"{WINDOW} {EP} --moe-adaptive-recompute-activation"),
    "exact-deduplicated": (2, MOE, f"{NO_DROP} {EP} --moe-alltoall-exchange dedup"),
    "exact-extended-async": (
        4,
        MOE,
        f"{NO_DROP} {EP} {TP} --sequence-parallel --moe-tp-extend-ep --moe-permutation-async-comm",
    ),
    "room-in-pieces": (2, MOE, f"{ROOM} {EP} --use-pipe-experts --pipe-experts-multi-data 2"),
    "window-mtp": (2, f"{MOE} --mtp-num-layers 1", f"{WINDOW} {EP} {OVERLAP}"),
    "window-context": (4, MOE, f"{WINDOW} {EP} --micro-batch-size 2 --context-parallel-size 2"),
}


@pytest.mark.weekly_cases(
    "padded-tensor",
    "window-pipeline",
    "exact-recompute",
    "padded-zero-memory",
    "padded",
    "exact-local",
    "window-zero-memory",
    "window-adaptive",
    "room-in-pieces",
    "window-mtp",
    "window-context",
    "exact-extended-async",
    "padded-expert-tensor-pipeline",
)
@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_are_those_of_megatrons_model(name, one_rank):
    world_size, model, flags = LAYOUTS[name]
    reference = one_rank(model)
    assert_same_training(reference.train(world_size, flags), reference.records)


TOP1 = (
    f"{DEEPSPEED} --moe-router-topk 1 --moe-train-capacity-factor 0.6 "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001"
)
DROPS = {
    "jitter": (f"{TOP1} --noisy-gate-policy Jitter", FULL),
    "rsample": (f"{TOP1} --noisy-gate-policy RSample --no-use-rts", SELECTIVE),
    "sinkhorn": (f"{TOP1} --moe-use-sinkhorn", OVERLAP),
    "pieces": (f"{TOP1} --no-use-rts", "--use-pipe-experts --pipe-experts-multi-data 2"),
    "lora": (f"{TOP1} --lora-r 4 --lora-target-modules linear_qkv experts.linear_fc1", OVERLAP),
    "top-2": (TOP1.replace("topk 1", "topk 2"), OVERLAP),
}


@pytest.mark.weekly_cases("rsample", "pieces", "jitter", "lora", "top-2")
@pytest.mark.slow
@pytest.mark.parametrize("name", DROPS)
def test_losses_with_drops_do_not_depend_on_where_experts_are(name, one_rank):
    flags, more = DROPS[name]
    reference = one_rank(MOE)
    whole = reference.train(2, flags)
    shared = reference.train(2, f"{flags} {EP} {more}")
    for key, tolerance in (("lm_loss", 1e-6), ("grad_norm", 1e-4), ("load_balancing_loss", 1e-5)):
        assert column(shared, key) == pytest.approx(column(whole, key), rel=tolerance)
        if key in reference.records[0]:
            assert column(whole, key) != pytest.approx(column(reference.records[:2], key), rel=2e-6)


@pytest.mark.weekly_cases("loaded")
@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False], ids=["saved", "loaded"])
def test_checkpoints_are_those_of_megatrons_model(first, one_rank):
    reference = one_rank(MOE)
    flags = [f"{WINDOW} {EP}", ""]
    records = reference.resumed((2, 2), tuple(flags if first else flags[::-1]))
    expected = column(reference.records, "lm_loss")[2:]
    assert column(records, "lm_loss") == pytest.approx(expected, rel=1e-6)


@pytest.mark.weekly_cases("room", "no-drop")
@pytest.mark.slow
@pytest.mark.parametrize("flags", [ROOM, NO_DROP, WINDOW], ids=["room", "no-drop", "window"])
def test_bf16(flags, one_rank):
    reference = one_rank(f"{MOE} --bf16")
    records = reference.train(2, f"{flags} {EP} {DISTRIBUTED} {OVERLAP}")
    assert column(records, "lm_loss") == pytest.approx(
        column(reference.records, "lm_loss"), rel=1e-2
    )


@pytest.mark.slow
def test_every_second_layer_has_experts(one_rank):
    reference = one_rank(MOE_PATTERN)
    reference.model = MOE.split()  # without --moe-layer-freq
    try:
        records = reference.train(2, f"{ROOM} {EP} --expert-interval 2")
    finally:
        reference.model = MOE_PATTERN.split()
    assert_same_training(records, reference.records)
