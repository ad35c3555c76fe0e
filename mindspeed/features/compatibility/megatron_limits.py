"""A combination of flags that does not train what it says, with every Megatron or with some."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mindspeed.adaptor.versions import in_range, megatron_version
from mindspeed.features.feature import Megatron, Problem


@dataclass(frozen=True)
class RefusedCombination:
    """A combination that is refused.

    Attributes:
        applies: whether the arguments have the combination.
        flag: as the user types it.
        message: what is wrong.
        fix: what to change.
        versions: range of megatron-core; empty for all.
    """

    applies: Callable[[Megatron], Any]
    flag: str
    message: str
    fix: str
    versions: str = ""

    def problems(self, megatron: Megatron) -> list[Problem]:
        """The error, where the installed release is in the range and the arguments have it."""
        version = megatron_version()
        here = not self.versions or (version is not None and in_range(version, self.versions))
        if here and self.applies(megatron):
            return [Problem(self.flag, self.message, self.fix)]
        return []
