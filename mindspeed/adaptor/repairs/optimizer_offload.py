"""Defect: ``--optimizer-cpu-offload`` does not train on a CPU and does not resume anywhere.

Where: ``HybridDeviceOptimizer`` of ``megatron.core.optimizer.cpu_offloading.hybrid_optimizer``,
which copies a fraction of the parameters to the host.

* It sorts parameters by ``Tensor.is_cuda``, which is True for every tensor where the CPU serves as
  the CUDA device. Symptom: host copies get no gradients and are never copied back. Fix: sort by the
  table of copies that the same method returns; where ``is_cuda`` tells them apart, the order is the
  same.
* The state dict contains the classes of its two optimizers, which ``torch.load`` refuses, and the
  step count of the device's Adam only if the host's Adam has one too; a loaded step is copied over
  the real one in every step. Symptom: resuming fails, or the step stays constant. Fix: a state-dict
  hook drops the classes (the constructor has them) and adds the step, which stays with the Adam
  that counts.

Versions: all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mindspeed.adaptor.patch import Patch

OWNER = "repair:optimizer-offload"

ParamGroup = dict[str, Any]


def sorted_by_copies(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``HybridDeviceOptimizer._get_sub_optimizer_param_groups``, which the constructor calls.

    Loading calls it again, so the state-dict hook is added only once.
    """

    def _get_sub_optimizer_param_groups(self: Any, offload_fraction: float) -> Any:
        if loadable_groups not in self._optimizer_state_dict_post_hooks.values():
            self.register_state_dict_post_hook(loadable_groups)
        host_groups, device_groups, *tables = original(self, offload_fraction)
        for group in self.param_groups:
            group.pop("step", None)  # the two optimizers' copies of the groups keep it
        _, device_param_of, _ = tables
        groups = [*host_groups, *device_groups]
        host = _with_params(groups, lambda param: param in device_param_of)
        return host, _with_params(groups, lambda param: param not in device_param_of), *tables

    return _get_sub_optimizer_param_groups


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


PATCHES = (
    Patch(
        "megatron.core.optimizer.cpu_offloading.hybrid_optimizer:"
        "HybridDeviceOptimizer._get_sub_optimizer_param_groups",
        sorted_by_copies,
        OWNER,
        "host copies are updated by the host optimizer; its checkpoints resume",
        expects="(self, offload_fraction)",
    ),
)
