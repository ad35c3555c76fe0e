"""Training with Megatron's distributed optimizer, saving, and resuming in a new model."""

from __future__ import annotations

from typing import Any

import torch

from tests.support import gpt_ranks
from tests.support.installed_repair import configured

OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "bf16-precision-aware": {"bf16": True, "use_precision_aware_optimizer": True},
    "bf16-moments": {
        "bf16": True,
        "use_precision_aware_optimizer": True,
        "exp_avg_dtype": torch.bfloat16,
        "exp_avg_sq_dtype": torch.bfloat16,
    },
}


class Job:
    """One data-parallel model with its optimizer."""

    def __init__(self, options: dict[str, Any], repaired: bool = True) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module

        from mindspeed.adaptor.repairs.optimizer import optimizer_resume

        half = {"bf16": True, "params_dtype": torch.bfloat16} if options.get("bf16") else {}
        cfg = gpt_ranks.config("rmsnorm-swiglu-gqa", gradient_accumulation_fusion=True, **half)
        inner = gpt_ranks.build(cfg, "te")
        inner = Float16Module(cfg, inner) if half else inner
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=False
        )
        self.model = DistributedDataParallel(cfg, ddp, inner)
        config = OptimizerConfig(
            optimizer="adam", lr=1e-2, use_distributed_optimizer=True, clip_grad=1.0, **half, **{
                k: v for k, v in options.items() if k != "bf16"
            },
        )  # fmt: skip
        configured(optimizer_resume, {}, repaired)
        self.optimizer = get_megatron_optimizer(config, [self.model])

    def step(self, number: int) -> tuple[float, float]:
        """Train on batch ``number`` and return loss and gradient norm."""
        from megatron.core import parallel_state

        rank = parallel_state.get_data_parallel_rank()
        generator = torch.Generator().manual_seed(10 * number + rank)
        shape = (gpt_ranks.BATCH, gpt_ranks.SEQUENCE + 1)
        tokens = torch.randint(gpt_ranks.VOCABULARY, shape, generator=generator)
        positions = torch.arange(gpt_ranks.SEQUENCE)[None].expand(gpt_ranks.BATCH, -1)
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self.model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).float().mean()
        loss.backward()
        self.model.finish_grad_sync()
        _, norm, _ = self.optimizer.step()
        return loss.item(), float(norm)

    def sharded(self, loading: bool, metadata: dict[str, Any]) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        model = self.model.module.sharded_state_dict(metadata=metadata)
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
        return {"model": model, "optimizer": optimizer}


def resume(
    options: dict[str, Any], folder: str, sharding: str, repaired: bool = True
) -> dict[str, list[Any]]:
    """Train 5 steps; save after 3; load into a new job and train its last 2 again."""
    gpt_ranks.start()
    from megatron.core import dist_checkpointing, parallel_state

    metadata = {
        "distrib_optim_sharding_type": sharding,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    first = Job(options)
    for number in range(3):
        first.step(number)
    dist_checkpointing.save(first.sharded(False, metadata), folder)
    expected = [first.step(number) for number in (3, 4)]

    second = Job(options, repaired)
    state = dist_checkpointing.load(second.sharded(True, metadata), folder)
    second.model.module.load_state_dict(state["model"])
    second.optimizer.load_state_dict(state["optimizer"])
    actual = [second.step(number) for number in (3, 4)]
    steps = [g["step"] for g in second.optimizer.optimizer.param_groups if g["params"]]
    equal = [
        torch.equal(a, b)
        for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True)
    ]
    return {"expected": expected, "actual": actual, "steps": steps, "equal": equal}


def resume_with_signs(options: dict[str, Any], folder: str, sharding: str) -> dict[str, list[Any]]:
    """:func:`resume` with an update rule of one moment and its storage in bf16."""
    from mindspeed import session
    from mindspeed.optimizer.codecs import BFloat16, Full
    from mindspeed.optimizer.rules import UpdateRule

    def update(weights: Any, grads: Any, states: Any, step: Any) -> None:
        for w, g, m in zip(weights, grads, states["exp_avg"], strict=True):
            w.sub_(m.lerp_(g, 0.1).sign(), alpha=step.lr)

    rule = UpdateRule({"exp_avg": torch.zeros_like}, update)
    session.install().seams.use_kernels(
        owner="test",
        update_rule=lambda: rule,
        state_codec=lambda name, dtype: BFloat16() if name == "exp_avg" else Full(),
    )
    return resume(options, folder, sharding)
