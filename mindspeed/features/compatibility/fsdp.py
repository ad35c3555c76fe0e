"""Refuse what Megatron-FSDP 0.16.1 cannot do, or silently does wrong.

Megatron refuses none of it before the model is built. The trainer names ``--zero-stage`` for some
of it first (:mod:`mindspeed.training.zero`).
"""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed.features.feature import Megatron, Problem, conflict

_FLAG = "--use-megatron-fsdp"
# Flag of Megatron's -> why it excludes Megatron-FSDP, and what to use instead.
_EXCLUDED = {
    "fp16": (
        "--fp16",
        "the scaled gradient of parameters of which a rank has nothing is looked for",
        "use --bf16",
    ),
    "use_precision_aware_optimizer": (
        "--use-precision-aware-optimizer",
        "that optimizer looks for gradients where Megatron-FSDP puts none, and no weight changes",
        "drop it",
    ),
    "fake_process_group": (
        "--fake-process-group",
        "its check of the shards of all ranks fails where they send nothing",
        "use mindspeed plan --check, which counts the step of any rank",
    ),
    "fsdp_double_buffer": (
        "--fsdp-double-buffer",
        "a buffer is used again while its gradients are still being reduced",
        "drop it",
    ),
    "nccl_ub": (
        "--use-nccl-ub",
        "it implies --fsdp-double-buffer, which uses a buffer again while its gradients are still "
        "being reduced",
        "drop it",
    ),
}


def problems(megatron: Megatron) -> Iterator[Problem]:
    """Find what is wrong with Megatron-FSDP in these arguments."""
    if not megatron.get("use_megatron_fsdp"):
        return
    for name, (other, why, fix) in _EXCLUDED.items():
        if megatron.get(name):
            yield conflict(_FLAG, other, why, fix)
    if (stages := megatron.get("pipeline_model_parallel_size") or 1) > 1:
        yield conflict(
            _FLAG,
            f"--pipeline-model-parallel-size {stages}",
            "its groups are made of all ranks, and its checkpoints name layers by their number in "
            "the stage",
            "use --use-distributed-optimizer alone",
        )
    yield from _of_strategy(megatron)


def _of_strategy(megatron: Megatron) -> Iterator[Problem]:
    strategy = megatron.get("data_parallel_sharding_strategy")
    flag = f"{_FLAG} --data-parallel-sharding-strategy {strategy}"
    if strategy == "no_shard":
        yield Problem(
            flag,
            "Megatron-FSDP 0.16.1 does not add up the gradients of data-parallel ranks with "
            "no_shard, its default",
            "choose optim, optim_grads or optim_grads_params, or drop --use-megatron-fsdp, which "
            "shards nothing either",
        )
    if strategy == "optim" and megatron.get("gradient_accumulation_fusion"):
        yield Problem(
            flag,
            "the fused gradient of an output layer replaces the sum of the earlier micro-batches",
            "add --no-gradient-accumulation-fusion, or choose optim_grads",
        )
    if (megatron.get("num_distributed_optimizer_instances") or 1) > 1:
        yield from _of_instances(megatron, strategy)


def _of_instances(megatron: Megatron, strategy: object) -> Iterator[Problem]:
    flag = "--num-distributed-optimizer-instances"
    if strategy == "optim":
        yield Problem(
            flag,
            "Megatron-FSDP does not add up the gradients of the instances with optim",
            "choose optim_grads or optim_grads_params, or drop it",
        )
    if (outer := megatron.get("outer_dp_sharding_strategy") or "no_shard") != "no_shard":
        yield Problem(
            f"--outer-dp-sharding-strategy {outer}",
            "each instance of Megatron-FSDP clips by the norm of its own part of the gradients",
            "drop it",
        )
