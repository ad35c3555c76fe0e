"""Attribute changes that can be undone.

Every change to an attribute of another package goes through a :class:`Journal`, which keeps the old
value and the owner. :meth:`Journal.undo` restores the identical objects (``is``), newest first.

    journal = Journal()
    journal.set(torch.cuda, "synchronize", synchronize, owner="device")
    journal.undo()
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

_ABSENT = object()


@dataclass(frozen=True)
class JournalEntry:
    """One change: ``holder.name`` (or ``sys.modules[name]``) went from ``before`` to ``after``."""

    holder: Any
    name: str
    before: Any
    after: Any
    owner: str

    def __str__(self) -> str:
        holder = getattr(self.holder, "__name__", None) or type(self.holder).__name__
        module = getattr(self.holder, "__module__", None) if isinstance(self.holder, type) else None
        return f"{module + '.' if module else ''}{holder}.{self.name}"


class Journal:
    """A reversible list of attribute, module and callback changes."""

    def __init__(self) -> None:
        self._entries: list[JournalEntry] = []
        self._undo: list[Any] = []

    def __iter__(self) -> Iterator[JournalEntry]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def set(self, holder: Any, name: str, value: Any, *, owner: str) -> None:
        """Set ``holder.name = value``; a class keeps its raw descriptor (``__dict__`` entry)."""
        before = vars(holder).get(name, _ABSENT)
        setattr(holder, name, value)
        self._record(JournalEntry(holder, name, before, value, owner))

    def set_module(self, name: str, module: ModuleType, *, owner: str) -> None:
        before = sys.modules.get(name, _ABSENT)
        sys.modules[name] = module
        self._record(JournalEntry(sys.modules, name, before, module, owner))

    def call_on_undo(self, undo: Any) -> None:
        """Run ``undo()`` in :meth:`undo` (for changes that are not attributes)."""
        self._undo.append(undo)

    def undo(self) -> None:
        """Undo all changes, newest first, then run the callbacks, newest first."""
        while self._entries:
            self._restore(self._entries.pop())
        while self._undo:
            self._undo.pop()()

    def _record(self, entry: JournalEntry) -> None:
        self._entries.append(entry)

    @staticmethod
    def _restore(entry: JournalEntry) -> None:
        if entry.holder is sys.modules:
            if entry.before is _ABSENT:
                sys.modules.pop(entry.name, None)
            else:
                sys.modules[entry.name] = entry.before
        elif entry.before is _ABSENT:
            delattr(entry.holder, entry.name)
        else:
            setattr(entry.holder, entry.name, entry.before)


_BEFORE = "_methods_before"
"""Attribute of an object: ``(name, own method or _ABSENT)`` for each replacement, oldest first."""


def replace_method(
    holder: Any,
    name: str,
    make: Callable[[Callable[..., Any]], Callable[..., Any]],
    journal: Journal,
) -> None:
    """Replace a method of one object until ``journal`` is undone. Replacements stack.

    The journal does not keep the object alive. A method of the class is looked up at each call, so
    a later change of the object's class (LoRA does that to layers) is seen.

    Args:
        holder: The object.
        name: Name of the method.
        make: Gets the method that there is, returns the new one.
        journal: Restores the method.
    """
    own = vars(holder).get(name, _ABSENT)
    vars(holder).setdefault(_BEFORE, []).append((name, own))
    if own is _ABSENT:

        @functools.wraps(getattr(holder, name))
        def method(*args: Any, **kwargs: Any) -> Any:
            return getattr(type(holder), name)(holder, *args, **kwargs)

        setattr(holder, name, make(method))
    else:
        setattr(holder, name, make(own))
    journal.call_on_undo(functools.partial(_restore_method, weakref.ref(holder)))


def _restore_method(reference: weakref.ref[Any]) -> None:
    holder = reference()
    if holder is None:
        return
    name, own = vars(holder)[_BEFORE].pop()
    if own is _ABSENT:
        delattr(holder, name)
    else:
        setattr(holder, name, own)
