"""Flags of a command that make a run differ: delta debugging over those that differ.

A subset of the differing flags is bad if the run that has them, and A's otherwise, differs from A
first in the same pass and module as B does. A run that is refused or fails is not bad. The result
is 1-minimal: without any one of its flags that difference is gone (Zeller's ddmin).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

PROGRAM = "(program)"
"""Name of what stands before the first flag."""

Words = tuple[str, ...]


@dataclass(frozen=True)
class FlagChange:
    """A flag in which two commands differ.

    Attributes:
        name: The flag.
        a: It and its values in A; empty where A does not have it.
        b: The same of B.
    """

    name: str
    a: Words
    b: Words

    def __str__(self) -> str:
        return " ".join(self.b) if self.b else f"without {' '.join(self.a)}"


def flags_of(command: Sequence[str]) -> dict[str, Words]:
    """The words of a command by flag; a flag that is given twice counts with its last values."""
    found: dict[str, Words] = {}
    own: list[str] = []
    name = PROGRAM
    for word in [*command, "--"]:
        if word.startswith("--"):
            if own:
                found.pop(name, None)
                found[name] = tuple(own)
            name, own = word.partition("=")[0], []
        own.append(word)
    return found


def changes(a: Sequence[str], b: Sequence[str]) -> list[FlagChange]:
    """Flags in which two commands differ, in B's order, then those that only A has."""
    here, there = flags_of(a), flags_of(b)
    found = [
        FlagChange(name, here.get(name, ()), words)
        for name, words in there.items()
        if here.get(name) != words
    ]
    return found + [
        FlagChange(name, words, ()) for name, words in here.items() if name not in there
    ]


def changed(a: Sequence[str], subset: Sequence[FlagChange]) -> list[str]:
    """A's command with some of the changes."""
    words: Mapping[str, Words] = {**flags_of(a), **{one.name: one.b for one in subset}}
    return [word for own in words.values() for word in own]


def smallest(
    items: Sequence[FlagChange], bad: Callable[[tuple[FlagChange, ...]], bool]
) -> list[FlagChange]:
    """A smallest subset that is bad; each subset is tried once.

    Args:
        items: All of them, which together are bad.
        bad: Whether a subset is.
    """
    known: dict[frozenset[str], bool] = {}

    def is_bad(subset: Sequence[FlagChange]) -> bool:
        key = frozenset(one.name for one in subset)
        if key not in known:
            known[key] = bad(tuple(subset))
        return known[key]

    left, parts = list(items), 2
    while len(left) > 1:
        size = -(-len(left) // parts)
        pieces = [left[at : at + size] for at in range(0, len(left), size)]
        rests = [[one for one in left if one not in piece] for piece in pieces]
        if found := next((piece for piece in pieces if is_bad(piece)), None):
            left, parts = found, 2
        elif len(pieces) > 2 and (found := next((rest for rest in rests if is_bad(rest)), None)):
            left, parts = found, max(parts - 1, 2)
        elif size == 1:
            break
        else:
            parts = min(len(left), 2 * parts)
    return left
