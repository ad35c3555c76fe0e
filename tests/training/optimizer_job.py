"""Trains with other optimizers: functions for the ranks of a pool."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from tests.support.trainer_job import command, digest


def direct_muon(lr: float, momentum: float, tp_mode: str) -> None:
    """Build Muon by Megatron's own function and a configuration written by hand."""
    from megatron.core.optimizer import OptimizerConfig, get_standard_config_overrides
    from megatron.core.optimizer.muon import get_megatron_muon_optimizer

    from mindspeed.training import model

    config = OptimizerConfig(
        lr=lr,
        min_lr=0.0,
        weight_decay=0.1,
        muon_momentum=momentum,
        muon_tp_mode=tp_mode,
        muon_split_qkv=False,
        muon_extra_scale_factor=0.2,
        muon_use_nesterov=True,
        log_num_zeros_in_grad=False,
    )
    overrides = get_standard_config_overrides(config)
    model.build_optimizer = lambda args, chunks: get_megatron_muon_optimizer(  # type: ignore[assignment]
        config, chunks, config_overrides=overrides
    )


def sign_update(weights: Any, grads: Any, states: Any, options: Any) -> None:
    """``w <- w - lr sign(m)``, and the largest learning rate seen as a state of its own."""
    for w, g, m, mean in zip(weights, grads, states["exp_avg"], states["mean"], strict=True):
        m.lerp_(g, 1 - options.betas[0])
        w.sub_(m.sign(), alpha=options.lr)
        mean.lerp_(w, 0.5)


def train_with_signs(flags: Sequence[str]) -> dict[str, Any]:
    """Train with a rule, a storage and a wrapper of our own, through the seams.

    Returns:
        ``digest`` of the weights; ``moved``: by how much one has changed at most; ``steps`` that
        the wrapper counted; ``betas``; ``dtypes`` of the stored states.
    """
    from mindspeed import session
    from mindspeed.cli.pretrain import _prepare
    from mindspeed.optimizer.codecs import BFloat16, Full
    from mindspeed.optimizer.rules import UpdateRule
    from mindspeed.training.model import gpt_model
    from mindspeed.training.pretrain import pretrain

    settings = _prepare(command(flags), int(os.environ["WORLD_SIZE"]))
    seen: dict[str, Any] = {"steps": 0}
    before: list[Any] = []
    modules: list[Any] = []
    optimizers: list[Any] = []

    def provider(*given: Any) -> Any:
        modules.append(gpt_model(*given))
        before.append([p.detach().clone() for p in modules[-1].parameters()])
        return modules[-1]

    def other_beta(given: dict[str, Any]) -> dict[str, Any]:
        given["config"].adam_beta1 = 0.5
        return given

    def counting(optimizer: Any) -> Any:
        step = optimizer.step
        optimizers.append(optimizer)

        def counted() -> Any:
            seen["steps"] += 1
            return step()

        optimizer.step = counted
        return optimizer

    rule = UpdateRule({"exp_avg": torch.zeros_like, "mean": torch.clone}, sign_update)
    seams = session.install().seams
    seams.use_kernels(
        owner="test",
        update_rule=lambda: rule,
        state_codec=lambda name, dtype: BFloat16() if name == "exp_avg" else Full(),
    )
    seams.optimizer_args.add(other_beta, owner="test")
    seams.optimizer.add(counting, owner="test")
    pretrain(settings, provider)
    (inner,) = [optimizer.optimizer for optimizer in optimizers]
    state = next(iter(inner.state.values()))
    pairs = zip(before[0], modules[0].parameters(), strict=True)
    return seen | {
        "digest": digest(modules),
        "moved": max((a.float() - b.detach().float()).abs().max().item() for a, b in pairs),
        "betas": inner.param_groups[0]["betas"],
        "dtypes": {name: str(tensor.dtype) for name, tensor in state.items()},
    }


