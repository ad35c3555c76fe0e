"""``--zero-stage``: what data-parallel ranks shard.

=====  ===================================  =====================================
stage  each rank keeps a part of            made of
=====  ===================================  =====================================
0      nothing, all keep everything         Megatron's data parallelism
1      optimizer states                     ``--use-distributed-optimizer``
2      and gradients                        Megatron-FSDP, ``optim_grads``
3      and parameters                       Megatron-FSDP, ``optim_grads_params``
=====  ===================================  =====================================

A part is one n-th on n ranks, padded to equal sizes. The losses are those of stage 0.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator

from mindspeed.adaptor.versions import at_least, megatron_version
from mindspeed.device.torch_versions import fused_adam_takes_several_meshes
from mindspeed.flags import given_in
from mindspeed.job import Precision

STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}
# What Megatron-FSDP 0.16.1 leaves out, and the value that stands for "not used".
UNSHARED = {
    "pipeline_model_parallel_size": 1,  # its groups are made of all ranks of the job
    "num_distributed_optimizer_instances": 1,
    "fp16": False,  # it looks for the scaled gradient of parameters of which a rank has nothing
    "optimizer_cpu_offload": False,
    "use_precision_aware_optimizer": False,
    "overlap_param_gather_with_optimizer_step": False,
}


def complete(args: argparse.Namespace, expert_parallel: int = 1) -> Iterator[str]:
    """Turn the stage into Megatron's flags; yields contradictions."""
    stage = args.zero_stage
    if stage is not None and stage not in range(4):
        yield f"--zero-stage {stage} is not one of 0, 1, 2, 3"
        return
    shared, fsdp = args.use_distributed_optimizer, args.use_megatron_fsdp
    if stage == 0 and (shared or fsdp):
        flag = "use-megatron-fsdp" if fsdp else "use-distributed-optimizer"
        yield f"--zero-stage 0 shares nothing, --{flag} does: drop one of them"
    if stage == 1 and fsdp:
        yield "--zero-stage 1 contradicts --use-megatron-fsdp: stages 2 and 3 are Megatron-FSDP"
    if _has_mixed_precision_adapters(args):
        if stage == 0:
            yield (
                "--zero-stage 0 cannot save adapters in --bf16 or --fp16: they are fp32 next to a "
                "16-bit model, which only the distributed optimizer stores; use --zero-stage 1"
            )
        shared = True
    given = given_in(vars(args))
    if stage in (1, 2, 3):
        if "use_distributed_optimizer" in given and not shared:
            yield f"--zero-stage {stage} contradicts --no-use-distributed-optimizer: drop one"
        shared = True
    if stage in STRATEGIES:
        if "use_megatron_fsdp" in given and not fsdp:
            yield f"--zero-stage {stage} contradicts --no-use-megatron-fsdp: drop one"
        strategy = args.data_parallel_sharding_strategy
        if "data_parallel_sharding_strategy" in given and strategy != STRATEGIES[stage]:
            yield (
                f"--zero-stage {stage} is --data-parallel-sharding-strategy {STRATEGIES[stage]}, "
                f"not {strategy}: drop one"
            )
        fsdp = args.use_megatron_fsdp = True
        args.data_parallel_sharding_strategy = STRATEGIES[stage]
    args.use_distributed_optimizer = shared or fsdp
    if fsdp:
        if expert_parallel > 1 and not fused_adam_takes_several_meshes():
            yield (
                "--zero-stage 2 and 3 with --expert-model-parallel-size above 1 need torch 2.9 or "
                "newer: use --zero-stage 1, or --expert-model-parallel-size 1"
            )
        yield from _sharded(
            args, "--use-megatron-fsdp" if stage is None else f"--zero-stage {stage}"
        )


def _has_mixed_precision_adapters(args: argparse.Namespace) -> bool:
    trained = bool(args.save and (args.lora_target_modules or args.lora_load))
    return trained and Precision.of(args).narrow


def _sharded(args: argparse.Namespace, flag: str) -> Iterator[str]:
    """Requirements of Megatron-FSDP and flags that exclude it."""
    strategy = args.data_parallel_sharding_strategy
    if strategy not in STRATEGIES.values():
        yield (
            f"--data-parallel-sharding-strategy {strategy} is not one of "
            f"{', '.join(STRATEGIES.values())}; for less sharding leave out --use-megatron-fsdp "
            "(--zero-stage 0 or 1)"
        )
    if importlib.util.find_spec("einops") is None:
        yield f"{flag} needs the package einops: pip install einops"
    if args.lora_ensure_weight_tying:
        yield f"{flag} shards an adapter once, and --lora-ensure-weight-tying uses it at both ends"
    if args.lora_use_dora or args.lora_init.startswith(("pissa", "olora")):
        yield (
            f"{flag} cannot be combined with --lora-use-dora, nor with --lora-init pissa or olora: "
            "both read or change whole weights of the base; use --zero-stage 1"
        )
    for name, plain in UNSHARED.items():
        if (given := getattr(args, name, plain)) not in (None, plain):
            yield (
                f"{flag} cannot be combined with --{name.replace('_', '-')}"
                f"{'' if given is True else f' {given}'}: Megatron-FSDP does not do both; use "
                "--zero-stage 1"
            )
    if not at_least("0.15"):
        yield (
            f"{flag} does not run with megatron-core {megatron_version()}, which has no "
            "Megatron-FSDP; install 0.16.1, or use --zero-stage 1"
        )
    elif args.num_experts and not at_least("0.16"):
        yield (
            f"{flag} with --num-experts does not run with megatron-core {megatron_version()}, "
            "whose Megatron-FSDP shards no experts; install 0.16.1, or use --zero-stage 1"
        )
    if args.num_experts and args.moe_grouped_gemm and args.transformer_impl == "local":
        yield (
            f"{flag} shards parameters by rows, but --moe-grouped-gemm with --transformer-impl "
            "local keeps all experts of a layer side by side in one; use --transformer-impl "
            "transformer_engine, leave out --moe-grouped-gemm, or use --zero-stage 1"
        )
    args.gradient_accumulation_fusion = False  # gradients have no buffer to be added to
    args.overlap_param_gather = False  # its own hooks gather, whatever the loop does
