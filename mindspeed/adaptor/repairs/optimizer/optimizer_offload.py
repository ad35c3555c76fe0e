"""Defect: ``--optimizer-cpu-offload`` does not train on a CPU and does not resume anywhere.

Where: ``HybridDeviceOptimizer`` of ``megatron.core.optimizer.cpu_offloading.hybrid_optimizer``,
which copies a fraction of the parameters to the host, and ``DistributedOptimizer``, which loads it.

* It sorts parameters by ``Tensor.is_cuda``, which is True for every tensor where the CPU serves as
  the CUDA device. Symptom: host copies get no gradients and are never copied back. Fix: sort by the
  table of copies that the same method returns; where ``is_cuda`` tells them apart, the order is the
  same.
* The state dict contains the classes of its two optimizers, which ``torch.load`` refuses, and the
  step count of the device's Adam only if the host's Adam has one too; a loaded step is copied over
  the real one in every step. Symptom: resuming fails, or the step stays constant. Fix: a state-dict
  hook drops the classes (the constructor has them) and adds the step, which stays with the Adam
  that counts.
* Loading makes the states by a step with random gradients. Symptom: it moves the weights, which
  ``--ckpt-format torch`` has loaded before. Fix: a step without gradients and learning rate, which
  is not counted.
* Two of three layouts (``dp_reshardable``, which is Megatron-LM's default, and the file of
  ``--ckpt-format torch``) leave the master weights that they have loaded in the table of states;
  the first brings the step count of the step above, too. Symptom: training goes on from rounded
  master weights and with another bias correction, and gradient norms part (issue 1842). Fix: states
  are passed on after every load, and the host's Adam gets the step of its param group.
* Weights that are fp32 already have copies on the host that no load renews. Symptom: the next step
  brings the old weights back. Fix: copies are renewed.
* A parameter without a gradient keeps the one of an earlier step in its copy, and an fp32 parameter
  on the device has no copy and never gets the gradient of a precision-aware optimizer (PR 6871,
  7449, 7551). Symptom: the first is moved again, the second never. Fix: before each step the copies
  have the gradients of the step, or none.

"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mindspeed.adaptor.patch import repair

NEEDED_WITH = ("optimizer_cpu_offload",)

ParamGroup = dict[str, Any]


def sorted_by_copies(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``HybridDeviceOptimizer._get_sub_optimizer_param_groups``, which the constructor calls.

    Loading calls it again, so the state-dict hook is added only once.

    Raises:
        CheckpointError: what is loaded was trained with a rule that lacks states of Adam.
    """
    from mindspeed.optimizer.rules import ADAM
    from mindspeed.te.stored_states import RULE, check_rule

    def _get_sub_optimizer_param_groups(self: Any, offload_fraction: float) -> Any:
        if loadable_groups not in self._optimizer_state_dict_post_hooks.values():
            self.register_state_dict_post_hook(loadable_groups)
        host_groups, device_groups, *tables = original(self, offload_fraction)
        check_rule(self.param_groups, ADAM)
        for group in self.param_groups:
            group.pop("step", None)  # the two optimizers' copies of the groups keep it
            group.pop(RULE, None)
        _, device_param_of, _ = tables
        groups = [*host_groups, *device_groups]
        host = _with_params(groups, lambda param: param in device_param_of)
        return host, _with_params(groups, lambda param: param not in device_param_of), *tables

    return _get_sub_optimizer_param_groups


