"""Options of Megatron's that cannot work: on this device, or in this release on any.

They are refused when Megatron's arguments are final, by every rank, before there is a process
group; without this each ends in a traceback of Megatron's later, or in a wrong result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class _Option:
    """One option: how it is given, whether it cannot work here, why, and what to do."""

    flag: str
    asked: Callable[[Mapping[str, Any]], Any]
    cannot: Callable[[str, str], bool]
    why: str


def _without_cuda(device: str, te: str) -> bool:
    return device != "cuda"


def _without_native_engine(device: str, te: str) -> bool:
    return te != "native"


def _anywhere(device: str, te: str) -> bool:
    return True


_OPTIONS = (
    _Option(
        "--cuda-graph-impl (--enable-cuda-graph, --external-cuda-graph)",
        lambda values: (
            values.get("cuda_graph_impl") not in (None, "none")
            or values.get("enable_cuda_graph")
            or values.get("external_cuda_graph")
        ),
        _without_cuda,
        "CUDA graphs need an NVIDIA GPU, this device is {device}; leave it out",
    ),
    _Option(
        "--fp4-format",
        lambda values: values.get("fp4") or values.get("fp4_param"),
        _without_native_engine,
        "fp4 needs NVIDIA's Transformer Engine on a GPU with fp4 tensor cores, and this process "
        "runs on {device} with its {te} engine; leave it out (--bf16 trains everywhere)",
    ),
    _Option(
        "--use-torch-fsdp2 (and --ckpt-format torch_dcp, which goes with it alone)",
        lambda values: values.get("use_torch_fsdp2"),
        _anywhere,
        "Megatron's wrapper of torch's FSDP2 ends in a TypeError in the first step of 0.16.1, on "
        "every device (finish_grad_sync has no force_all_reduce); use --use-megatron-fsdp "
        "--data-parallel-sharding-strategy optim_grads_params --ckpt-format fsdp_dtensor",
    ),
    _Option(
        "--use-megatron-fsdp --data-parallel-sharding-strategy no_shard",
        lambda values: (
            values.get("use_megatron_fsdp")
            and values.get("data_parallel_sharding_strategy") == "no_shard"
        ),
        _anywhere,
        "Megatron-FSDP 0.16.1 does not add up the gradients of data-parallel ranks with no_shard, "
        "its default; choose optim, optim_grads or optim_grads_params, or leave out "
        "--use-megatron-fsdp, which shards nothing either",
    ),
    _Option(
        "--nccl-communicator-config-path",
        lambda values: values.get("nccl_communicator_config_path"),
        lambda device, te: device == "npu",
        "it describes communicators of NCCL, this device is {device}; leave it out",
    ),
)


def unavailable(values: Mapping[str, Any], device: str, te: str) -> list[str]:
    """One sentence for every option that is given and cannot work.

    Args:
        values: Megatron's arguments.
        device: ``cpu``, ``cuda`` or ``npu``.
        te: ``substitute`` or ``native`` Transformer Engine.
    """
    return [
        f"{option.flag}: {option.why.format(device=device, te=te)}"
        for option in _OPTIONS
        if option.asked(values) and option.cannot(device, te)
    ]
