"""Pairs of a forward and a backward in the trainer: the bits of schedules without them."""

from __future__ import annotations

import pytest

from mindspeed.pipeline.schedule.pairs import pair_seconds
from mindspeed.pipeline.schedule.schedules import ScheduleRequest, build_plan
from tests.support.trainer_job import SETUP
from tests.training.fb_overlap_job import traced
from tests.training.one_rank import column
from tests.training.test_layouts import MLA, MOE

SIZES = "--num-layers 4 --global-batch-size 8 --untie-embeddings-and-output-weights"
EP, PP = "--bf16 --expert-model-parallel-size 2", "--pipeline-model-parallel-size 2"
EXPERTS = f"{EP} {PP}"
CHUNKS = "--num-layers-per-virtual-pipeline-stage 1"
LAYOUTS = {
    "dualpipev": "--schedules-method dualpipev --dualpipev-dw-detach",
    "zb-v": "--pipeline-schedule zb-v",
    "interleaved": f"{CHUNKS} --pipeline-schedule interleaved",
    "nanopipe": f"{CHUNKS} --use-nanopipe",
    "zb-v, data, overlap": (
        "--pipeline-schedule zb-v --use-distributed-optimizer --overlap-grad-reduce "
        "--overlap-param-gather"
    ),
}


# The daily one divides backwards beside its pairs, on a V, and reduces where the plan says.
@pytest.mark.weekly_cases("dualpipev", "interleaved", "nanopipe", "zb-v")
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pairs_train_to_the_same_bits(layout, one_rank):
    reference = one_rank(f"{MOE} {SIZES}")
    flags = f"{EXPERTS} {LAYOUTS[layout]}"
    plain = reference.train(4, flags)
    records = reference.train(4, f"{flags} --moe-fb-overlap")
    for name in ("lm_loss", "grad_norm"):
        assert column(records, name) == column(plain, name)


LEVEL0 = "--moe-zero-memory level0"
DROPPING = {
    "one rank": (2, ""),
    "local spec": (2, "--transformer-impl local"),
    "dualpipev": (4, LAYOUTS["dualpipev"]),
    "zb-v": (4, LAYOUTS["zb-v"]),
    "interleaved": (4, LAYOUTS["interleaved"]),
    "nanopipe": (4, LAYOUTS["nanopipe"]),
    "sequence parallel": (4, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "norm again": (2, "--recompute-granularity selective --recompute-modules layernorm"),
    "adapters": (2, "--lora-r 4 --lora-target-modules linear_qkv experts.linear_fc1"),
}


@pytest.mark.weekly_cases(
    *("one rank", "local spec", "interleaved", "nanopipe", "sequence parallel", "zb-v")
)
@pytest.mark.slow
@pytest.mark.parametrize("layout", DROPPING)
def test_pairs_whose_experts_keep_less_train_to_the_same_bits(layout, one_rank):
    size, flags = DROPPING[layout]
    if "local" in flags:
        reference, flags = one_rank(f"{MOE} {SIZES} {flags}"), ""
    else:
        reference = one_rank(f"{MOE} {SIZES}")
    flags = f"{EP} {PP if layout in LAYOUTS else ''} {flags}"
    plain = reference.plain(size, flags)
    records = reference.train(size, f"{flags} --moe-fb-overlap {LEVEL0}")
    for name in ("lm_loss", "grad_norm"):
        assert column(records, name) == column(plain, name)


RECIPE = (  # of deepseek-v3-dualpipev
    f"{MLA} {SIZES} --num-experts 4 --moe-router-topk 2 --moe-grouped-gemm "
    "--moe-ffn-hidden-size 64 --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type none --position-embedding-type rope"
)
AGAIN = "--recompute-granularity selective --recompute-modules layernorm mla_up_proj moe_act"


@pytest.mark.weekly
@pytest.mark.slow
def test_pairs_and_recomputation_of_the_report_train_to_the_same_bits(one_rank):
    reference = one_rank(RECIPE)
    flags = f"{EXPERTS} {LAYOUTS['dualpipev']} {AGAIN}"
    plain = reference.train(4, flags)
    records = reference.train(4, f"{flags} --moe-fb-overlap")
    for name in ("lm_loss", "grad_norm"):
        assert column(records, name) == column(plain, name)


WIDE = "--num-layers 8 --global-batch-size 8 --untie-embeddings-and-output-weights"
HALVES = {"attn": 0.5, "mlp": 0.5}  # of the forward of a layer, and of its I and W
EXCHANGES = (0.25, 0.5, 0.625, 0.75, 1.0, 1.5)


@pytest.mark.slow
@pytest.mark.parametrize("drops", [False, True], ids=["", "level0"])
def test_executed_pairs_expose_what_the_clock_says(drops, rank_pool):
    """DualPipeV on two ranks with two layers in each chunk: by the log of parts, for any x."""
    flags = [*MOE.split(), *WIDE.split(), *EXPERTS.split(), *LAYOUTS["dualpipev"].split()]
    flags += LEVEL0.split() if drops else []
    logs = rank_pool.run(
        4, traced, [*flags, "--moe-fb-overlap"], setup=SETUP, backend=None, timeout=240
    )
    request = ScheduleRequest(kind="dualpipev", pairs=True)
    plan = build_plan(request, 2, 2, 4)
    assert plan.paired
    for rank, nodes in enumerate(logs):
        entries = list(plan.entries(rank // 2))
        for log, members in zip(
            parts_of(nodes, entries), entries_with_layers(entries), strict=True
        ):
            again = 2 * drops * any(one.op != "F" for one in members)
            assert sum(node.communicates for node in log) == 2 * 2 * len(members) + again
            if len(members) == 1:
                continue
            assert {node.phase for node in log} >= {"F", "B", "W"}
            for x in EXCHANGES:
                expected = pair_seconds(2, 2, 2, 2 * x, 2, drops)
                assert clock(log, x) == pytest.approx(expected), (members, x)


def entries_with_layers(entries):
    return [one for one in entries if one[0].op in "FBI"]


def parts_of(nodes, entries):
    """The log of each forward, backward and pair, one after the other."""
    started = [action for one in entries for action in one if action.op == "F"]
    numbers = {action[1:]: number for number, action in enumerate(started)}
    rest = list(nodes)
    for members in entries_with_layers(entries):
        own = {(numbers[action[1:]], action.op == "F") for action in members}
        count = next(
            (n for n, node in enumerate(rest) if (node.micro_batch, node.phase == "F") not in own),
            len(rest),
        )
        yield rest[:count]
        del rest[:count]
    assert not rest


def clock(log, x):
    """The end of a pair: streams in order, each part after the one before in its micro-batch."""
    free, ended, began, rows = {True: 0.0, False: 0.0}, {}, 0.0, 0.0
    for number, node in enumerate(log):
        if node.phase == ">":  # the experts' backward that runs has started it
            free[True] = rows = max(free[True], began) + x
        if node.name == "refetch":
            continue
        ready = 0.0 if node.phase == "W" else ended.get(node.micro_batch, 0.0)
        if log[number + 1 : number + 2] and log[number + 1].phase == "<":
            ready = max(ready, rows)
        start = max(free[node.communicates], ready)
        end = start + (x if node.communicates else HALVES[node.name])
        free[node.communicates], began = end, start
        if node.phase != "W":
            ended[node.micro_batch] = end
    return max(free.values())
