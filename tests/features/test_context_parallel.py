"""The flags of context parallelism: what they mean, and what is refused before anything runs."""

from __future__ import annotations

import argparse
import copy
import pickle

import pytest

from mindspeed.attention.strategy import COMM_TYPE_NOT_GIVEN, Strategy
from mindspeed.errors import ConfigError
from mindspeed.features.attention import context_parallel as feature
from mindspeed.features.attention.context_parallel import ContextParallel
from mindspeed.features.registry import resolve
from mindspeed.training.arguments import build_parser, parse

MODEL = {
    "context_parallel_size": 8,
    "tensor_model_parallel_size": 2,
    "num_attention_heads": 32,
    "group_query_attention": True,
    "num_query_groups": 4,
    "num_layers": 4,
    "seq_length": 4096,
    "cp_comm_type": COMM_TYPE_NOT_GIVEN,
}


def resolved(**values):
    """The feature and its corrections of Megatron's arguments."""
    megatron = MODEL | values
    configuration = resolve(megatron, "cpu")
    assert "context-parallel" in [f.name for f in configuration.enabled]
    chosen = configuration.features["context-parallel"]
    return chosen, chosen.corrects(megatron)


def test_copies_of_the_arguments_keep_the_algorithm():
    """Whether --cp-comm-type was given is not lost in copies, before and after corrections."""
    for algorithm in ("ulysses_cp_algo", "adaptive_cp_algo", "megatron_cp_algo"):
        args = parse(["--context-parallel-algo", algorithm], build_parser())
        by_caller = argparse.Namespace(**{**vars(args), "cp_comm_type": ["p2p"]})
        args.context_parallel_size = 8
        corrected = argparse.Namespace(**vars(args))
        vars(corrected).update(_chosen(args).corrects(vars(args)))
        for copied in (copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))):
            assert feature.comm_types(vars(copied(args))) is None
            assert feature.comm_types(vars(copied(corrected))) is None
            assert feature.comm_types(vars(copied(by_caller))) == ["p2p"]
        given = parse(["--cp-comm-type", "p2p"], build_parser())
        assert feature.comm_types(vars(copy.deepcopy(given))) == ["p2p"]


def _chosen(args):
    return resolve(vars(args), "cpu").features["context-parallel"]


def strategy(**values):
    return resolved(**values)[0].strategy_of()


def test_default_is_ulysses():
    options, corrections = resolved()
    assert options.strategy_of() == Strategy("ulysses")
    assert corrections == {
        "cp_comm_type": ("a2a",),
        "create_attention_mask_in_dataloader": False,
    }


