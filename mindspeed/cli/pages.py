"""The page of the documentation that explains a feature, or what an error complains about."""

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
OF_FEATURES = {
    "guard": "guards.md",
    "record": "compare.md",
    "type-check": "types.md",
    "op-flops": "features/op-cal-tflops.md",
    "moe-overlap": "features/moe-alltoall-overlap.md",
    "moe-allgather-overlap": "features/moe-all-gather.md",
    "recompute-in-advance": "features/recompute-in-bubble.md",
}
"""Feature -> page, where it is not ``features/NAME.md``."""


def page_of_feature(name: str) -> str:
    """The page of a feature of this package."""
    return OF_FEATURES.get(name, f"features/{name}.md")


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
        option: page_of_feature(feature.name)
        for feature in all_features()
        if origin_of(feature.name) == BUILT_IN
        for item in flags_of(feature)
        if not item.megatron
        for option in (item.option, *item.aliases)
    }
