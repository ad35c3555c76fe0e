"""A small integer tensor on its way to the host, beside the computation of the device.

    copy = HostCopy.start(counts)       # at once; or copy.after(work), once a collective has ended
    ...                                 # kernels are launched
    copy.get()                          # waits for the copy only

On devices with streams the copy runs on a stream of its own, which waits for the collective and not
for what the device computes meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed import device, spmd
from mindspeed.moe.split_phase import Collective, InFlight


class HostCopy:
    """The copy of one tensor; :meth:`get` may be called once it is started."""

    def __init__(self) -> None:
        self._source: Any = None
        self._host: torch.Tensor | None = None
        self._event: Any = None

    def start(self, x: torch.Tensor, work: InFlight | None = None, sent: Any = None) -> None:
        """Start to copy ``x`` when ``work`` has filled it from ``sent``."""
        here = device.current()
        if _on_host(x) or not here.has("streams"):
            if work is not None:
                work.wait()
            self._host = x.cpu()
            return
        stream, before = here.stream(), here.current_stream()
        self._source = (x, sent)  # live until the copy is complete
        with here.use_stream(stream):
            if work is None:
                stream.wait_stream(before)
            else:
                work.wait()  # this stream only
            self._host = _pinned(x)
            self._host.copy_(x, non_blocking=True)
            self._event = here.event()
            self._event.record(stream)

    def get(self) -> torch.Tensor:
        assert self._host is not None, "the copy has not been started"
        if self._event is not None:
            self._event.synchronize()
            self._source = self._event = None
        return self._host


@dataclass(frozen=True)
class HostValue:
    """A tensor that is on the host already, or made of one, in the place of its copy."""

    get: Callable[[], torch.Tensor]


class ToHost:
    """A collective without a gradient whose result goes to the host as soon as it is there.

    Args:
        copy: gets the result.
    """

    def __init__(self, collective: Collective, copy: HostCopy) -> None:
        self._collective, self._copy = collective, copy

    def typed(self) -> spmd.Collective:
        """Rule for :mod:`mindspeed.spmd`."""
        return self._collective.typed()

    def rows(self, rows: int) -> int:
        """Rows of the result for ``rows`` rows."""
        return self._collective.rows(rows)

    def launch(self, x: torch.Tensor) -> tuple[torch.Tensor, InFlight | None]:
        """Start it on ``x``; waiting starts the copy and waits no longer."""
        y, work = self._collective.launch(x)
        return y, _Start(self._copy, y, work, x)

    def launch_reverse(self, grad: torch.Tensor) -> tuple[torch.Tensor, InFlight | None]:
        """There is none, for gradients ``grad``."""
        raise NotImplementedError


class _Start:
    def __init__(
        self, copy: HostCopy, x: torch.Tensor, work: InFlight | None, sent: torch.Tensor
    ) -> None:
        self._copy, self._x, self._work, self._sent = copy, x, work, sent

    def wait(self) -> None:
        self._copy.start(self._x, self._work, self._sent)


def _on_host(x: torch.Tensor) -> bool:
    return x.device.type == "cpu"


def _pinned(x: torch.Tensor) -> torch.Tensor:
    return device.host_tensor(x.shape, x.dtype)
