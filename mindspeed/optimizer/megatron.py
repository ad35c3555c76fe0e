"""Megatron's mixed-precision optimizers with master weights and gradients handled by ``FusedAdam``.

Megatron calls it the precision-aware optimizer: ``FusedAdam`` gets the 16-bit parameters, keeps
their master weights among its states, in a storage of its choice, and reads gradients where they
are (``decoupled_grad``) instead of in an fp32 copy. Megatron 0.16 has it with the distributed
optimizer only; :class:`PrecisionAwareFloat16` brings it to the other one, with the same
checkpoints.

Features use the functions on the seams of the optimizer:

    optimizer_args   :func:`precision_aware`     let Megatron build it so
    optimizer        :func:`masters_inside`      the same without the distributed optimizer
                     :func:`narrow_gradients`    unscale and clip 16-bit gradients in the update
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
)
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.transformer.moe.router import Router
from torch import Tensor

from mindspeed.errors import ConfigError

MASTER = "master_param"
_CLIP_EPSILON = 1.0e-6  # as in Megatron's clip_grad_by_total_norm_fp32


def precision_aware(given: dict[str, Any], *, remainders: bool = False) -> dict[str, Any]:
    """Change the arguments of ``get_megatron_optimizer``: a precision-aware optimizer.

    Args:
        given: of the seam ``optimizer_args``.
        remainders: store only what the bf16 parameter lacks of a master weight; otherwise this
            stays what the user chose with a precision-aware optimizer, else master weights are
            fp32.

    Raises:
        ConfigError: the model is fp32, or not bf16 with ``remainders``.
    """
    config = copy.copy(given["config"])
    if not (config.bf16 if remainders else config.bf16 or config.fp16):
        need = "bf16" if remainders else "16-bit"
        raise ConfigError(f"OptimizerConfig: a feature of the optimizer needs {need} training")
    chosen = config.use_precision_aware_optimizer and config.store_param_remainders
    # Not through the constructor: it requires the distributed optimizer.
    config.use_precision_aware_optimizer = True
    config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    config.store_param_remainders = remainders or chosen
    return {**given, "config": config}


def masters_inside(optimizer: Any) -> Any:
    """Complete what :func:`precision_aware` began, in the optimizer that Megatron has built."""
    for part in _parts(optimizer):
        if part.is_stub_optimizer:
            continue
        if type(part) is Float16OptimizerWithFloat16Params:
            part.__class__ = PrecisionAwareFloat16
            part.take_masters_back()
        for group in getattr(part, "model_float16_groups", ()):
            for param in group:
                _forget_main_param(param)
    return optimizer


def narrow_gradients(optimizer: Any) -> Any:
    """Let precision-aware optimizers unscale and clip 16-bit gradients in the update.

    Megatron would do it in the gradients themselves, and round them.
    """
    if not any(_has_narrow_gradients(part) for part in _parts(optimizer)):
        return optimizer
    kinds = {
        DistributedOptimizer: _NarrowDistributed,
        PrecisionAwareFloat16: _NarrowFloat16,
        Float16OptimizerWithFloat16Params: _NarrowFloat16,  # a stub
        ChainedOptimizer: _NarrowChain,
    }
    for part in (optimizer, *_parts(optimizer)):
        part.__class__ = kinds.get(type(part), type(part))
    return optimizer


def mark_rare_gradients(chunks: Sequence[torch.nn.Module]) -> None:
    """Mark embeddings and routers, ``rare_gradients``, before their optimizer is built.

    The copies of a tied embedding on the first and the last stage are marked ``"copied"``: shards
    cut them at different elements, so blocks of 256 would differ and the copies part.
    """
    kinds = (VocabParallelEmbedding, torch.nn.Embedding, Router)
    for module in (module for chunk in chunks for module in chunk.modules()):
        param: Any
        for param in module.parameters(recurse=False):
            if getattr(param, "shared_embedding", False):
                param.rare_gradients = "copied"
            elif isinstance(module, kinds) and not getattr(param, "rare_gradients", False):
                param.rare_gradients = True


def _has_narrow_gradients(part: Any) -> bool:
    if part.is_stub_optimizer:
        return False
    if isinstance(part, DistributedOptimizer):
        return any(buffer.grad_dtype != torch.float32 for buffer in part.buffers)
    return any(getattr(p, "main_grad", p).dtype != torch.float32 for p in part.get_parameters())


def _parts(optimizer: Any) -> list[Any]:
    """Megatron's optimizers, those without a parameter on this rank (stubs) included."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _forget_main_param(param: Tensor) -> None:
    """Remove it: Megatron then takes a parameter's norm from the parameter itself, 16 bit.

    With the None that its precision-aware optimizer leaves there, the norm would be that of none.
    """
    for name in ("main_param", "main_param_sharded"):
        if hasattr(param, name):
            delattr(param, name)


