"""Dropless dispatch without a size on the host: nothing is read, and nothing differs."""

from __future__ import annotations

import shlex
from types import SimpleNamespace

import pytest
import torch

from mindspeed.errors import ConfigError
from mindspeed.features import registry
from mindspeed.moe.costs import all_to_all
from mindspeed.moe.device_bound import DeviceBound
from mindspeed.moe.save.policy import ACT, LEVEL0, LEVEL1
from mindspeed.moe.sizes import Sizes, uniform
from mindspeed.te import device_groups, kernels
from mindspeed.te.device_groups import DeviceSizes
from tests.moe import device_ranks as jobs
from tests.moe.dispatch_ranks import Case
from tests.support import trainer_job
from tests.support.lazy import needs
from tests.support.refusal import refusal

needs("megatron.core")

ADAPTOR = "tests.support.warm"
OVERLAP = {"overlap": True}
SHARED = {"moe_shared_expert_intermediate_size": 20}


def case(name, program, layout=None, spec="te", experts=None, **overrides):
    options = {name: overrides.pop(name) for name in ("tokens", "steps") if name in overrides}
    return Case(name, layout or {"expert": 2}, overrides, [program], spec, experts, options=options)


QUICK = [
    case("overlap", OVERLAP, **SHARED),
    case("serial, two micro-batches", {}, steps=2),
    case("level0", OVERLAP | {"save": LEVEL0}),
    case("a rank without rows", OVERLAP, experts=4),
    case("stacked, local spec", {}, spec="local", moe_use_legacy_grouped_gemm=True),
]
MORE = [
    case("async", {"async_permutation": True}),
    case("level1", OVERLAP | {"save": LEVEL1}, **SHARED),
    case("activation", {"save": ACT}),
    case("one local expert", {}, num_moe_experts=2),
    case("bf16", OVERLAP, params_dtype=torch.bfloat16),
    case("dropped", {"dropped": True}, moe_expert_capacity_factor=0.6),
    case("latent", OVERLAP, moe_latent_size=8, **SHARED),
    case("one rank", {}, {"expert": 1}),
]
FOUR = [case("four", OVERLAP, {"expert": 4}), case("tensor", {}, {"expert": 4, "tensor": 2})]
SLICES = {"expert": 2, "tensor": 2, "expert_tensor": 2}
SLICED = [
    case("slices", OVERLAP, SLICES),
    case("serial slices, two micro-batches", {}, SLICES, steps=2),
    case("slices, level0", OVERLAP | {"save": LEVEL0}, SLICES),
    case("slices, level1", OVERLAP | {"save": LEVEL1}, SLICES, **SHARED),
    case("slices, a rank without rows", OVERLAP, SLICES, experts=4),
    case("slices in 16 bits", OVERLAP, SLICES, params_dtype=torch.bfloat16),
]
EIGHT_BITS = case(
    "slices in eight bits", OVERLAP | {"fp8": "both", "save": LEVEL0}, SLICES,
    hidden_size=128, params_dtype=torch.bfloat16,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("symmetric", [False, True], ids=["blocks", "symmetric"])
def test_experts_in_slices(ranks, symmetric):
    """Buffers are gathered from the ranks with other slices, and the results are summed."""
    cases = [*SLICED, EIGHT_BITS]
    run = jobs.compare_by_symmetric_memory if symmetric else jobs.compare
    for results in ranks(4, run, cases, 100.0, setup=ADAPTOR):
        for found in results[0] if symmetric else results:
            assert found.difference == 0, found.name
            assert not found.overflown
            if not symmetric:
                ours, plain = found.collectives
                assert ours == plain, found.name


GROUPED = [
    case("two groups", OVERLAP | {"expert_groups": 2}, SLICES),
    case("single experts", {"expert_groups": 4}, SLICES, steps=2),
    case("shared experts", OVERLAP | {"expert_groups": 2}, SLICES, **SHARED),
    case("a rank without rows", OVERLAP | {"expert_groups": 2}, SLICES, experts=4),
    case("stacked", {"expert_groups": 4}, SLICES, spec="local", moe_use_legacy_grouped_gemm=True),
    case("16 bits", OVERLAP | {"expert_groups": 2}, SLICES, params_dtype=torch.bfloat16),
]


@pytest.mark.slow
def test_experts_in_groups(ranks):
    """Each group has a block of its own of every rank, and hides what it hid."""
    for results in ranks(4, jobs.compare, GROUPED, 100.0, setup=ADAPTOR):
        for found in results:
            assert (found.difference, found.overflown) == (0, False), found.name
            ours, plain = found.collectives
            assert ours == plain, found.name


PIECES = [
    case("experts one by one", {"pipe_slices": 1}),
    case("two micro-batches, shared experts", {"pipe_slices": 1}, steps=2, **SHARED),
    case("slices of them", {"pipe_slices": 2, "pipe_chained": True}),
    case("a rank without rows", {"pipe_slices": 1}, experts=4),
    case("16 bits", {"pipe_slices": 1}, params_dtype=torch.bfloat16),
]


def test_experts_in_pieces(ranks):
    """No counts travel. Weight gradients add rows of zeros, too, so they round elsewhere."""
    for results in ranks(2, jobs.compare, PIECES, 100.0, False, setup=ADAPTOR):
        for one, found in zip(PIECES, results, strict=True):
            rounding = 1e-2 if "params_dtype" in one.overrides else 2e-6
            assert found.difference <= rounding, found.name
            assert not found.overflown
            ours, plain = found.collectives
            assert ours == (plain[0] - one.options.get("steps", 1), plain[1]), found.name


@pytest.mark.slow
def test_sliced_experts_in_pieces(ranks):
    cases = [case("slices of experts", {"pipe_slices": 1}, SLICES)]
    for (found,) in ranks(4, jobs.compare, cases, 100.0, False, setup=ADAPTOR):
        assert found.difference <= 2e-6 and not found.overflown


def test_rows_beyond_the_bound_of_an_expert_are_noted(ranks):
    cases = [case("skewed", {"pipe_slices": 1}, experts=4)]
    for (found,) in ranks(2, jobs.compare, cases, 1.0, False, setup=ADAPTOR):
        assert found.overflown and found.difference > 0.01


def test_groups_of_all_experts(ranks):
    whole = {"expert": 1, "tensor": 2, "expert_tensor": 2}
    cases = [case("one rank for all", OVERLAP | {"expert_groups": 2}, whole)]
    for (found,) in ranks(2, jobs.compare, cases, 100.0, setup=ADAPTOR):
        assert (found.difference, found.overflown) == (0, False)


@pytest.mark.slow
def test_the_bound_of_a_group_is_that_of_its_mean(ranks):
    """As many rows as without groups, and more that are beyond it."""
    cases = [case("whole", {}, SLICES), case("groups", {"expert_groups": 4}, SLICES)]
    results = ranks(4, jobs.compare, cases, 1.5, setup=ADAPTOR)
    row = 80  # 16 elements in fp32 and the probability
    for whole, groups in results:
        assert whole.sent[0][0] == 18 * row  # ceil(1.5 * 12 tokens * 2 experts / 2 ranks)
        assert groups.sent[0][0] == 4 * 5 * row  # of each of four groups ceil(18 / 4)
    assert any(groups.overflown for _, groups in results)


@pytest.mark.parametrize(
    ("size", "layout", "way"),
    [
        (2, {"expert": 2}, "blocks"),
        (2, {"expert": 2}, "symmetric"),
        pytest.param(4, SLICES, "blocks", marks=pytest.mark.slow),
        pytest.param(4, SLICES, "symmetric", marks=pytest.mark.slow),
    ],
)
def test_attention_in_chunks(ranks, size, layout, way):
    """Each chunk has a bound of its own tokens; its program hides what it hid."""
    slices = layout is SLICES
    for difference, layers, (plain, ours) in ranks(
        size, jobs.compare_in_chunks, layout, 100.0, way, slices, setup=ADAPTOR
    ):
        assert (difference, layers) == (0, [])
        assert ours == plain


def test_rows_beyond_the_bound_of_a_chunk_are_noted_with_the_layer(ranks):
    results = ranks(2, jobs.compare_in_chunks, {"expert": 2}, 1.0, "blocks", False, setup=ADAPTOR)
    assert [1] in [layers for _, layers, _ in results]


def test_slices_of_all_experts(ranks):
    """No all-to-all: rows are gathered and summed only."""
    whole = {"expert": 1, "tensor": 2, "expert_tensor": 2}
    cases = [case("serial", {}, whole), case("overlap", OVERLAP | {"save": LEVEL0}, whole)]
    for results in ranks(2, jobs.compare, cases, 100.0, setup=ADAPTOR):
        for found in results:
            assert (found.difference, found.overflown) == (0, False), found.name


def on_two_and_four(quick, more):
    """Cases on two ranks, quick and slow ones, and those of four ranks."""
    return pytest.mark.parametrize(
        ("cases", "size"),
        [
            pytest.param(quick, 2, id="quick"),
            pytest.param(more, 2, id="more", marks=pytest.mark.slow),
            pytest.param(FOUR, 4, id="four", marks=pytest.mark.slow),
        ],
    )


@on_two_and_four(QUICK, MORE)
def test_nothing_is_read_and_nothing_differs(ranks, cases, size):
    """Outputs and all gradients are those with sizes on the host, to the bit."""
    for results in ranks(size, jobs.compare, cases, 100.0, setup=ADAPTOR):
        for found in results:
            assert found.difference == 0, found.name
            assert not found.overflown
            ours, plain = found.collectives
            assert ours == plain, found.name


SYMMETRIC = [
    *QUICK,
    case("eight bits", OVERLAP | {"fp8": "both"}, hidden_size=128, params_dtype=torch.bfloat16),
]
MORE_SYMMETRIC = [one for one in MORE if one.name != "one rank"]


@on_two_and_four(SYMMETRIC, MORE_SYMMETRIC)
def test_rows_travel_by_symmetric_memory(ranks, cases, size):
    """The same program, with an emulation of the operator that torch has for NVIDIA GPUs only."""
    for results, rows in ranks(size, jobs.compare_by_symmetric_memory, cases, 100.0, setup=ADAPTOR):
        for found in results:
            assert found.difference == 0, found.name
            assert not found.overflown
        assert rows


def test_symmetric_memory_sends_the_rows_and_no_others(ranks):
    """Dispatch and combine, forward and backward: 24 of a rank, whatever the bound."""
    cases = [case("overlap", OVERLAP)]
    one, other = ranks(2, jobs.compare_by_symmetric_memory, cases, 1.5, setup=ADAPTOR)
    assert [a + b for a, b in zip(one[1], other[1], strict=True)] == [48, 48, 48, 48]
    assert one[1][0] == other[1][0] == 24


HYBRID = [
    case("overlap", OVERLAP, **SHARED),
    case("serial, two micro-batches", {}, steps=2),
    case("a rank without rows", OVERLAP, experts=4),
    case("many", {}, moe_router_topk=6),
    case("latent", OVERLAP, moe_latent_size=8),
]


@pytest.mark.parametrize(
    ("cases", "size"),
    [
        pytest.param(HYBRID, 2, id="two"),
        pytest.param(FOUR, 4, id="four", marks=pytest.mark.slow),
    ],
)
def test_hybrid_ep_by_megatrons_binding(ranks, cases, size):
    """Sums of a token's rows are in another order, and no collective of ours is left."""
    for results in ranks(size, jobs.compare_by_hybrid_ep, cases, 100.0, setup=ADAPTOR):
        for found in results:
            assert found.difference < 2e-6, found.name
            assert not found.overflown
            assert found.collectives[0] == (0, 0)


def test_eight_experts_of_a_token(ranks):
    """Sums of many rows are rounded once here, and once for each row there."""
    cases = [case("many", OVERLAP, moe_router_topk=6)]
    for (found,) in ranks(2, jobs.compare, cases, 100.0, setup=ADAPTOR):
        assert 0 < found.difference < 1e-6


def test_rows_beyond_the_bound_are_noted(ranks):
    cases = [case("skewed", {}, experts=4), case("even", {}, experts=8)]
    results = ranks(2, jobs.compare, cases, 1.0, setup=ADAPTOR)
    assert all(skewed.overflown and skewed.difference > 0.01 for skewed, _ in results)


@pytest.mark.parametrize("symmetric", [False, True], ids=["blocks", "symmetric"])
def test_what_is_left_out_is_what_lies_beyond_the_bound(ranks, symmetric):
    """By expert and token, for each rank: as if these rows had been dropped before."""
    results = ranks(2, jobs.truncated, symmetric, setup=ADAPTOR)
    assert any(overflown for overflown, _ in results)
    assert [different for _, different in results] == [[], []]


def test_the_trap_finds_reads(ranks):
    """Megatron's experts ask for a list of the sizes."""
    for error in ranks(2, jobs.reads_of_the_plain_program, setup=ADAPTOR):
        assert "reads the device" in error


def test_a_layer_runs_on_meta_tensors(ranks):
    assert ranks(1, jobs.on_meta, 0, setup=ADAPTOR) == [(12, 1, 16)]
    assert ranks(1, jobs.on_meta, 2, setup=ADAPTOR) == [(12, 1, 16)]  # experts in pieces


def test_bytes(ranks):
    """Blocks of a bound: C times the mean to every rank, whatever the routing."""
    cases = [case("overlap", OVERLAP)]
    (found,), _ = ranks(2, jobs.compare, cases, 1.5, setup=ADAPTOR)
    counts, dispatch, combine, combine_back, dispatch_back = found.sent[0]
    block = 18  # rows: ceil(1.5 * 12 tokens * 2 experts / 2 ranks)
    assert counts == 4 * 8
    assert (dispatch, dispatch_back) == (block * 80, block * 80)  # 16 fp32 and the probability
    assert (combine, combine_back) == (block * 64, block * 64)
    sizes = Sizes(tokens=12, hidden=16, experts=8, topk=2, ffn=24, ep=2, itemsize=4)
    costs = all_to_all(sizes, uniform(sizes).in_blocks(block))
    assert costs["dispatch"].messages[0].wire == dispatch
    assert costs["combine"].reverses[0].wire == combine_back


@pytest.mark.parametrize("sizes", [(3, 0, 5), (0, 0, 0), (8, 2, 2), (0, 12, 4)])
def test_rows_of_nobody_are_zero(sizes):
    """Also where sizes are more than the rows; weight gradients do not read them."""
    rows = 12
    generator = torch.Generator().manual_seed(0)
    x, weights = torch.randn(rows, 8, generator=generator), torch.randn(3, 16, 8)
    within = DeviceSizes.of(torch.tensor(sizes), rows)
    ends = within.ends.tolist()
    splits = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    assert max(ends) <= rows
    dirty = x.clone()
    dirty[ends[-1] :] = torch.nan
    y = device_groups.matmul(dirty, weights.unbind(0), within, True)
    plain = kernels.grouped_matmul(x[: ends[-1]], weights.unbind(0), splits, True)
    torch.testing.assert_close(y[: ends[-1]], plain, rtol=0, atol=0)
    assert not y[ends[-1] :].any()
    wgrad = device_groups.wgrad(dirty, dirty, within)
    plain = kernels.grouped_wgrad(x[: ends[-1]], x[: ends[-1]], splits)
    torch.testing.assert_close(wgrad, plain, rtol=0, atol=1e-5)


def test_bounds():
    bound = DeviceBound(1.25)
    rows = {"tokens": 4096, "topk": 8, "ranks": 8, "local": 32}
    assert bound.rows(**rows) == 5120
    assert bound.most == 8
    found = []
    while bound.grow():
        found.append(bound.rows(**rows))
    assert found == [10240, 20480, 32768]  # the last: all experts of all tokens on one rank
    assert DeviceBound(100.0).rows(4096, 8, 64, 4) == 4 * 4096


MODEL = shlex.split("""
    --num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --moe-ffn-hidden-size 48
    --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 --train-iters 3
    --num-layers 2 --hidden-dropout 0.1
""")


BF16 = ("--bf16", "--moe-alltoall-overlap-comm")
DIVIDED = ("--use-distributed-optimizer", *BF16, "--overlap-grad-reduce", "--overlap-param-gather")
PAIRS = ("--bf16", "--moe-fb-overlap")
CHUNKS = ("--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1")
IN_SLICES = shlex.split(
    "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 2"
)
AGAIN = {
    "pairs": (2, (*PAIRS, "--moe-zero-memory", "level0")),
    "pairs, eight bits": (2, (*PAIRS, "--moe-fp8-dispatch", "both", "--hidden-size", "128")),
    "pairs in a pipeline": (4, (*PAIRS, *CHUNKS, "--num-layers", "4", "--global-batch-size", "16")),
    "the norm of the experts reaches all ranks": (2, ()),
    "16 bits": (2, BF16),
    "the distributed optimizer": (2, DIVIDED),
    "replicas of experts: one element": (4, BF16),
    "replicas of experts, the distributed optimizer": (4, DIVIDED),
    "fp16: one element": (2, ("--fp16", "--initial-loss-scale", "256")),
    "slices of experts": (4, (*BF16, *IN_SLICES, "--moe-zero-memory", "level1")),
    "groups of experts": (4, (*BF16, *IN_SLICES, "--moe-experts-pipeline-degree", "2")),
    "experts in pieces": (2, ("--bf16", "--use-pipe-experts", "--pipe-experts-multi-data", "2")),
    "attention in chunks": (2, ("--bf16", "--ampipe-degree", "2")),
    "stages": (4, ("--pipeline-model-parallel-size", "2", *BF16)),
}


# Weekly: layouts that another row has with more beside.
@pytest.mark.weekly_cases(
    *("pairs", "16 bits", "the distributed optimizer", "stages"),
    "replicas of experts: one element",
)
@pytest.mark.slow
@pytest.mark.parametrize("case", AGAIN)
def test_a_step_with_too_small_a_bound_is_computed_again(ranks, case, tmp_path):
    """Weights and log are those of a larger bound to the bit."""
    size, more = AGAIN[case]

    def train(*flags: str) -> tuple[list[dict[str, object]], list[tuple[float, float]]]:
        file = tmp_path / "metrics.jsonl"
        file.unlink(missing_ok=True)
        given = [*MODEL, *more, *flags, "--metrics-file", str(file)]
        found = ranks(size, trainer_job.train, given, setup=trainer_job.SETUP)
        return found, [(one["lm_loss"], one["grad_norm"]) for one in trainer_job.metrics(file)]

    large, log = train("--moe-device-bound", "2")
    again, log_again = train("--moe-device-bound", "1")
    assert [one["error"] for one in large + again] == [None] * 2 * size
    assert [one["digest"] for one in again] == [one["digest"] for one in large]
    assert log_again == log
    assert len(log) == 3


@pytest.mark.slow
@pytest.mark.parametrize("more", [BF16, DIVIDED], ids=["replicated", "distributed"])
def test_too_small_a_bound_is_an_error(ranks, more):
    """The message names flag, layers and rank; nothing was updated, so nothing is saved."""
    flags = [*MODEL, *more, "--moe-device-bound", "1", "--moe-device-bound-overflow", "error"]
    for one in ranks(2, trainer_job.train, flags, setup=trainer_job.SETUP):
        assert (
            "--moe-device-bound 1: a rank was to get more rows than that many times" in one["error"]
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "extra"),
    [
        pytest.param(BF16, 0, id="replicated"),
        pytest.param(DIVIDED, 0, id="distributed", marks=pytest.mark.weekly),
        pytest.param((*DIVIDED, "--guard", "spike"), 1, id="guarded"),
    ],
)
def test_the_flag_travels_with_the_gradient_norm(ranks, more, extra):
    """A step has as many collectives as one with sizes on the host; a guarded pass has one more."""

    def collectives(*flags: str) -> list[int]:
        given = [*MODEL, *more, *flags]
        one, other = ranks(2, jobs.trained, given, setup=trainer_job.SETUP)
        assert (one["error"], other["error"]) == (None, None)
        assert one["collectives"] == other["collectives"]
        return one["collectives"]

    plain, bounded = collectives(), collectives("--moe-device-bound", "2")
    assert bounded == [count + extra for count in plain]
    assert len(plain) == 3


