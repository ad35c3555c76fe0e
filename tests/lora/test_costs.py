"""What adapters cost: communication, saved activations, parameters, optimizer and files."""

from __future__ import annotations

import pytest

from tests.lora import lora_ranks, oracle

SETUP = "tests.support.warm"
TP2, SP = "--tensor-model-parallel-size=2", "--sequence-parallel"
LOCAL = "--transformer-impl=local"
R, TARGETS = 4, ("query_key_value", "dense", "linear_fc1", "dense_4h_to_h")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return oracle.save_base(tmp_path_factory.mktemp("figures") / "base")


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec, sp",
    [
        pytest.param((), (), id="engine"),
        pytest.param((), (SP,), id="engine-sequence-parallel"),
        pytest.param((LOCAL,), (SP,), id="local-sequence-parallel"),
    ],
)
def test_adapters_make_the_communication_calls_of_the_frozen_model(spec, sp, base, ranks):
    flags = [TP2, *sp, *spec]
    frozen, adapted = ranks(
        2, lora_ranks.communication, str(base), flags, TARGETS, R, setup=SETUP, timeout=120
    )[0]
    assert adapted.calls == frozen.calls
    # With sequence parallelism r columns of each column layer travel with its input gradient.
    tokens, layers, column_layers = 2 * lora_ranks.LENGTH, 4, 2
    extra = 4 * tokens * R * column_layers * layers * bool(sp)
    micro_batches = 2
    assert adapted.bytes - frozen.bytes == extra * micro_batches
    assert extra * 20 < frozen.bytes
    # Once per step: A of column layers, B of row layers, in one all-reduce of fp32.
    hidden = oracle.SIZES["hidden_size"]
    per_layer = R * (hidden + hidden) + R * (hidden + hidden)
    assert adapted.step_calls - frozen.step_calls == 1
    assert adapted.step_bytes - frozen.step_bytes == 4 * per_layer * layers


def test_only_adapter_parameters_have_gradients_and_optimizer_state(base, ranks):
    (found,) = ranks(1, lora_ranks.sizes, str(base), TARGETS, R, setup=SETUP)
    hidden, ffn = oracle.SIZES["hidden_size"], oracle.SIZES["intermediate_size"]
    qkv = 2 * hidden  # 8 query heads and 2 x 4 of keys and values
    ins_and_outs = (hidden + qkv) + (hidden + hidden) + (hidden + 2 * ffn) + (ffn + hidden)
    trainable = 4 * R * ins_and_outs
    assert found["trainable"] == trainable
    assert found["gradient bytes"] == 4 * trainable
    assert found["optimizer bytes"] == 2 * 4 * trainable  # both moments; weights are fp32
    # What is stored is the adapter and nothing else.
    assert found["stored elements"] == trainable
    (full,) = ranks(1, lora_ranks.sizes, str(base), (), R, setup=SETUP)
    assert full["optimizer bytes"] == 2 * 4 * full["trainable"]
    assert found["optimizer bytes"] * 4 < full["optimizer bytes"]


def test_activations_of_adapters_on_one_layer_are_fewer_than_of_full_training(base, ranks):
    """Layers without an adapter keep no input; one with an adapter keeps it, and u of r columns."""
    (found,) = ranks(1, lora_ranks.activations, str(base), ("dense",), R, setup=SETUP)
    hidden, ffn = oracle.SIZES["hidden_size"], oracle.SIZES["intermediate_size"]
    layers, tokens = 4, 2 * lora_ranks.LENGTH
    # Inputs of the three layers without an adapter; gated activations are in no other use.
    saved = found["full"] - found["adapters"]
    inputs = 4 * tokens * layers * (hidden + ffn)
    assert inputs <= saved + 4 * tokens * layers * R
    assert found["adapters"] < 0.9 * found["full"]
