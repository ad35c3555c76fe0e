"""Flags of expert layouts, in the trainer: the losses of Megatron's own flags, to the bit."""

from __future__ import annotations

import pytest

from mindspeed.moe.program import Phase
from mindspeed.moe.simulate import PAIR
from tests.support.trainer_job import SETUP, TINY
from tests.training.command_line import parse_all
from tests.training.fb_overlap_job import exposed, traced
from tests.training.one_rank import assert_same_training, column
from tests.training.test_layouts import MOE, TP

SHARED = f"{MOE} --moe-shared-expert-intermediate-size 128"
EXPERTS = f"{TP} --sequence-parallel --expert-model-parallel-size"


@pytest.mark.slow
def test_extended_groups_and_shared_experts_by_number(one_rank):
    """Megatron's own flags by hand, then ours for the same layout and width."""
    reference = one_rank(SHARED)
    by_hand = reference.train(2, f"{EXPERTS} 2 --expert-tensor-parallel-size 1")
    reference.model = f"{MOE} --n-shared-experts 2".split()
    try:
        records = reference.train(2, f"{EXPERTS} 1 --moe-tp-extend-ep")
    finally:
        reference.model = SHARED.split()
    for name in ("lm_loss", "grad_norm"):
        assert column(records, name) == column(by_hand, name)
    assert_same_training(records, reference.records)


@pytest.mark.weekly_cases("loaded")
@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False], ids=["saved", "loaded"])
def test_checkpoints_are_those_of_sliced_experts(first, one_rank):
    reference = one_rank(SHARED)
    flags = [f"{EXPERTS} 1 --moe-tp-extend-ep", f"{EXPERTS} 1"]
    records = reference.resumed((2, 2), tuple(flags if first else flags[::-1]))
    assert column(records, "lm_loss") == pytest.approx(
        column(reference.records, "lm_loss")[2:], rel=1e-6
    )


def test_the_trainer_refuses_contradictions_before_it_starts(rank_pool):
    experts = ["--num-experts", "4", "--sequence-parallel", "--tensor-model-parallel-size", "2"]
    extended = [*experts, "--expert-model-parallel-size", "2", "--moe-tp-extend-ep"]
    cases = {
        (*extended, "--expert-tensor-parallel-size", "2"): "--expert-tensor-parallel-size 2",
        (*extended, "--num-experts", "6"): "--num-experts 6 cannot be spread over tensor 2",
        (*experts, "--n-shared-experts", "0"): "--n-shared-experts",
        ("--n-shared-experts", "1"): "add --num-experts",
        (*extended[:2], "--n-shared-experts", "2", "--moe-shared-expert-intermediate-size", "7"): (
            "--moe-shared-expert-intermediate-size is 7"
        ),
        (*extended[:2], "--moe-fb-overlap"): "--expert-model-parallel-size is 1",
        tuple(extended): "2 ranks cannot be divided by expert tensor 1 x expert 4",
    }
    given = [([*TINY, *flags], None, 2) for flags in cases]
    (answers,) = rank_pool.run(1, parse_all, given, setup=SETUP, backend=None, timeout=120)
    for answer, said in zip(answers, cases.values(), strict=True):
        assert said in (answer["error"] or "no error")


OVERLAP = "--bf16 --expert-model-parallel-size 2 --global-batch-size 8"


@pytest.mark.parametrize(
    ("impl", "outside"),
    [("transformer_engine", 7), pytest.param("local", 14, marks=pytest.mark.slow)],
)
def test_micro_batches_hide_each_others_all_to_all(impl, outside, rank_pool):
    """4 layers, 4 micro-batches: 3 pairs of forward and backward, whose 4 all-to-alls all hide.

    Exposed are those of the first forward and, without delayed weight gradients, of the last
    backward, which have no partner.
    """
    flags = f"{MOE} {OVERLAP} --moe-fb-overlap --transformer-impl {impl}"
    for nodes in rank_pool.run(2, traced, flags.split(), setup=SETUP, backend=None, timeout=240):
        assert sum(node.communicates for node in nodes) == 4 * 4 * 4
        alone = [(node.micro_batch, node.phase) for node in exposed(nodes)]
        assert set(alone) <= {(0, "F"), (3, "B")}
        assert len(alone) == outside
        assert any(node.phase == "W" for node in nodes) == (impl == "transformer_engine")
        delayed = impl == "transformer_engine"
        for communicates in (True, False):
            ours = modelled(communicates, delayed)
            found = [
                (node.name, node.phase)
                for node in nodes
                if node.communicates == communicates and (node.name, node.phase) != ("attn", "W")
            ]
            backward = 2 if communicates else 2 + delayed
            assert found[4 * 2 : -4 * backward] == ours * (3 * 4)


