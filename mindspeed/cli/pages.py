"""The page of the documentation that explains what an error complains about."""

from __future__ import annotations

import re

from mindspeed.errors import (
    CheckpointError,
    DataError,
    MindSpeedError,
    PatchError,
    PlanError,
    SecurityError,
    VersionError,
)

OF_ERRORS: dict[type[MindSpeedError], str] = {
    VersionError: "installation.md#versions",
    PatchError: "adaptor.md",
    CheckpointError: "training.md#checkpoints",
    DataError: "data.md#what-it-reads",
    PlanError: "planner.md",
    SecurityError: "security.md",
}
"""Kind of error -> page."""


def page_of(error: BaseException) -> str | None:
    """The page about the first flag of a feature in a message, else about that kind of error."""
    if not isinstance(error, MindSpeedError):
        return None
    flags = re.findall(r"--[a-z0-9][\w-]*", str(error))
    if flags:
        pages = _pages_of_flags()
        if found := next((pages[flag] for flag in flags if flag in pages), None):
            return found
    return next((page for kind, page in OF_ERRORS.items() if isinstance(error, kind)), None)


def _pages_of_flags() -> dict[str, str]:
    """Flags of this package's features, those of Megatron's left out -> page."""
    from mindspeed.features.registry import all_features, origin_of
    from mindspeed.flags import flags_of
    from mindspeed.plugins import BUILT_IN

    return {
        option: feature.page
        for feature in all_features()
        if origin_of(feature.name) == BUILT_IN
        for item in flags_of(feature)
        if not item.megatron
        for option in (item.option, *item.aliases)
    }
