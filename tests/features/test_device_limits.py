"""What Megatron ships and this device cannot do is refused with one sentence."""

from __future__ import annotations

import argparse
import os
import re
from types import SimpleNamespace

import pytest

from mindspeed import device
from mindspeed.adaptor import arguments
from mindspeed.features.compatibility.unsupported_combinations import UnsupportedCombinations

FSDP = {"use_megatron_fsdp": True}
OFF = {
    "cuda_graph_impl": "none",
    "enable_cuda_graph": False,
    "use_torch_fsdp2": False,
    "use_megatron_fsdp": False,
    "data_parallel_sharding_strategy": "no_shard",
    "nccl_communicator_config_path": None,
}
GRAPHS = "--cuda-graph-impl .*CUDA graphs need an NVIDIA GPU; drop it"
NO_SHARD = "no_shard: Megatron-FSDP .* does not add up the gradients.*drop --use-megatron-fsdp"
# Arguments -> the sentence, and the devices that can do it.
EXPERT_BIASES = {"num_experts": 4, "add_bias_linear": True}
GROUPED_BIASES = {"num_experts": 4, "moe_grouped_gemm": True, "add_bias_linear": True}
CASES = {
    "local graphs": ({"cuda_graph_impl": "local"}, GRAPHS, {"cuda"}),
    "graphs of the engine": (
        {"cuda_graph_impl": "transformer_engine"},
        GRAPHS,
        {"cuda"},
    ),
    "old name of graphs": ({"enable_cuda_graph": True}, GRAPHS, {"cuda"}),
    "other old name": ({"external_cuda_graph": True}, GRAPHS, {"cuda"}),
    "no_shard": ({**FSDP, "data_parallel_sharding_strategy": "no_shard"}, NO_SHARD, set()),
    "FSDP2": ({"use_torch_fsdp2": True}, "--use-torch-fsdp2 .*use --use-megatron-fsdp", set()),
    "options of NCCL": (
        {"nccl_communicator_config_path": "x.yaml"},
        "it describes communicators of NCCL",
        {"cuda", "cpu"},
    ),
    "user buffers": ({"nccl_ub": True}, "--use-nccl-ub: it registers buffers with NCCL", {"cuda"}),
    "batch invariance": ({"batch_invariant_mode": True}, "kernels need Triton", {"cuda"}),
    "flex dispatcher": ({"moe_token_dispatcher_type": "flex"}, "DeepEP and HybridEP", {"cuda"}),
    "grouped biases, fused dropout": (
        GROUPED_BIASES | {"bias_dropout_fusion": True},
        "--moe-grouped-gemm with biases: does not work with the fusion .* --no-bias-dropout-fusion",
        set(),
    ),
    "grouped biases": (GROUPED_BIASES, "", {"cpu", "cuda", "npu"}),
    "grouped biases of the local spec": (
        GROUPED_BIASES | {"transformer_impl": "local"},
        "--moe-grouped-gemm with --transformer-impl local: has no biases",
        set(),
    ),
    "biases fused with GELU": (
        EXPERT_BIASES | {"bias_gelu_fusion": True},
        "--num-experts with biases: .* add --no-bias-gelu-fusion",
        set(),
    ),
    "biases fused with SwiGLU": (
        EXPERT_BIASES | {"swiglu": True, "bias_swiglu_fusion": True},
        "--num-experts with biases: .* add --no-bias-swiglu-fusion",
        set(),
    ),
    "biases of experts": (
        EXPERT_BIASES | {"swiglu": True, "bias_gelu_fusion": True, "bias_swiglu_fusion": False},
        "",
        {"cpu", "cuda", "npu"},
    ),
    "biases of gates": (
        EXPERT_BIASES | {"quick_geglu": True, "bias_gelu_fusion": True},
        "",
        {"cpu", "cuda", "npu"},
    ),
}
DEVICES = ("cpu", "cuda", "npu")


@pytest.fixture
def unavailable(monkeypatch):
    def problems(values, name):
        here = SimpleNamespace(name=name, on_host=name == "cpu")
        monkeypatch.setattr(device, "current", lambda: here)
        return [str(p) for p in UnsupportedCombinations().problems(values)]

    return problems


@pytest.mark.parametrize("case", CASES)
def test_every_device_refuses_what_it_cannot_do(case, unavailable):
    values, sentence, able = CASES[case]
    for name in DEVICES:
        problems = unavailable({**OFF, **values}, name)
        if name in able:
            assert problems == []
        else:
            (problem,) = problems
            assert re.search(sentence, problem)


def test_unset_flags_are_not_refused(unavailable):
    for name in DEVICES:
        assert unavailable(OFF, name) == []
        assert unavailable({}, name) == []
        shards = {**OFF, **FSDP, "data_parallel_sharding_strategy": "optim"}
        assert unavailable(shards, name) == []


def _refused_by_both_doors(values, flags):
    from mindspeed import session
    from mindspeed.errors import ConfigError
    from mindspeed.training.initialize import prepare

    with pytest.raises(ConfigError) as scripts:
        session.install().configure({**OFF, **values})
    with pytest.raises(ConfigError) as trainer:
        prepare(flags, 2)
    return str(scripts.value), str(trainer.value)


def test_all_ranks_refuse_when_the_arguments_are_final(ranks):
    model = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --lr 1"
    data = "--train-iters 1 --micro-batch-size 1 --mock-data --tokenizer-type NullTokenizer"
    wrong = "--bf16 --vocab-size 8 --cuda-graph-impl local --fp4-format e2m1 --use-nccl-ub"
    wrong += " --fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag"
    values = {"cuda_graph_impl": "local", "fp4": "e2m1", "nccl_ub": True}
    values |= {"fp8_param_gather": True, "reuse_grad_buf_for_mxfp8_param_ag": True}
    flags = f"{model} {data} {wrong}".split()
    messages = ranks(2, _refused_by_both_doors, values, flags, setup="tests.support.warm")
    (message,) = {message for both in messages for message in both}
    refused = {line.split()[0].rstrip(":") for line in message.splitlines()}
    assert refused >= {
        "--fp4-format",
        "--cuda-graph-impl",
        "--use-nccl-ub",
        "--fp8-param-gather",
        "--reuse-grad-buf-for-mxfp8-param-ag",
    }


@pytest.mark.parametrize("name_of_device", ["cpu", "npu", "cuda"])
@pytest.mark.parametrize("given", [None, "1", "8"])
def test_cuda_device_max_connections_is_required_on_cuda_only(name_of_device, given, monkeypatch):
    """Megatron demands 1 with tensor or context parallelism, and something else with FSDP."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(name, given)
    monkeypatch.setattr(device, "current", lambda: SimpleNamespace(name=name_of_device))
    seen = []
    _, patch = arguments.argument_patches(
        lambda parser: parser, tuple, lambda args: None, lambda args: None
    )
    validate = patch.make(lambda args, defaults: seen.append(os.environ.get(name)))
    for fsdp in ({}, {"use_torch_fsdp2": True}, {"use_megatron_fsdp": True}):
        validate(argparse.Namespace(**fsdp), {})
        assert os.environ.get(name) == given
    assert seen == ([given] * 3 if name_of_device == "cuda" else ["1", None, None])