def train_muon_with_seams(flags: Sequence[str], directly: bool = False) -> dict[str, Any]:
    """Train with Muon, and a feature on both seams of the optimizer.

    Args:
        flags: Of the trainer.
        directly: Build it as Megatron-LM does, by Megatron's own function.

    Returns:
        ``steps`` that the wrapper counted, ``kinds`` of the optimizers that it got, the ``moments``
        that they use, and how often each seam was ``called``; or the ``error``.
    """
    from mindspeed import session
    from mindspeed.cli.pretrain import _prepare
    from mindspeed.errors import ConfigError
    from mindspeed.training.pretrain import pretrain

    settings = _prepare(command(flags), int(os.environ["WORLD_SIZE"]))
    if directly:
        direct_muon(1e-3, 0.8, "blockwise")
    seen: dict[str, Any] = {"steps": 0, "called": [], "kinds": [], "moments": []}

    def other_momentum(given: dict[str, Any]) -> dict[str, Any]:
        seen["called"].append("optimizer_args")
        given["config"].muon_momentum = 0.25
        return given

    def counting(optimizer: Any) -> Any:
        seen["called"].append("optimizer")
        for part in optimizer.chained_optimizers:
            inner = getattr(part, "optimizer", part)
            seen["kinds"].append(type(inner).__name__)
            seen["moments"].append(inner.param_groups[0].get("momentum_beta"))
        step = optimizer.step

        def counted() -> Any:
            seen["steps"] += 1
            return step()

        optimizer.step = counted
        return optimizer

    seams = session.install().seams
    seams.optimizer_args.add(other_momentum, owner="other-momentum")
    seams.optimizer.add(counting, owner="counting")
    try:
        pretrain(settings)
    except ConfigError as error:
        return {"error": str(error)}
    return seen


def planned(flags: Sequence[str], ranks: int) -> dict[str, Any]:
    """Bytes of the optimizer on the device and the host, as the planner counts them, and its note.

    They are those of the first rank, whose moments of fp8 and whole parameters may be few.
    """
    from mindspeed.planner.count.check import check
    from mindspeed.training.initialize import prepare

    found = check(prepare(command(["--dry-run", *flags]), ranks).args)
    static = found.fullest.static
    kept = static.get("main weights", 0) + static.get("optimizer", 0)
    return {"kept": (kept, found.fullest.host), "note": found.note, "static": dict(static)}


def counted(flags: Sequence[str]) -> tuple[float, float]:
    """Bytes that the optimizer keeps on the device and the host."""
    from mindspeed import session
    from mindspeed.cli.pretrain import _prepare
    from mindspeed.training.pretrain import pretrain

    settings = _prepare(command(flags), int(os.environ["WORLD_SIZE"]))
    built: list[Any] = []

    def remember(optimizer: Any) -> Any:
        built.extend(part.optimizer for part in optimizer.chained_optimizers)
        return optimizer

    session.install().seams.optimizer.add(remember, owner="test")
    pretrain(settings)
    narrow = settings.args.bf16 or settings.args.fp16
    kept = [_kept(inner, narrow) for inner in built]
    return sum(device for device, _ in kept), sum(host for _, host in kept)


def _kept(inner: Any, narrow: bool) -> tuple[float, float]:
    """Bytes of one optimizer on the device and the host."""
    if hasattr(inner, "cpu_optimizers"):  # Megatron's, of which each has its own weights
        on_device = [inner.gpu_optimizer] if inner.gpu_optimizer else []
        gradients = sum(gradient.nbytes for gradient in inner.cpu_copy_map_grad.values())
        host = sum(_states(one) + _weights(one) for one in inner.cpu_optimizers)
        return sum(_states(one) + _weights(one) for one in on_device), host + gradients
    host = sum(
        tensor.nbytes
        for state in inner.state.values()
        for name, tensor in state.items()
        if getattr(inner, "_placements", {}).get(name) is not None
    )
    total = inner.state_bytes() if hasattr(inner, "state_bytes") else _states(inner)
    return total + narrow * _weights(inner) - host, host


def _states(inner: Any) -> float:
    named = [item for state in inner.state.values() for item in state.items()]
    tensors = [(name, value) for name, value in named if isinstance(value, torch.Tensor)]
    return sum(value.nbytes for name, value in tensors if name != "master_param")  # a weight


def _weights(inner: Any) -> float:
    """fp32 weights of the optimizer's own."""
    weights = [p for group in inner.param_groups for p in group["params"]]
    return sum(p.nbytes for p in weights if p.dtype == torch.float32)
