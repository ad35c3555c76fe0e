"""What a seam is: functions by name, and the patches that make Megatron call them.

Patches call the functions of a seam and need no more than this; :mod:`mindspeed.adaptor.seams` says
which seams there are and installs their patches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed.adaptor.patch import Patch, PatchEngine


def owner_of(seam: str) -> str:
    """The owner under which a seam's patches are listed."""
    return f"seam:{seam}"


@dataclass(frozen=True)
class Use:
    """One place where a feature hooks in.

    Attributes:
        owner: name of the feature.
        place: a seam, or ``kernels.NAME`` for a kernel.
        reached: whether it has been called since the feature was attached.
    """

    owner: str
    place: str
    reached: bool


class Seam:
    """An ordered list of functions and the patches that make Megatron call them."""

    def __init__(self, name: str, engine: PatchEngine, patches: tuple[Patch, ...]) -> None:
        self.name = name
        self.functions: list[tuple[str, Callable[..., Any]]] = []
        self.reached = False  # by Megatron, since the first function was attached
        self._engine = engine
        self.patches = patches

    def add(self, function: Callable[..., Any], *, owner: str) -> None:
        """Attach ``function``; the first one installs the seam's patches."""
        if not self.functions:
            self.reached = False
            for patch in self.patches:
                self._engine.add(patch)  # no-op where another seam shares and has added it
        self.functions.append((owner, function))

    def clear(self) -> None:
        """Detach all functions and take the seam's patches back."""
        self.functions.clear()
        self.reached = False
        for owner in {patch.owner for patch in self.patches}:
            self._engine.remove(owner)

    def pipe(self, value: Any, *args: Any) -> Any:
        """Send ``value`` through all functions: each gets what the one before returned."""
        self.reached = True
        for _, function in self.functions:
            value = function(value, *args)
        return value

    def run_all(self, *args: Any) -> list[Any]:
        """Call all functions with the same arguments and collect what they return."""
        self.reached = True
        return [function(*args) for _, function in self.functions]

    @contextlib.contextmanager
    def around(self, *args: Any) -> Iterator[None]:
        """Enter the context managers that all functions return, leave them in reverse order."""
        self.reached = True
        with contextlib.ExitStack() as stack:
            for _, function in self.functions:
                stack.enter_context(function(*args))
            yield


class SeamTable:
    """Seams by name, each an attribute."""

    def __init__(self, seams: Mapping[str, Seam]) -> None:
        self._all = seams

    def __getattr__(self, name: str) -> Seam:
        seams = self.__dict__.get("_all", {})
        try:
            return seams[name]
        except KeyError:
            raise AttributeError(f"no seam {name!r}; there are {', '.join(seams)}") from None

    def __iter__(self) -> Iterator[Seam]:
        return iter(self._all.values())
