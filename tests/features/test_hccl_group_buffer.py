"""``--hccl-group-buffer`` and its relatives: what they ask for, and where they are refused."""

from __future__ import annotations

import pytest

from mindspeed.errors import ConfigError
from mindspeed.features.platform.hccl_group_buffer import HcclGroupBuffer
from mindspeed.features.registry import resolve

LLAMA = {
    "seq_length": 8192, "micro_batch_size": 1, "hidden_size": 4096, "num_attention_heads": 32,
    "group_query_attention": True, "num_query_groups": 8, "bf16": True,
    "tensor_model_parallel_size": 4, "sequence_parallel": True,
}  # fmt: skip
FACTOR = {"hccl_ep_group_buffer_adaptive_factor": 1.5}
ADAPTIVE = {"hccl_group_buffer_adaptive": True}


def test_traffic_is_read_from_megatrons_arguments():
    traffic = HcclGroupBuffer().traffic_of(LLAMA | {"context_parallel_size": 2})
    assert (traffic.tokens, traffic.hidden_size, traffic.key_size) == (4096, 4096, 1024)
    assert (traffic.element, traffic.tensor_parallel, traffic.sequence_parallel) == (2, 4, True)
    assert (traffic.ring, traffic.ulysses, traffic.expert_factor) == (True, False, None)
    whole = HcclGroupBuffer().traffic_of(LLAMA | {"group_query_attention": False})
    assert (whole.key_size, whole.ring, whole.ulysses) == (4096, False, False)
    options = HcclGroupBuffer(**FACTOR)
    algorithms = {"ulysses_cp_algo": (False, True), "hybrid_cp_algo": (True, True)}
    for algorithm, (ring, ulysses) in algorithms.items():
        context = {"context_parallel_size": 2, "context_parallel_algo": algorithm}
        found = options.traffic_of(LLAMA | context)
        assert (found.ring, found.ulysses, found.expert_factor) == (ring, ulysses, 1.5)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "given", [{"hccl_group_buffer": "tp:3"}, ADAPTIVE, {"hccl_op_mode": "tp:3"}]
)
def test_other_devices_have_no_such_buffers(device, given):
    with pytest.raises(ConfigError, match=f"does not run on {device}; it runs on npu"):
        resolve(LLAMA | given, device)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"hccl_group_buffer": "xx:3"}, "--hccl-group-buffer: unknown group 'xx'"),
        ({"hccl_op_mode": "tp3"}, "--hccl-op-mode: 'tp3' is not NAME:NUMBER"),
        (FACTOR, "has no effect without --hccl-group-buffer-adaptive"),
        (ADAPTIVE | FACTOR, "the model has no experts"),
        ({"hccl_ep_group_buffer_adaptive_factor": 0.0}, "must be"),
    ],
)
def test_wrong_values_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        resolve(LLAMA | given, "npu")


def test_on_an_npu_they_are_on():
    experts = {"num_experts": 8, "moe_router_topk": 2}
    values = LLAMA | experts | ADAPTIVE | FACTOR | {"hccl_group_buffer": "dp:100"}
    assert "hccl-group-buffer" in [f.name for f in resolve(values, "npu").enabled]
