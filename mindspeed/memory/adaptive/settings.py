"""What the user asked for."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed.memory.runtime import MIN_BYTES


@dataclass(frozen=True)
class Settings:
    """Budgets, and what may be done to stay within them.

    Attributes:
        flag: names the budget in messages.
        device_bytes: the budget of a device.
        host_bytes: of host memory.
        profiled_steps: steps in which candidate plans are tried.
        min_bytes: smaller tensors are not copied to the host.
        offload: attention and MLP may wait in host memory.
        rescue: layers may, and out-of-memory in a profiled step moves all of them there.
    """

    flag: str
    device_bytes: int
    host_bytes: int
    profiled_steps: int
    min_bytes: int = MIN_BYTES
    offload: bool = False
    rescue: bool = False