@pytest.mark.parametrize(
    ("values", "expected", "comm_type"),
    [
        ({"context_parallel_algo": "megatron_cp_algo"}, Strategy("ring"), "p2p"),
        (
            {
                "context_parallel_algo": "megatron_cp_algo",
                "cp_window_size": 4,
                "use_fused_ring_attention_update": True,
            },
            Strategy("ring", ring_window=4, fused_merge=True),
            "p2p",
        ),
        (
            {"context_parallel_algo": "kvallgather_cp_algo", "kvallgather_head_groups": 2},
            Strategy("all_gather", head_groups=2),
            "all_gather",
        ),
        (
            {
                "context_parallel_algo": "hybrid_cp_algo",
                "ulysses_degree_in_cp": 2,
                "cp_window_size": 2,
            },
            Strategy("hybrid", ulysses_degree=2, ring_window=2),
            "a2a+p2p",
        ),
        (
            {
                "context_parallel_algo": "adaptive_cp_algo",
                "adaptive_cp_granularity": 64,
                "adaptive_cp_overlap_degree": 3,
            },
            Strategy("adaptive", granularity=64, overlap=3),
            "p2p",
        ),
        (
            {
                "context_parallel_algo": "hybrid_adaptive_cp_algo",
                "ulysses_degree_in_cp": 4,
                "adaptive_cp_without_coarse": True,
                "adaptive_cp_only_reschedule": True,
            },
            Strategy("hybrid_adaptive", ulysses_degree=4, granularity=1, reshard=False),
            "a2a+p2p",
        ),
    ],
)
def test_algorithms(values, expected, comm_type):
    options, corrections = resolved(**values)
    assert options.strategy_of() == expected
    assert corrections["cp_comm_type"] == (comm_type,)
    if expected.hybrid:
        sizes = [expected.ulysses_degree, 8 // expected.ulysses_degree]
        assert corrections["hierarchical_context_parallel_sizes"] == sizes


def test_comm_type_wins_where_it_is_given():
    options, corrections = resolved(
        cp_comm_type=["p2p"], cp_window_size=2, context_parallel_kv_cache_policy="half"
    )
    assert "cp_comm_type" not in corrections
    chosen = options.strategy_of("p2p", 1)
    assert chosen == Strategy("ring", ring_window=2, cache="half")
    assert options.strategy_of("a2a", 1).algorithm == "ulysses"


def test_reconfiguring_uses_the_algorithm_not_its_previous_correction():
    _, corrections = resolved()
    _, again = resolved(
        cp_comm_type=corrections["cp_comm_type"], context_parallel_algo="megatron_cp_algo"
    )
    assert again["cp_comm_type"] == ("p2p",)


def test_cache_interval():
    chosen = strategy(
        context_parallel_algo="megatron_cp_algo",
        context_parallel_kv_cache_policy="full",
        context_parallel_cache_interval=2,
    )
    assert [chosen.cache_of(layer) for layer in range(1, 7)] == ["full", None, None] * 2


def test_unsaved_scores_are_not_recomputed(capsys):
    _, corrections = resolved(recompute_granularity="selective", recompute_modules=None)
    assert corrections["recompute_granularity"] is None
    _, corrections = resolved(
        recompute_granularity="selective", recompute_modules=["core_attn", "layernorm"]
    )
    assert corrections["recompute_granularity"] == "selective"
    assert corrections["recompute_modules"] == ["layernorm"]
    assert "core_attn is not recomputed" in capsys.readouterr().out


def test_the_data_loader_makes_no_causal_mask():
    assert "create_attention_mask_in_dataloader" not in resolved(attention_mask_type="general")[1]


RING = {"context_parallel_algo": "megatron_cp_algo"}
HYBRID = {"context_parallel_algo": "hybrid_cp_algo"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"seq_length": 4088, **RING},
            r"context parallel: sequence length S=4088 must be divisible by 2\*CP=16 \(Megatron "
            r"slices zigzag\); pack documents or use adaptive_cp_algo",
        ),
        (HYBRID, "hybrid: --ulysses-degree-in-cp None must be > 1 and divide"),
        (
            HYBRID | {"ulysses_degree_in_cp": 3},
            "hybrid: --ulysses-degree-in-cp 3 must be > 1 and divide --context-parallel-size 8 "
            "with quotient > 1",
        ),
        (HYBRID | {"ulysses_degree_in_cp": 8}, "with quotient > 1"),
        (RING | {"ulysses_degree_in_cp": 2}, "--ulysses-degree-in-cp 2: megatron_cp_algo has no"),
        (RING | {"cp_window_size": 3}, r"--cp-window-size 3: must be in \[1, 8\) and divide 8"),
        (RING | {"cp_window_size": 8}, r"--cp-window-size 8: must be in \[1, 8\) and divide 8"),
        (
            HYBRID | {"ulysses_degree_in_cp": 2, "cp_window_size": 4},
            r"--cp-window-size 4: must be in \[1, 4\) and divide 4",
        ),
        ({"cp_window_size": 2}, "--cp-window-size 2: is for a ring, there is none"),
        (
            HYBRID | {"ulysses_degree_in_cp": 4, "num_attention_heads": 4},
            r"hybrid: 4 heads / \(TP 2 \* 4 ranks that exchange heads\) is less than one",
        ),
        (
            {"context_parallel_cache_interval": 1, **RING},
            r"kv cache: --context-parallel-cache-interval 1 needs "
            r"--context-parallel-kv-cache-policy and must be in \[0, num_layers\)",
        ),
        (
            {
                "context_parallel_cache_interval": 4,
                "context_parallel_kv_cache_policy": "full",
                **RING,
            },
            "kv cache: --context-parallel-cache-interval 4 needs",
        ),
        (
            {"context_parallel_kv_cache_policy": "full", "num_query_groups": 16},
            "full: Ulysses with 8 key heads per tensor rank over CP=8 sends none twice",
        ),
        ({"use_ulysses_allgather_kv": True}, "--use-ulysses-allgather-kv: 2 key heads"),
        ({"use_ulysses_allgather_kv": True, **RING}, "--use-ulysses-allgather-kv"),
        ({"cp_window_size": 2, "context_parallel_size": 1}, "need more than one rank"),
        (
            {"use_fusion_attn_v2": True, "attention_dropout": 0.1},
            "dropout with --use-fusion-attn-v2 and context parallelism is not supported",
        ),
        ({"adaptive_cp_granularity": 0}, "--adaptive-cp-granularity 0 must be at least 1"),
        (
            {"seq_length": 4090, "context_parallel_algo": "adaptive_cp_algo"},
            "sequence length S=4090 must be divisible by CP=8",
        ),
        ({"adaptive_cp_manually_set_mask_list": True, **RING}, "is for adaptive_cp_algo"),
        (
            {
                "adaptive_cp_manually_set_mask_list": True,
                "context_parallel_algo": "adaptive_cp_algo",
            },
            "add --attention-mask-type general",
        ),
        ({"cp_comm_type": ["ring"]}, "--cp-comm-type: 'ring' is not one of p2p, all_gather"),
        ({"cp_comm_type": ["p2p", "a2a"]}, "2 values for 4 layers"),
        ({"cp_comm_type": ["a2a+p2p"]}, "add --hierarchical-context-parallel-sizes"),
        ({"optimization_level": 1, **RING}, "--optimization-level >= 2"),
    ],
)
def test_invalid_values_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        resolve(MODEL | values, "cpu")


def test_any_length_with_an_adaptive_layout_or_packed_documents():
    assert strategy(seq_length=4088, context_parallel_algo="adaptive_cp_algo").adaptive
    resolve(MODEL | {"seq_length": 4088, "reset_attention_mask": True,
                     "calculate_per_token_loss": True}, "cpu")  # fmt: skip


def test_uneven_heads_are_reported():
    options, _ = resolved(num_attention_heads=56)
    (text,) = options.uneven_heads(MODEL | {"num_attention_heads": 56}, None)
    uneven = "ulysses: 28 query heads per TP rank over CP=8: uneven split, balance 0.875"
    assert text == f"{uneven}; a ring attends to 4 of them instead"
    assert not list(options.uneven_heads(MODEL, None))


def test_without_context_parallelism_nothing_is_on():
    configuration = resolve({"context_parallel_size": 1}, "cpu")
    assert not configuration.enabled
    assert ContextParallel() == configuration.features["context-parallel"]
