"""Tokens in eight bits on their way to experts: error, bytes, and gradients to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mindspeed.errors import ConfigError
from mindspeed.features import registry
from mindspeed.moe.comparison import LayerJob, compare
from mindspeed.moe.costs import all_to_all, in_eight_bits
from mindspeed.moe.save.policy import LEVEL0, LEVEL1
from mindspeed.moe.simulate import RankRates
from mindspeed.moe.sizes import Sizes, uniform
from mindspeed.moe.wire import BLOCK, dequantize, quantize, quantized_bytes
from tests.moe import wire_ranks as jobs
from tests.moe.dispatch_ranks import Case
from tests.support.lazy import needs
from tests.support.refusal import refusal

needs("megatron.core")

ADAPTOR = "tests.support.warm"
HIDDEN = 128


def values(kind: str) -> torch.Tensor:
    x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    if kind == "outliers":
        return x * (
            1 + 99 * (torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) < 1e-3)
        )
    return {
        "normal": x,
        "rms-normed bf16": torch.nn.functional.rms_norm(x, (1024,)).bfloat16().float(),
        "tiny": x * 1e-30,
        "of all sizes": x * (4 * x.roll(1)).exp(),
        "a block of zeros": x * (torch.arange(1024) >= BLOCK),
    }[kind]


@pytest.mark.parametrize(
    "kind", ["normal", "outliers", "rms-normed bf16", "tiny", "of all sizes", "a block of zeros"]
)
def test_the_error_is_bounded(kind):
    x = values(kind)
    data = quantize(x)
    y = dequantize(data, 1024, torch.float32)
    scales = torch.exp2(data[:, 1024:].float() - 127).repeat_interleave(BLOCK, 1)
    assert ((y - x).abs() <= torch.maximum(x.abs() / 17, scales * 2**-10)).all()
    assert float((y - x).double().norm() / x.double().norm()) <= 0.03 or kind == "of all sizes"
    assert y.bfloat16().float().equal(y)
    assert dequantize(quantize(y), 1024, torch.float32).equal(y)
    blocks = x.unflatten(1, (-1, BLOCK)).abs().amax(-1)
    least = torch.exp2(data[:, 1024:].float() - 127)
    assert (blocks <= 448 * least).all()
    assert ((blocks > 224 * least) | (blocks == 0)).all()


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_arrives_as_nan(value):
    x = torch.ones(2, 256)
    x[1, 3] = value
    y = dequantize(quantize(x), 256, torch.bfloat16)
    assert y[1, :BLOCK].isnan().all()
    assert y[0].equal(x[0].bfloat16())
    assert y[1, BLOCK:].equal(x[1, BLOCK:].bfloat16())


def case(name, program, layout=None, **overrides):
    options = {"tokens": overrides.pop("tokens", 12)}
    overrides = {"hidden_size": HIDDEN, "params_dtype": torch.bfloat16} | overrides
    return Case(name, layout or {"expert": 2}, overrides, [program], options=options)


SHARED = {"moe_shared_expert_intermediate_size": 20}
OVERLAP = {"overlap": True}
GATHERED = {"moe_token_dispatcher_type": "allgather"}
PADDED = {"moe_expert_capacity_factor": 0.6, "moe_pad_expert_input_to_capacity": True}
SLICED = {"expert": 1, "tensor": 2, "expert_tensor": 2}
BOTH = [
    case("overlap", OVERLAP, **SHARED),
    case("serial, fp32", {}, params_dtype=torch.float32, tokens=(5, 9)),
    case("all-gather", OVERLAP, **GATHERED, **SHARED),
    case("sent once", OVERLAP | {"exchange": "dedup"}),
]
MORE = [
    case("padded", OVERLAP, **PADDED),
    case("slices", {}, SLICED),
    case("latent", {}, moe_latent_size=128, hidden_size=64),
    case("fp32 probabilities apart", {}, moe_router_dtype="fp64"),
]
TOKENS = [
    case("level0", OVERLAP | {"save": LEVEL0}),
    case("level1, sent once", OVERLAP | {"save": LEVEL1, "exchange": "dedup"}),
    case("level0, all-gather", {"save": LEVEL0}, **GATHERED),
    case("pieces", {"pipe_slices": 2}),
    case("groups", {"expert_groups": 2}, SLICED),
]
FOUR = [
    case("nodes", OVERLAP | {"exchange": "hierarchical"}, {"expert": 4}),
    case("nodes, level0", {"exchange": "hierarchical", "save": LEVEL0}, {"expert": 4}),
    case("slices of two", {}, {"expert": 2, "tensor": 2, "expert_tensor": 2}),
]


@pytest.mark.parametrize(
    ("cases", "fp8", "size"),
    [
        pytest.param(BOTH, "both", 2, id="both"),
        pytest.param(TOKENS, "tokens", 2, id="tokens"),
        pytest.param(BOTH + MORE, "tokens", 2, id="tokens, more", marks=pytest.mark.slow),
        pytest.param(MORE, "both", 2, id="both, more", marks=pytest.mark.slow),
        pytest.param(FOUR, "both", 4, id="four ranks", marks=pytest.mark.slow),
    ],
)
def test_experts_compute_with_what_arrives(ranks, cases, fp8, size):
    """The layer is the plain one on rounded tokens (and gradients of results), to the bit."""
    for results in ranks(size, jobs.compare, cases, fp8, setup=ADAPTOR, timeout=300):
        for found in results:
            assert found.different == [], found.name
            assert {"output", "input"} <= set(found.changed), found.name


@pytest.mark.slow
@pytest.mark.parametrize("fp8", ["tokens", "both"])
def test_chunks_of_the_sequence(ranks, fp8):
    for found in ranks(2, jobs.in_chunks, fp8, setup=ADAPTOR):
        assert found == []


def test_bytes(ranks):
    """A row of H elements in bf16 becomes H bytes and H / 128 scales, .504 of it."""
    assert quantized_bytes(7168) / (2 * 7168) == 0.50390625
    cases = [
        case("overlap", OVERLAP), case("all-gather", OVERLAP, **GATHERED),
        case("sent once", OVERLAP | {"exchange": "dedup"}),
    ]  # fmt: skip
    for both, tokens in zip(
        *(ranks(2, jobs.compare, cases, fp8, setup=ADAPTOR) for fp8 in ("both", "tokens")),
        strict=True,
    ):
        saved = 2 * HIDDEN - quantized_bytes(HIDDEN)  # of a row
        for one, other in zip(both, tokens, strict=True):
            ours, plain = one.sent
            less = [p - o for p, o in zip(plain["forward"], ours["forward"], strict=True)]
            (rows,) = (n for n in less if n)
            assert rows > 0
            assert rows % saved == 0
            assert other.sent[0]["forward"] == ours["forward"]
            assert other.sent[0]["backward"] == other.sent[1]["backward"]
            less = [p - o for p, o in zip(plain["backward"], ours["backward"], strict=True)]
            (rows,) = (n for n in less if n)
            assert rows % saved == 0


def test_the_plan_prices_what_is_sent():
    """Rows of 128 elements, those of the dispatch with 16 bytes for a probability."""
    sizes = Sizes(tokens=12, hidden=128, experts=8, topk=2, ffn=24, ep=2)
    plain = all_to_all(sizes, uniform(sizes))
    both, tokens = (in_eight_bits(plain, sizes, fp8) for fp8 in ("both", "tokens"))
    rows = 12  # to the other rank

    def wires(costs):
        found = [costs[name] for name in ("dispatch", "combine")]
        return [[one.wire for one in x.messages + x.reverses] for x in found]

    assert wires(plain) == [[rows * 272, rows * 272], [rows * 256, rows * 256]]
    assert wires(tokens) == [[pytest.approx(rows * 145), rows * 272], [rows * 256, rows * 256]]
    assert wires(both)[1] == [rows * 256, pytest.approx(rows * 129)]
    job = LayerJob(replace(sizes, hidden=72), RankRates(1.0, lambda message: 0.0))
    assert compare(job, ["fp8"])[0].reason == "128 does not divide the 72 elements of a row"


MODEL = {
    "num_experts": 8, "moe_token_dispatcher_type": "alltoall", "hidden_size": 256,
    "expert_model_parallel_size": 2, "moe_fp8_dispatch": "tokens",
}  # fmt: skip
REFUSED = {
    "width": ({"hidden_size": 200}, "--hidden-size 200: each 128 elements of a row share a scale"),
    "latent width": ({"moe_latent_size": 72}, "--moe-latent-size 72: each 128 elements"),
    "one rank": ({"expert_model_parallel_size": 1}, "nothing is sent to experts"),
    "no experts": ({"num_experts": None}, "the model has no experts"),
    "half": ({"fp16": True}, "fp16 cannot hold its range; use --bf16"),
    "flex": ({"moe_token_dispatcher_type": "flex"}, "is for the dispatcher alltoall or allgather"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    values, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        registry.resolve(MODEL | values, "cpu")


def test_accepted():
    assert not refusal(MODEL)