class PrecisionAwareFloat16(Float16OptimizerWithFloat16Params):
    """Megatron's optimizer of 16-bit models, with the master weights inside ``FusedAdam``."""

    fp32_from_float16_groups: list[list[Tensor]]

    def take_masters_back(self) -> None:
        """Give ``FusedAdam`` the 16-bit parameters, and drop the fp32 copies of the constructor."""
        parameter_of = {
            main: param
            for params, mains in zip(
                self.float16_groups, self.fp32_from_float16_groups, strict=True
            )
            for param, main in zip(params, mains, strict=True)
        }
        for group in self.optimizer.param_groups:
            group["params"] = [parameter_of.get(p, p) for p in group["params"]]
        for param in parameter_of.values():
            _forget_main_param(param)
        self.fp32_from_float16_groups = [[] for _ in self.float16_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the model and the views of them that the update reads."""
        super().zero_grad(set_to_none)
        self.optimizer.zero_grad(set_to_none=True)

    def _copy_model_grads_to_main_grads(self) -> None:
        """Show the gradients to ``FusedAdam``: views of the buffer, nothing is copied."""
        for param in self.get_parameters():
            param.decoupled_grad = getattr(param, "main_grad", param.grad)
            param.grad = None

    def _collect_main_grad_data_for_unscaling(self) -> list[Tensor]:
        found = (param.decoupled_grad for param in self.get_parameters())
        return [grad for grad in found if grad is not None]

    def _copy_main_params_to_model_params(self) -> None:
        """No-op: the update writes the parameters."""

    def _copy_model_params_to_main_params(self, state_dict: Any = None) -> None:
        assert state_dict is None, "main parameters cannot be taken from a state dict"
        for param in self._narrow_params():
            if self.optimizer.state.get(param):
                self.optimizer.set_scaled_state(param, MASTER, param.detach().float())

    def state_dict(self, is_loading: bool = False) -> dict[str, Any]:
        """The state as Megatron writes it: all states in fp32, the master weights apart."""
        if is_loading:
            self.init_state_fn(self.optimizer, self.config)
        inner = self.optimizer.state_dict()
        state: dict[str, Any] = {"optimizer": inner}
        if self.grad_scaler:
            state["grad_scaler"] = self.grad_scaler.state_dict()
        masters = {number: kept.pop(MASTER, None) for number, kept in inner["state"].items()}
        numbers = [number for group in inner["param_groups"] for number in group["params"]]
        number_of = dict(zip(self.get_parameters(), numbers, strict=True))
        state["fp32_from_fp16_params"] = [
            [_or_weight(masters.get(number_of[param]), param) for param in group]
            for group in self.float16_groups
        ]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the states and master weights of a run with or without this class."""
        super().load_state_dict(state_dict)
        names = ("fp32_from_fp16_params", "fp32_from_fp16")
        saved = next(state_dict[name] for name in names if name in state_dict)
        masters = [master for group in saved for master in group]
        for param, master in zip(self._narrow_params(), masters, strict=True):
            value = master.detach().to(param.device, torch.float32)
            self.optimizer.set_scaled_state(param, MASTER, value)

    def _narrow_params(self) -> list[Tensor]:
        return [param for group in self.float16_groups for param in group]


def _or_weight(master: Tensor | None, param: Tensor) -> Tensor:
    """A master weight, fp32; before the first step that is the parameter, 16 bit."""
    return param.detach().float() if master is None else master


def _check_without_unscaling(self: Any) -> bool:
    """Whether a gradient of any rank is not finite; the update unscales.

    Unscaled in 16 bits gradients would lose digits. A scale above 1 makes nothing finite that is
    not.
    """
    self.inverse_scale = self.grad_scaler.inv_scale
    self.found_inf.fill_(0.0)
    grads = [] if self.is_stub_optimizer else self._collect_main_grad_data_for_unscaling()
    if grads:
        one = torch.ones_like(self.inverse_scale)
        torch._amp_foreach_non_finite_check_and_unscale_(grads, self.found_inf, one)
    torch.distributed.all_reduce(
        self.found_inf,
        op=torch.distributed.ReduceOp.MAX,
        group=self.get_grad_stats_parallel_group(),
    )
    return bool(self.found_inf.item() > 0)


# No class in common: Python would refuse to turn objects of Megatron's classes into such ones.
class _NarrowDistributed(DistributedOptimizer):
    """Megatron's distributed optimizer with 16-bit gradients."""

    _unscale_main_grads_and_check_for_nan = _check_without_unscaling


class _NarrowFloat16(PrecisionAwareFloat16):
    """Megatron's other optimizer with 16-bit gradients."""

    _unscale_main_grads_and_check_for_nan = _check_without_unscaling


class _NarrowChain(ChainedOptimizer):
    """All optimizers of a rank: the norm is that of unscaled gradients, the update clips."""

    def get_grad_norm(self) -> float:
        """The norm of the unscaled gradients."""
        scales = [getattr(part, "inverse_scale", None) for part in _parts(self)]
        norm: float = super().get_grad_norm()
        return norm if scales[0] is None else norm * scales[0].item()

    @torch.no_grad()
    def step(self) -> tuple[bool, float | None, float | None]:
        """Update once; success, gradient norm, and number of zeros in the gradients."""
        if self.prepare_grads():
            return False, None, None
        norm = self.get_grad_norm()
        for part in _parts(self):
            if part.is_stub_optimizer:
                continue
            scale = getattr(part, "inverse_scale", None)
            factors = [] if scale is None else [scale]
            limit = part.config.clip_grad
            if limit > 0.0 and (clip := limit / (norm + _CLIP_EPSILON)) < 1.0:
                factors.append(clip)
            part.optimizer.grad_factors = tuple(factors)
        zeros = self.count_zeros() if self.config.log_num_zeros_in_grad else None
        return self.step_with_ready_grads(), norm, zeros
