"""Flags of DeepSpeed's mixture of experts: what is derived, what is refused."""

from __future__ import annotations

import pytest

from mindspeed.errors import ConfigError
from mindspeed.features.registry import derived, resolve

GIVEN = {
    "moe_model_type": "deepspeed_moe",
    "num_experts": 8,
    "num_layers": 6,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_score_function": "softmax",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_layer_freq": 1,
}


def test_on_and_off():
    names = lambda values: [f.name for f in resolve(values, "cpu").enabled]  # noqa: E731
    assert "deepspeed-moe" in names(GIVEN)
    assert "deepspeed-moe" not in names({**GIVEN, "moe_model_type": "megatron_moe"})
    assert "deepspeed-moe" in names({**GIVEN, "enable_token_rearrange_opt": True, "use_rts": False})
    assert derived({"num_experts": 8, "moe_token_dispatcher_type": "allgather"}) == {}


def test_arguments_of_megatron_that_follow():
    assert derived(GIVEN) == {}
    values = {**GIVEN, "moe_token_dispatcher_type": "allgather", "moe_router_topk": 1}
    assert derived(values) == {
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_pre_softmax": True,
    }
    third = derived({**GIVEN, "expert_interval": 3})
    assert third == {"moe_layer_freq": [0, 0, 1, 0, 0, 1]}
    assert derived({**GIVEN, "expert_interval": 3, **third}) == third  # asked again
    with pytest.raises(ConfigError, match=r"--expert-interval 3 and --moe-layer-freq \[1, 0"):
        derived({**GIVEN, "expert_interval": 3, "moe_layer_freq": [1, 0, 0, 1, 0, 0]})
    with pytest.raises(ConfigError, match=r"--expert-interval 7: none of the 6 layers.*use 1 to 6"):
        derived({**GIVEN, "expert_interval": 7})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_experts": None}, "deepspeed_moe: the model has no experts; .*add --num-experts"),
        ({"moe_router_topk": 4}, "--moe-router-topk 4: its gates are top-1 and top-2; use 1 or 2"),
        ({"num_experts": 1}, "--moe-router-topk 2 with --num-experts 1; use top-k 1"),
        ({"moe_train_capacity_factor": 0.0}, "--moe-train-capacity-factor"),
        ({"moe_train_capacity_factor": float("inf")}, "--moe-train-capacity-factor"),
        ({"expert_interval": 0}, "--expert-interval"),
        ({"moe_dynamic_padding": True}, "--moe-dynamic-padding: .*; add --moe-no-drop"),
        (
            {"moe_no_drop": True, "moe_train_capacity_factor": 1.0},
            "--moe-train-capacity-factor 1.0: .* --moe-no-drop does not; remove one",
        ),
        (
            {"moe_use_sinkhorn": True, "noisy_gate_policy": "RSample"},
            "--noisy-gate-policy RSample: .*--moe-use-sinkhorn",
        ),
        ({"moe_router_score_function": "sigmoid"}, "--moe-router-score-function sigmoid"),
        ({"moe_expert_capacity_factor": 2.0}, "--moe-expert-capacity-factor 2.0"),
        ({"moe_router_enable_expert_bias": True}, "--moe-router-enable-expert-bias"),
        ({"moe_input_jitter_eps": 0.1}, "--moe-input-jitter-eps 0.1"),
        ({"moe_router_load_balancing_type": ["seq_aux_loss"]}, "seq_aux_loss: .* one loss"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "use --moe-use-sinkhorn"),
        ({"moe_fb_overlap": True}, "--moe-fb-overlap"),
        ({"moe_latent_size": 8}, "deepspeed_moe: .*--moe-latent-size"),
        ({"tensor_model_parallel_size": 2}, "deepspeed_moe: .*add --sequence-parallel"),
        (
            {"use_pipe_experts": True, "moe_no_drop": True, "moe_dynamic_padding": True},
            "--use-pipe-experts: cannot be combined with --moe-dynamic-padding",
        ),
        ({"variable_seq_lengths": True}, "--variable-seq-lengths: .*add --moe-no-drop"),
        (
            {
                "moe_no_drop": True,
                "moe_dynamic_padding": True,
                "tensor_model_parallel_size": 2,
                "sequence_parallel": True,
            },
            "--moe-dynamic-padding: .*expert tensor parallel size 2 .*-parallel-size 1",
        ),
    ],
)
def test_what_does_not_fit_is_refused(change, said):
    with pytest.raises(ConfigError, match=said):
        values = GIVEN | change
        resolve(values | derived(values), "cpu")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"noisy_gate_policy": "Jitter"}, "--noisy-gate-policy: .*use --moe-input-jitter-eps"),
        ({"expert_interval": 2}, "--expert-interval: .*use --moe-layer-freq"),
        ({"moe_train_capacity_factor": 1.0}, "use --moe-expert-capacity-factor"),
        ({"use_rts": False}, "--no-use-rts: .*use --moe-token-drop-policy"),
        ({"moe_use_sinkhorn": True}, "use --moe-router-load-balancing-type sinkhorn"),
        ({"enable_token_rearrange_opt": True}, "--enable-token-rearrange-opt: .*remove it"),
        ({"moe_no_drop": True}, "--moe-no-drop: .*remove it"),
    ],
)
def test_without_the_model_type_its_flags_are_refused(change, said):
    values = {**GIVEN, "moe_model_type": "megatron_moe"} | change
    with pytest.raises(ConfigError, match=said):
        resolve(values | derived(values), "cpu")


def test_a_framework_that_builds_the_configuration_is_told_what_it_must_contain():
    from types import SimpleNamespace

    from mindspeed.features.experts.deepspeed_moe import _check

    _check(SimpleNamespace(moe_router_topk=2, moe_token_dispatcher_type="alltoall"))
    for topk, dispatcher in ((4, "alltoall"), (2, "allgather")):
        with pytest.raises(ConfigError, match=f'which has {topk} and "{dispatcher}"'):
            _check(SimpleNamespace(moe_router_topk=topk, moe_token_dispatcher_type=dispatcher))
