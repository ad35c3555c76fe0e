"""Flags of ``--swap-attention`` that are refused, and what the limit of host memory says."""

from __future__ import annotations

import pytest

from mindspeed.errors import ConfigError
from mindspeed.features.registry import resolve
from mindspeed.memory.host_pool import HostLimit
from mindspeed.memory.layer_rules import ChunkLayers, swap_plan
from mindspeed.memory.plan import LAYER, SiteAction

SIZES = {
    "num_layers": 8,
    "seq_length": 4096,
    "micro_batch_size": 1,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "pipeline_model_parallel_size": 2,
    "bf16": True,
}
SELECTIVE = {"recompute_granularity": "selective"}


def problems(**flags) -> str:
    values = {**SIZES, "optimization_level": 2, "swap_attention": True, **flags}
    try:
        resolve(values, "cpu")
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"recompute_num_layers": 4},
        {"swap_modules": ("self_attention",), "recompute_norm": True},
        {**SELECTIVE, "recompute_modules": ["core_attn"]},
        {"recompute_activation_function": True},
    ],
    ids=str,
)
def test_what_can_be_combined(flags):
    assert problems(**flags) == ""


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"swap_attention": False, "swap_modules": ("mlp",)}, ["--swap-modules", "no effect"]),
        ({"swap_attention": False, "swap_min_bytes": 0}, ["--swap-min-bytes", "no effect"]),
        ({"swap_modules": ()}, ["--swap-modules", "names no module"]),
        ({"recompute_granularity": "full"}, ["--swap-attention", "--recompute-granularity full"]),
        ({**SELECTIVE, "recompute_modules": ["layernorm"]}, ["--recompute-modules layernorm"]),
        ({"recompute_norm": True}, ["--swap-modules", "input_norm", "--recompute-norm"]),
        ({"adaptive_recompute_device_swap": True}, ["--adaptive-recompute-device-swap"]),
        ({"adaptive_recompute_device_size": 100}, ["--adaptive-recompute-device-size"]),
        ({"cpu_offloading": True, "cpu_offloading_num_layers": 1}, ["--cpu-offloading"]),
        (
            {"fine_grained_activation_offloading": True},
            ["--swap-attention", "--fine-grained-activation-offloading"],
        ),
        ({"cuda_graph_impl": "local"}, ["--cuda-graph-impl"]),
        ({"recompute_num_layers": 5}, ["--recompute-num-layers", "5 of 4 layers"]),
        ({"num_layers": 1, "pipeline_model_parallel_size": 1}, ["no effect: the last layer"]),
        ({"seq_length": 64}, ["524,288 bytes", "--swap-min-bytes is 1,048,576"]),
    ],
    ids=str,
)
def test_what_is_refused(flags, named):
    said = problems(**flags)
    assert all(words in said for words in named), said


def test_host_memory_that_is_too_small_is_refused_with_the_numbers():
    gib = 1 << 30
    limit = HostLimit("--swap-attention", lambda: 12, 8, lambda: 120 * gib)
    limit.check(gib)  # 96 of 120 GiB
    said = r"98,400 MiB .*\(1,025.0 MiB .* 12 layer calls .* 8 ranks .* 122,880 MiB .* 80%"
    with pytest.raises(ConfigError, match=said):
        limit.check(gib + (1 << 20))


def test_the_last_layer_before_the_loss_stays_and_the_first_mlps_are_computed_again():
    sites = {f"decoder.layers.{i}": ("input_layernorm", "self_attention", "mlp") for i in range(3)}
    sites["mtp.layers.0.mtp_model_layer"] = ("self_attention", "mlp")
    decoder = {path: i for i, path in enumerate(sites) if path.startswith("decoder")}

    def plan(**chunk):
        layers = ChunkLayers(decoder, {}, ("mtp.layers.0.mtp_model_layer",), **chunk)
        return [dict(actions) for actions in swap_plan(sites, layers, swapped).layers.values()]

    swapped = ["input_layernorm", "self_attention"]
    swap = dict.fromkeys(swapped, SiteAction.OFFLOAD)
    keep, again = {LAYER: SiteAction.KEEP}, {"mlp": SiteAction.RECOMPUTE}
    attention = {"self_attention": SiteAction.OFFLOAD}
    assert plan() == [swap, swap, swap, keep]
    assert plan(post_process=False) == [swap, swap, swap, attention]
    assert plan(recomputed_mlps=2) == [swap | again, swap | again, swap, keep]
    # The second of two chunks: 3 layers of the stage are two of the first chunk, one of this.
    second = {"chunk": 1, "chunks": 2, "recomputed_mlps": 3, "post_process": False}
    assert plan(**second) == [swap | again, swap, swap, attention]
    only = {"decoder.layers.0": ("self_attention", "mlp")}
    layers = ChunkLayers({"decoder.layers.0": 0}, {}, recomputed_mlps=1)
    assert swap_plan(only, layers, swapped).layers == {"decoder.layers.0": keep | again}
    assert swap_plan({}, ChunkLayers({}, {}), swapped).layers == {}
