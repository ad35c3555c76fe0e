"""What is learned from the refusals of a start, so that it is not asked thousands of times.

A start says why it refuses a layout, not for which others it would say the same. Here that is the
narrowest condition that all layouts refused with the same words share, such as ``cp 4, cp_algorithm
ulysses``. It is used once :data:`ENOUGH` layouts were refused, and as long as no layout with these
values was accepted. It is a conclusion, not a proof; a message with sizes in it, as most have, is
about these sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from mindspeed.planner.layout import Layout

ENOUGH = 3
_SAME = ("devices", "global_batch_size")


class Refusals:
    """Layouts that a start refused, and those that it accepted."""

    def __init__(self) -> None:
        self._shared: dict[tuple[Any, ...], tuple[int, dict[str, Any]]] = {}
        self._known: set[tuple[Any, ...]] = set()  # keys with enough layouts
        self._accepted: list[Mapping[str, Any]] = []

    def accept(self, layout: Layout) -> None:
        """A start accepts the layout."""
        self._accepted.append(_values(layout))

    def add(self, layout: Layout, message: str) -> None:
        """A start refuses the layout with these words."""
        values = _values(layout)
        for key in [(message,), *((message, name, value) for name, value in values.items())]:
            count, shared = self._shared.get(key, (0, values))
            common = {name: value for name, value in shared.items() if values[name] == value}
            self._shared[key] = count + 1, common
            if count + 1 >= ENOUGH and common:
                self._known.add(key)
            else:
                self._known.discard(key)

    def predicted(self, layout: Layout) -> str | None:
        """The words with which a start would refuse the layout; None: it must be asked."""
        values = _values(layout) if self._known else {}
        for key in self._known:
            shared = self._shared[key][1]
            if _matches(values, shared) and not any(
                _matches(one, shared) for one in self._accepted
            ):
                return str(key[0])
        return None


def _values(layout: Layout) -> dict[str, Any]:
    found = {item.name: getattr(layout, item.name) for item in fields(layout)}
    return {name: value for name, value in found.items() if name not in _SAME}


def _matches(values: Mapping[str, Any], shared: Mapping[str, Any]) -> bool:
    return all(values[name] == value for name, value in shared.items())