def test_gradients_of_several_passes_are_not_computed_again(ranks):
    """Only those of the last could be, as others were added to the first's."""
    for error in ranks(1, jobs.accumulated, setup=ADAPTOR):
        assert "gradients of several passes are added up" in error


FLAGS = {
    "num_experts": 8, "moe_token_dispatcher_type": "alltoall", "hidden_size": 64,
    "expert_model_parallel_size": 2, "moe_grouped_gemm": True, "add_bias_linear": False,
    "moe_device_bound": 1.25,
}  # fmt: skip
REFUSED = {
    "below the mean": ({"moe_device_bound": 0.9}, "from 1 to"),
    "no bound": (
        {"moe_device_bound": 0.0, "moe_device_bound_overflow": "error"},
        "has no effect without --moe-device-bound",
    ),
    "no bound for symmetric memory": (
        {"moe_device_bound": 0.0, "moe_device_bound_exchange": "symmetric-memory"},
        "-exchange symmetric-memory: has no effect without --moe-device-bound",
    ),
    "symmetric memory on a CPU": (
        {"moe_device_bound_exchange": "symmetric-memory"},
        "symmetric-memory: needs NVIDIA GPUs, and this device is cpu",
    ),
    "HybridEP on a CPU": (
        {"moe_device_bound_exchange": "hybridep"},
        "hybridep: needs NVIDIA GPUs, and this device is cpu",
    ),
    "HybridEP with zero memory": (
        {"moe_device_bound_exchange": "hybridep", "moe_zero_memory": "level0"},
        "its kernels send no rows a second time",
    ),
    "HybridEP in pairs": (
        {"moe_device_bound_exchange": "hybridep", "moe_fb_overlap": True, "bf16": True},
        "its kernels are one for several parts",
    ),
    "symmetric memory in groups": (
        {
            "moe_device_bound_exchange": "symmetric-memory",
            "moe_experts_pipeline_degree": 2,
            "expert_tensor_parallel_size": 2,
        },
        "only blocks of a bound have the rows of some experts",
    ),
    "HybridEP in chunks": (
        {"moe_device_bound_exchange": "hybridep", "ampipe_degree": 2},
        "nothing can hide its kernels",
    ),
    "HybridEP in eight bits": (
        {"moe_device_bound_exchange": "hybridep", "moe_fp8_dispatch": "both", "hidden_size": 128},
        "Megatron's binding sends 16 bits",
    ),
    "all-gather": ({"moe_token_dispatcher_type": "allgather"}, "the dispatcher is allgather"),
    "HybridEP with slices": (
        {"moe_device_bound_exchange": "hybridep", "expert_tensor_parallel_size": 2},
        "sends tokens to ranks with whole experts, and they are cut in 2",
    ),
    "one by one": ({"moe_grouped_gemm": False}, "add --moe-grouped-gemm"),
    "biases": ({"add_bias_linear": True}, "add --disable-bias-linear"),
    "one rank": ({"expert_model_parallel_size": 1}, "nothing is sent to experts"),
    "symmetric memory in pieces": (
        {"moe_device_bound_exchange": "symmetric-memory", "use_pipe_experts": True},
        "only blocks of a bound have the rows of some experts",
    ),
    "lengths that vary": ({"variable_seq_lengths": True}, "ranks must have equally many tokens"),
    "load": ({"moe_adaptive_recompute_activation": True}, "by numbers of rows on the host"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    values, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        registry.resolve(FLAGS | values, "cpu")


GPU = {
    "another operator": ({"operator": "a, b"}, 8, {}, "has no all_to_all_vdev(input, out, in_"),
    "no library": ({"nvshmem": False}, 8, {}, "torch finds no NVSHMEM"),
    "too many ranks": ({}, 1024, {}, "the operator serves 512 ranks, not 1024"),
    "blocks with a remainder": (
        {}, 8, {"TORCH_SYMMMEM_NBLOCKS": "24"}, "TORCH_SYMMMEM_NBLOCKS=24 is not 1, 2, 4",
    ),
    "blocks without": ({}, 8, {"TORCH_SYMMMEM_NBLOCKS": "32"}, None),
    "few blocks": ({}, 8, {"TORCH_SYMMMEM_NBLOCKS": "4"}, None),
    "all there": ({}, 8, {}, None),
}  # fmt: skip


@pytest.mark.parametrize("case", GPU)
def test_what_symmetric_memory_lacks_on_a_gpu(case, monkeypatch):
    """Each reason has a fix; on the machine of this test all of it is pretended."""
    from mindspeed import device
    from mindspeed.moe import symmetric_memory

    lacks, size, environment, message = GPU[case]
    monkeypatch.setattr(device, "current", lambda: SimpleNamespace(name="cuda"))
    here = lacks.get("nvshmem", True)
    monkeypatch.setattr(symmetric_memory.symm_mem, "is_nvshmem_available", lambda: here)
    monkeypatch.delenv("TORCH_SYMMMEM_NBLOCKS", raising=False)
    if "operator" in lacks:
        monkeypatch.setattr(symmetric_memory, "_arguments", lambda: ("a", "b"))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = [what for what, _ in symmetric_memory.problems(size)]
    assert len(found) == (message is not None)
    assert message is None or message in found[0]


@pytest.mark.parametrize(("size", "count"), [(2, 32), (3, 48), (8, 64), (32, 64), (64, 64)])
def test_blocks_of_threads_divide_every_row(size, count):
    """A power of two for each rank, 16 at most, and 64 in all if there are not more ranks."""
    from mindspeed.moe.symmetric_memory import blocks

    assert blocks(size) == count


def test_accepted():
    assert not refusal(FLAGS)
