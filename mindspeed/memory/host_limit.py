"""Whether host memory is large enough for the copies of activations, before they fill it.

The first layer call that copies says how large a layer call is. The host holds as many of them as
are in flight at once in the pipeline schedule, for every rank that runs on it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from mindspeed import device
from mindspeed.device import host_memory
from mindspeed.errors import ConfigError

FRACTION = 0.8
"""Of the available memory; the rest is for data workers and writers of checkpoints."""
_MIB = 1 << 20


@dataclass(frozen=True)
class HostLimit:
    """The limit of one rank.

    Attributes:
        flag: For the message.
        calls: Returns how many layer calls wait for backward at once.
        ranks: Of this host.
        available: Returns free bytes of the host, before the first copy.
        unit: What a call is, for the message.
        remedy: What else to do, for the message.
    """

    flag: str
    calls: Callable[[], int]
    ranks: int
    available: Callable[[], int] = host_memory.available
    unit: str = "layer calls in flight"
    remedy: str = "name fewer modules in --swap-modules, recompute some (--recompute-num-layers)"

    def check(self, nbytes: int) -> None:
        """Refuse layer calls with host copies of ``nbytes`` bytes.

        Raises:
            ConfigError: They need more than 80 % of the available memory; gives the numbers.
        """
        calls, available = self.calls(), self.available()
        needed = nbytes * calls * self.ranks
        if needed > FRACTION * available:
            raise ConfigError(
                f"{self.flag}: the copies of activations need {needed / _MIB:,.0f} MiB of host "
                f"memory ({nbytes / _MIB:,.1f} MiB for each of {calls} {self.unit}, "
                f"{self.ranks} ranks on this host), but {available / _MIB:,.0f} MiB are available, "
                f"of which {FRACTION:.0%} may be used; {self.remedy}, or use more hosts"
            )


def ranks_of_host() -> int:
    """Ranks of this job that run on this host."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE")
    return int(ranks or min(int(os.environ.get("WORLD_SIZE") or 1), device.current().count()))
