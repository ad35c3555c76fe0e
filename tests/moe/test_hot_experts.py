"""Hot experts are computed where the tokens are: less load on the fullest rank, same results."""

from __future__ import annotations

import pytest
import torch

from mindspeed.errors import ConfigError
from mindspeed.features import registry
from mindspeed.moe.hot_experts import choose, loads
from tests.moe import layer_ranks as jobs
from tests.support.lazy import needs

needs("megatron.core")

ADAPTOR = "tests.support.warm"
SHARED = {"moe_shared_expert_intermediate_size": 20}
HOT = [
    {"hot_experts": n, "hot_messages": m, "dropped": True, "overlap": o}
    for n, m, o in ((1, 1, False), (3, 3, False), (3, 2, True))
]


def routing(seed, ranks=8, experts=32, topk=4, tokens=512):
    """Counts of tokens whose preferences for experts differ as in early training."""
    generator = torch.Generator().manual_seed(seed)
    preference = torch.randn(experts, generator=generator)
    scores = preference + torch.randn(ranks, tokens, experts, generator=generator)
    chosen = scores.topk(topk, dim=-1).indices.flatten(1)
    return torch.stack([torch.bincount(row, minlength=experts) for row in chosen])


def fullest(counts, hot=()):
    load = loads(counts, hot).double()
    return (load.max() / load.mean()).item()


def test_loads_of_ranks_with_hot_experts():
    """Three ranks with two experts each, by hand."""
    counts = torch.tensor([[5, 1, 0, 0, 2, 0], [7, 0, 1, 0, 0, 0], [3, 2, 1, 1, 1, 1]])
    assert loads(counts).tolist() == [18, 3, 4]
    assert choose(counts, 1) == [0]
    assert loads(counts, [0]).tolist() == [5 + 3, 7 + 3, 3 + 4]
    assert choose(counts, 2) == [0, 2]  # rank 1 is the fullest then, and expert 2 its largest
    assert choose(torch.zeros(2, 4, dtype=torch.int64), 2) == []


def test_the_choice_by_ranks_balances_better_than_the_largest_experts():
    rows = []
    for seed in range(20):
        counts = routing(seed)
        largest = counts.sum(0).topk(3).indices.tolist()
        rows.append([fullest(counts), fullest(counts, largest), fullest(counts, choose(counts, 3))])
    none, largest, ours = torch.tensor(rows).mean(0).tolist()
    assert (round(none, 2), round(largest, 2), round(ours, 2)) == (2.17, 1.64, 1.47)


def check(results, tolerance=2e-6):
    expected, *found = results
    for result in found:
        torch.testing.assert_close(result.output, expected.output, rtol=tolerance, atol=tolerance)
        assert result.gradients.keys() == expected.gradients.keys()
        for name, gradient in expected.gradients.items():
            torch.testing.assert_close(
                result.gradients[name], gradient, rtol=tolerance, atol=tolerance
            )


@pytest.mark.parametrize("shared", [{}, SHARED], ids=["routed", "shared"])
def test_hot_experts_equal_megatrons_layer(ranks, shared):
    twice = [*HOT, HOT[1]]
    for results in ranks(2, jobs.compare, "te", {"expert": 2}, shared, twice, setup=ADAPTOR):
        check(results)
        again, first = results[-1].gradients, results[2].gradients
        assert all(gradient.equal(first[name]) for name, gradient in again.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "options"),
    [
        ({"moe_router_topk": 1, "moe_router_pre_softmax": True}, {"tokens": 1}),
        ({"moe_router_topk": 3}, {"steps": 2}),
        ({}, {"frozen": "experts"}),
        ({"params_dtype": torch.bfloat16, "bf16": True}, {}),
    ],
    ids=["one token", "two steps", "frozen", "bf16"],
)
def test_other_layers(ranks, overrides, options):
    given = (options, "te", {"expert": 2}, overrides, HOT)
    for results in ranks(2, jobs.compare_with, *given, setup=ADAPTOR):
        check(results, 2e-6 if "bf16" not in overrides else 4e-2)


def test_rows_of_hot_experts_do_not_travel(ranks):
    """Their weights travel while rows are permuted, and their products hide the dispatch."""
    for results in ranks(2, jobs.compare, "te", {"expert": 2}, {}, [{}, HOT[1]], setup=ADAPTOR):
        plain, hot = (result.log for result in results[1:])
        sent = [
            sum(e.bytes for e in log.communications("forward") if e.name == "dispatch.rows")
            for log in (plain, hot)
        ]
        assert sent[1] < sent[0]
        assert not [e for e in hot.exposed("forward") if e.name.startswith(("weights", "dispatch"))]


ON = {
    "balanced_moe_experts": True,
    "num_experts": 8,
    "expert_model_parallel_size": 2,
    "moe_grouped_gemm": True,
    "add_bias_linear": False,
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_experts": None}, "add --num-experts"),
        ({"balanced_moe_hot_expert_num": 5}, "more than the 4 experts of a rank; choose 1 to 4"),
        ({"balanced_moe_experts": False, "trans_hot_expert_group_num": 2}, "have no effect"),
        ({"expert_model_parallel_size": 1}, "nothing is sent by all-to-all"),
        ({"tensor_model_parallel_size": 2}, "add --moe-tp-extend-ep"),
        ({"moe_token_dispatcher_type": "allgather"}, "the dispatcher is allgather"),
        ({"transformer_impl": "local"}, "--transformer-impl transformer_engine"),
        ({"moe_grouped_gemm": False}, "give --moe-grouped-gemm"),
        ({"moe_expert_capacity_factor": 1.0}, "combined with --moe-expert-capacity-factor"),
        ({"lora_target_modules": ("experts.linear_fc1",)}, "combined with --lora-target-modules"),
        ({"add_bias_linear": True}, "give --disable-bias-linear"),
        ({"moe_experts_pipeline_degree": 2}, "combined with --moe-experts-pipeline-degree"),
        ({"zero_stage": 3}, "combined with --zero-stage 3"),
    ],
)
def test_what_it_needs_and_excludes(change, said):
    registry.resolve(ON, "cpu")
    with pytest.raises(ConfigError, match=said):
        registry.resolve(ON | change, "cpu")
