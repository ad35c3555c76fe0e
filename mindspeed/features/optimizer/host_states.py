"""What ``--swap-optimizer`` and ``--virtual-optimizer`` can be combined with."""

from __future__ import annotations

from mindspeed.features.feature import Megatron, Problem
from mindspeed.features.optimizer.fused_adam import chosen

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
        Problem(_option(name), f"cannot be combined with {flag}: {why}", "remove one")
        for name, why in _EXCLUDED.items()
        if megatron.get(name)
    ]
    for name in _DTYPES:
        if str(megatron.get(name, "fp32")) not in ("fp32", "torch.float32"):
            what = f"cannot be combined with {flag}: states in host memory are fp32"
            found.append(Problem(_option(name), what, "remove one"))
    name = chosen(megatron)
    if name not in ("adam", "fused_adam"):
        found.append(Problem(flag, f"cannot be combined with --optimizer {name}", "remove one"))
    return found


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
