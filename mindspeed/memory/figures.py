"""What became of the saved tensors, counted site by site.

    print(runtime.figures.report())

All figures are sums since the last ``reset``. A storage counts where it was saved first, for as
long as it lives; parameters and buffers do not count.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass
class SiteFigures:
    """Sums of one site of one layer.

    Attributes:
        calls: Forward calls.
        kept: Bytes of storages left on the device.
        dropped: Bytes of storages to be computed again.
        host: Bytes of copies in host memory.
        copied_out: Bytes copied from the device to the host.
        copied_in: Bytes copied back.
        reruns: Second runs in backward.
    """

    calls: int = 0
    kept: int = 0
    dropped: int = 0
    host: int = 0
    copied_out: int = 0
    copied_in: int = 0
    reruns: int = 0

    def count_rerun(self) -> None:
        """One more second run."""
        self.reruns += 1

    def add(self, other: SiteFigures) -> None:
        """Add the sums of another site."""
        for name in _NAMES:
            setattr(self, name, getattr(self, name) + getattr(other, name))


_NAMES = tuple(entry.name for entry in fields(SiteFigures))


class Figures:
    """The sums of all sites, by ``(layer, site)``."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], SiteFigures] = {}

    def of(self, layer: str, site: str) -> SiteFigures:
        return self._rows.setdefault((layer, site), SiteFigures())

    def by_layer(self) -> dict[str, dict[str, SiteFigures]]:
        """Layer -> site -> sums."""
        found: dict[str, dict[str, SiteFigures]] = {}
        for (layer, site), row in self._rows.items():
            found.setdefault(layer, {})[site] = row
        return found

    def by_site(self) -> dict[str, SiteFigures]:
        """Site -> sums over the layers."""
        found: dict[str, SiteFigures] = {}
        for (_, site), row in self._rows.items():
            found.setdefault(site, SiteFigures()).add(row)
        return found

    def total(self) -> SiteFigures:
        """Sums over everything."""
        whole = SiteFigures()
        for row in self._rows.values():
            whole.add(row)
        return whole

    def reset(self) -> None:
        """Start again at zero."""
        self._rows.clear()

    def report(self) -> str:
        """A readable table, one line for each site."""
        rows = [*sorted(self.by_site().items()), ("total", self.total())]
        width = max(len(name) for name, _ in rows)
        lines = [f"{'site':<{width}}" + "".join(f"{name:>15}" for name in _NAMES)]
        for name, row in rows:
            lines.append(f"{name:<{width}}" + "".join(f"{getattr(row, n):>15,}" for n in _NAMES))
        return "\n".join(lines)


class CountedStorages:
    """Storages that are counted, so that each counts once while it lives."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, SiteFigures, str]] = {}

    def copy(self) -> CountedStorages:
        """Another count that knows the same storages."""
        other = CountedStorages()
        other._known = dict(self._known)
        return other

    def count(
        self, tensor: torch.Tensor, figures: SiteFigures, kind: Literal["kept", "dropped"]
    ) -> None:
        """Count the storage of a tensor unless it is counted.

        One that was to be dropped and is kept by a later site counts as kept.
        """
        storage = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is not None and not known[0].expired():
            _, before, counted_as = known
            if counted_as == kind or counted_as == "kept":
                return
            before.dropped -= storage.nbytes()
        self._known[storage._cdata] = StorageWeakRef(storage), figures, kind
        setattr(figures, kind, getattr(figures, kind) + storage.nbytes())