def make_states(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``HybridDeviceOptimizer.dummy_step``: states are made, and nothing else changes."""

    def dummy_step(self: Any) -> None:
        self.update_fp32_param_by_new_param()  # the step copies the host's weights back
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] = 0.0
            for param in group["params"]:
                param.grad = torch.zeros_like(param)
        self.step()
        self.zero_grad()
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate
        for optimizer in self.sub_optimizers:
            for group in optimizer.param_groups:
                group.pop("step", None)
            _count_from(optimizer, 0)

    return dummy_step


def pass_gradients_on(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``HybridDeviceOptimizer._set_sub_optimizer_grads``."""

    def _set_sub_optimizer_grads(self: Any) -> None:
        original(self)
        for param, inner in self.param_to_inner_param.items():
            gradient = getattr(param, "decoupled_grad", param.grad)
            if gradient is None:
                inner.grad = None
            elif inner is param:
                inner.grad = gradient.to(inner.dtype)
            elif inner in self.cpu_copy_map_grad:
                inner.grad = self.cpu_copy_map_grad[inner]

    return _set_sub_optimizer_grads


def renew_step_and_copies(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``HybridDeviceOptimizer._sync_hdo_state_to_sub_optimizers``, the end of every load."""

    def _sync_hdo_state_to_sub_optimizers(self: Any) -> None:
        original(self)
        for optimizer in self.sub_optimizers:
            for group in optimizer.param_groups:
                if "step" in group:
                    _count_from(optimizer, group["step"])
        _renew_copies(self, lambda param: param not in self.param_to_fp32_param)

    return _sync_hdo_state_to_sub_optimizers


def without_count(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``DistributedOptimizer._set_main_param_and_optimizer_states``: states only.

    Buckets of a checkpoint have the count of the step that made the states, and a mark.
    """

    def _set_main_param_and_optimizer_states(
        self: Any, model_param: torch.Tensor, tensors: dict[str, Any]
    ) -> None:
        if _is_offloaded(self):
            tensors = {n: t for n, t in tensors.items() if n not in ("step", "padding")}
        original(self, model_param, tensors)

    return _set_main_param_and_optimizer_states


def pass_states_on(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap methods of ``DistributedOptimizer`` that load: the optimizers get what was loaded."""

    def load(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if _is_offloaded(self):
            self.optimizer._sync_hdo_state_to_sub_optimizers()

    return load


def _is_offloaded(part: Any) -> bool:
    return not part.is_stub_optimizer and hasattr(part.optimizer, "cpu_optimizers")


def renew_all_copies(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``HybridDeviceOptimizer.update_fp32_param_by_new_param``: fp32 weights' copies, too."""

    def update_fp32_param_by_new_param(self: Any) -> None:
        original(self)
        _renew_copies(self, lambda param: True)

    return update_fp32_param_by_new_param


def _count_from(optimizer: Any, step: Any) -> None:
    """Set the step count of torch's Adam; other optimizers keep it in their param groups."""
    for state in optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = torch.full_like(state["step"], float(step))


def _renew_copies(self: Any, wanted: Callable[[torch.Tensor], bool]) -> None:
    for param, copy in self.param_to_inner_param.items():
        if copy is not param and wanted(param):
            copy.data.copy_(param.data)


def _with_params(
    groups: list[ParamGroup], wanted: Callable[[torch.Tensor], bool]
) -> list[ParamGroup]:
    """The param groups restricted to the parameters that match, without empty groups."""
    kept = [group | {"params": [p for p in group["params"] if wanted(p)]} for group in groups]
    return [group for group in kept if group["params"]]


def loadable_groups(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Param groups with the step count and without classes; a hook of ``state_dict``."""
    device_groups = optimizer.gpu_optimizer.param_groups if optimizer.gpu_optimizer else ()
    counts = [{"step": group["step"]} for group in device_groups if "step" in group][:1]
    groups = [
        {name: value for name, value in group.items() if not isinstance(value, type)}
        for group in state_dict["param_groups"]
    ]
    for group in groups:
        group.update(*counts)
    return state_dict | {"param_groups": groups}


_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer."
_CLASS = "megatron.core.optimizer.cpu_offloading.hybrid_optimizer:HybridDeviceOptimizer."

PATCHES = (
    repair(
        _CLASS + "_get_sub_optimizer_param_groups",
        sorted_by_copies,
        "host copies are updated by the host optimizer; its checkpoints resume",
        expects="(self, offload_fraction)",
        versions=">=0.15",
    ),
    repair(
        _CLASS + "dummy_step",
        make_states,
        "loading a checkpoint does not move weights or count a step",
        expects="(self)",
        versions=">=0.15",
    ),
    repair(
        _CLASS + "_set_sub_optimizer_grads",
        pass_gradients_on,
        "the optimizers on host and device see the gradients of this step only",
        expects="(self)",
        versions=">=0.15",
    ),
    repair(
        _CLASS + "_sync_hdo_state_to_sub_optimizers",
        renew_step_and_copies,
        "the host's Adam continues with the step count of the checkpoint",
        expects="(self)",
        versions=">=0.15",
    ),
    repair(
        _CLASS + "update_fp32_param_by_new_param",
        renew_all_copies,
        "reloaded weights reach the copies on the host",
        expects="(self)",
        versions=">=0.15",
    ),
    repair(
        _DISTRIBUTED + "_set_main_param_and_optimizer_states",
        without_count,
        "a bucket of a checkpoint does not set the step count of the host's Adam",
        expects="(self, model_param, tensors)",
        versions=">=0.15",
    ),
    *(
        repair(
            _DISTRIBUTED + name,
            pass_states_on,
            "loaded master weights reach the optimizers on host and device",
            expects="(self, state_dict, ...)",
            versions=">=0.15",
        )
        for name in (
            "load_parameter_state_from_dp_reshardable",
            "load_parameter_state_from_dp_zero",
        )
    ),
)
