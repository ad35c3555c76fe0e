"""Whether host memory is large enough for the copies of activations, before they fill it.

The first layer call that copies says how large a layer call is. The host holds as many of them as
are in flight at once in the pipeline schedule, for every rank that runs on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
    """

    flag: str
    calls: Callable[[], int]
    ranks: int
    available: Callable[[], int] = host_memory.available

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
                f"memory ({nbytes / _MIB:,.1f} MiB for each of {calls} layer calls in flight, "
                f"{self.ranks} ranks on this host), but {available / _MIB:,.0f} MiB are available, "
                f"of which {FRACTION:.0%} may be used; name fewer modules in --swap-modules, "
                "recompute some (--recompute-num-layers), or use more hosts"
            )