def modelled(communicates, delayed):
    """The parts of a pair in the order in which the comparison runs them on one stream."""
    parts = {
        ("combine", True): "moe_combine",
        ("dispatch", True): "moe_dispatch",
        ("attn", False): "attn",
        ("experts", False): "mlp",
        ("anchor", False): "mlp",
    }
    found = []
    for step in PAIR.steps:
        phase, _, name = step.name.partition("_")
        part = parts.get((name, communicates))
        if part and step.phase is not Phase.FINISH and (delayed or name != "anchor"):
            found.append((part, "W" if name == "anchor" else phase.upper()))
    return found


DISTRIBUTED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
VPP = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
LORA = "--lora-r 4 --lora-target-modules linear_qkv experts.linear_fc1 experts.linear_fc2"


@pytest.mark.weekly_cases(
    "distributed-optimizer", "local", "extended", "lora", "virtual-pipeline", "sequential-recompute"
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "ranks", "flags"),
    [
        (MOE, 2, DISTRIBUTED),
        (f"{MOE} --transformer-impl local", 2, ""),
        (MOE, 4, f"{TP} --sequence-parallel"),
        (MOE, 4, f"{TP} --sequence-parallel --moe-tp-extend-ep"),
        (MOE, 4, VPP),
        (MOE, 2, LORA),
        (MOE.replace("--moe-grouped-gemm ", ""), 2, "--recompute-granularity selective"),
    ],
    ids=[
        "distributed-optimizer",
        "local",
        "expert-tensor",
        "extended",
        "virtual-pipeline",
        "lora",
        "sequential-recompute",
    ],
)
def test_overlapped_micro_batches_train_to_the_same_bits(model, ranks, flags, one_rank):
    reference = one_rank(model)
    plain = reference.train(ranks, f"{OVERLAP} {flags}")
    records = reference.train(ranks, f"{OVERLAP} {flags} --moe-fb-overlap")
    for name in ("lm_loss", "grad_norm"):
        assert column(records, name) == column(plain, name)


@pytest.mark.weekly
@pytest.mark.slow
def test_with_shared_experts_gradients_are_summed_in_another_order(one_rank):
    reference = one_rank(SHARED)
    plain = reference.train(2, OVERLAP)
    records = reference.train(2, f"{OVERLAP} --moe-fb-overlap")
    assert_same_training(records, plain, loss=1e-5, norm=1e-3)


SLICED = f"{TP} --sequence-parallel --expert-tensor-parallel-size 2 --moe-experts-pipeline-degree 2"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@pytest.mark.weekly_cases("local", "virtual-pipeline", "mtp", "recompute")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "ranks", "flags"),
    [
        (SHARED, 2, f"{DISTRIBUTED} --moe-alltoall-overlap-comm"),
        (SHARED, 4, f"--expert-model-parallel-size 2 {RECOMPUTE}"),
        (f"{MOE} --transformer-impl local", 2, "--recompute-granularity selective"),
        (MOE, 4, f"{VPP} {DISTRIBUTED}"),
        (f"{MOE} --mtp-num-layers 1", 2, ""),
    ],
    ids=["distributed-overlap", "recompute", "local", "virtual-pipeline", "mtp"],
)
def test_experts_in_groups_train_like_one_rank(model, ranks, flags, one_rank):
    reference = one_rank(model)
    records = reference.train(ranks, f"{SLICED} {flags}")
    assert_same_training(records, reference.records)


@pytest.mark.weekly
@pytest.mark.slow
def test_experts_in_groups_train_adapters_as_together(one_rank):
    reference = one_rank(MOE)
    together = SLICED.rpartition(" --moe")[0]
    expected = reference.train(2, f"{together} {LORA} --moe-permutation-async-comm")
    records = reference.train(2, f"{SLICED} {LORA}")
    for name in ("lm_loss", "grad_norm"):
        assert column(records, name) == column(expected, name)


BALANCED = "--balanced-moe-experts --balanced-moe-hot-expert-num 1"


@pytest.mark.weekly_cases("distributed-overlap", "mtp", "extended-recompute", "unfused")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "ranks", "flags"),
    [
        (SHARED, 2, f"{DISTRIBUTED} --moe-alltoall-overlap-comm"),
        (MOE, 2, "--no-gradient-accumulation-fusion --overlap-grad-reduce"),
        (MOE, 4, f"{TP} --sequence-parallel --moe-tp-extend-ep {RECOMPUTE}"),
        (MOE, 4, f"{VPP} {DISTRIBUTED}"),
        (f"{MOE} --mtp-num-layers 1", 2, "--recompute-granularity selective"),
    ],
    ids=["distributed-overlap", "unfused", "extended-recompute", "virtual-pipeline", "mtp"],
)
def test_hot_experts_train_like_one_rank(model, ranks, flags, one_rank):
    reference = one_rank(model)
    records = reference.train(ranks, f"{BALANCED} --expert-model-parallel-size 2 {flags}")
    assert_same_training(records, reference.records)
