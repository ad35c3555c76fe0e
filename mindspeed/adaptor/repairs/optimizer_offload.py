"""An optimizer split between device and host: parameters that never train, checkpoints not read.

``HybridDeviceOptimizer`` (``--optimizer-cpu-offload``) copies a fraction of the parameters to the
host and sorts all parameters by ``Tensor.is_cuda``. On the CPU every tensor answers True, copies
included, so no copy reaches the host's optimizer: copies get no gradients and nobody copies their
values back. The repair sorts by the table of copies that the same method returns, which is the
same order where ``is_cuda`` tells them apart.

Nor does it resume. The classes of its two optimizers are options of every param group, and
``torch.load`` refuses them as code. The step count of the device's Adam, an option of that Adam's
own param groups, is saved only where a host's Adam has one too; once loaded it is among the options
that every step copies to the two optimizers, and so never counts on. The repair leaves classes out
of the state dict (the constructor has them), puts the step count in, and keeps it with the Adam
that counts.
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

    Loading calls it again, so the hook of the state dict is added once.
    """

    def _get_sub_optimizer_param_groups(self: Any, offload_fraction: float) -> Any:
        if loadable_groups not in self._optimizer_state_dict_post_hooks.values():
            self.register_state_dict_post_hook(loadable_groups)
        host_groups, device_groups, *tables = original(self, offload_fraction)
        for group in self.param_groups:
            group.pop("step", None)  # the copies of the groups for the two optimizers have it
        _, device_param_of, _ = tables
        groups = [*host_groups, *device_groups]
        host = _with_params(groups, lambda param: param in device_param_of)
        return host, _with_params(groups, lambda param: param not in device_param_of), *tables

    return _get_sub_optimizer_param_groups


def _with_params(
    groups: list[ParamGroup], wanted: Callable[[torch.Tensor], bool]
) -> list[ParamGroup]:
    """The groups with those parameters that are wanted, without groups that have none."""
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
        "copies on the host are updated by the host's optimizer; its checkpoints resume",
        expects="(self, offload_fraction)",
    ),
)
