"""Jobs of test_states.py on an emulated NPU: optimizer states in host memory."""

from __future__ import annotations

from typing import Any

import torch


def train(kind: str) -> dict[str, Any]:
    """Five steps of Adam.

    Args:
        kind: ``cpu``, ``npu``, or ``swap`` or ``mapped`` for states of an NPU in host memory.

    Returns:
        ``weights`` and ``states`` on the host, ``places`` of the states, ``copied`` bytes.
    """
    from mindspeed.optimizer.placement import HostMapped, HostSwap
    from mindspeed.te import optimizer_policy
    from mindspeed.te.optimizers import FusedAdam

    space = {"swap": HostSwap(3), "mapped": HostMapped()}.get(kind)
    plain = optimizer_policy.state_placement
    optimizer_policy.state_placement = lambda name: (
        None if kind == "mapped" and name == "master_param" else space
    )
    generator = torch.Generator().manual_seed(3)
    shapes = ((40, 9), (130,))
    place = torch.device("cpu" if kind == "cpu" else "npu")
    params = [
        torch.nn.Parameter(torch.randn(shape, generator=generator).bfloat16().to(place))
        for shape in shapes
    ]
    try:
        optimizer = FusedAdam(params, lr=1e-2, master_weights=True, use_decoupled_grad=True)
    finally:
        optimizer_policy.state_placement = plain
    for _ in range(5):
        for p in params:
            p.decoupled_grad = torch.randn(p.shape, generator=generator).to(place)  # type: ignore[attr-defined]
        optimizer.step()
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    names = ("exp_avg", "exp_avg_sq", "master_param")
    return {
        "weights": [p.detach().float().cpu() for p in params],
        "states": [optimizer.get_unscaled_state(p, name).cpu() for p in params for name in names],
        "places": {t.device.type for p in params for t in optimizer.state[p].values()},
        "copied": space.figures.to_device if isinstance(space, HostSwap) else 0,
    }


def copy_swapped_memory() -> None:
    """What torch_npu does not allow."""
    from mindspeed import device

    device.current().empty_host_mapped((4,), torch.float32).cpu()
