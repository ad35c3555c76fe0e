"""What ``--swap-optimizer`` and ``--virtual-optimizer`` can be combined with."""

from __future__ import annotations

from mindspeed.features.feature import Megatron, Problem, conflict, option_of
from mindspeed.optimizer.rules import chosen

_EXCLUDED = {
    "reuse_fp32_param": "states in host memory are whole fp32 tensors",
    "quant_states": "states in host memory are whole fp32 tensors",
    "optimizer_cpu_offload": "both move the optimizer's states to the host",
    "use_megatron_fsdp": "ZeRO 2 and 3 keep their own states",
}
_DTYPES = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


def problems(flag: str, megatron: Megatron) -> list[Problem]:
    """Flags that exclude states in host memory, which ``flag`` wants."""
    found = [
        conflict(option_of(name), flag, why)
        for name, why in _EXCLUDED.items()
        if megatron.get(name)
    ]
    for name in _DTYPES:
        if str(megatron.get(name, "fp32")) not in ("fp32", "torch.float32"):
            found.append(conflict(option_of(name), flag, "states in host memory are fp32"))
    name = chosen(megatron)
    if name not in ("adam", "fused_adam"):
        found.append(conflict(flag, f"--optimizer {name}"))
    return found
