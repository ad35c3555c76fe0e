"""What has really run: which seams of the features that are on the job has reached.

A feature may be on and never run: the model has no such layer, a framework builds its optimizer
itself, another training loop runs. :class:`ReachedFeatures` says so after the first step.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mindspeed.adaptor.importing import model_parallel_is_initialized
from mindspeed.adaptor.seam import Use
from mindspeed.features.feature import Feature
from mindspeed.flags import given_names

LIVE = "MINDSPEED_FEATURES_LIVE"
"""Environment variable: print the report, which a framework may otherwise not show."""

_LOOP = "it belongs to the training loop of Megatron-LM or of mindspeed, which does not run here"
_WHY = {
    "train": _LOOP,
    "step": _LOOP,
    "log": _LOOP,
    "batch": "micro-batches are not read by Megatron's functions",
    "documents": "micro-batches are not read by Megatron's functions",
    "schedule": "get_forward_backward_func was not called after the feature was switched on",
    "optimizer": "get_megatron_optimizer was not called after the feature was switched on",
    "optimizer_args": "get_megatron_optimizer was not called after the feature was switched on",
    "parallel_groups": "the parallel groups existed when the feature was switched on",
    "computing_layers": "nothing counted FLOPs or means over layers",
}
_MODEL = "no model was built after the feature was switched on"
_KERNEL = "no layer of this model computes it, or the model was built before"

logger = logging.getLogger("mindspeed")


class ReachedFeatures:
    """Judges the features of one configuration after the first training step.

    Args:
        features: those that are on.
        uses: says which places have been reached.
        values: Megatron's arguments and our flags by name, of which the features were made.
    """

    def __init__(
        self,
        features: tuple[Feature, ...] = (),
        uses: Callable[[], list[Use]] = list,
        values: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._features = features
        self._uses = uses
        self._values = values
        self._stepped: set[int] = set()
        self._watch: Any = None

    def watch(self) -> None:
        """Warn when an optimizer begins its second step; for loops that are not ours."""
        if self._features:
            self._watch = register_optimizer_step_pre_hook(self._before_step)

    def stop_watching(self) -> None:
        """The loop judges itself, or the features are taken back."""
        if self._watch is not None:
            self._watch.remove()
            self._watch = None

    def by_feature(self) -> dict[str, dict[str, bool]]:
        """Feature -> place -> whether it has been reached; those without places left out."""
        found: dict[str, dict[str, bool]] = {feature.name: {} for feature in self._features}
        for use in self._uses():
            if use.owner in found:
                found[use.owner][use.place] = use.reached
        return {name: places for name, places in found.items() if places}

    def in_vain(self, reached: Mapping[str, Mapping[str, bool]]) -> list[str]:
        """A sentence for each flag that was given, of features that never ran: why they did not.

        Args:
            reached: as :meth:`by_feature` or :meth:`on_all_ranks` returns it.
        """
        found = []
        for feature in self._features:
            places, given = reached.get(feature.name, {}), given_names(feature, self._values)
            if given and places and not any(places.values()):
                why = "; ".join(f"{place}: {_why(place)}" for place in places)
                found.append(f"{given[0]} has had no effect in the first step ({why})")
        return found

    def on_all_ranks(self) -> dict[str, dict[str, bool]]:
        """Join :meth:`by_feature` of all ranks: reached on any. Collective."""
        reached = self.by_feature()
        others: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(others, reached)
        for other in others:
            for name, places in other.items():
                mine = reached.setdefault(name, {})
                mine.update({place: mine.get(place, False) or places[place] for place in places})
        return reached

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if not model_parallel_is_initialized():
            return  # not of Megatron's model
        if id(optimizer) not in self._stepped:
            self._stepped.add(id(optimizer))
            return
        self.stop_watching()
        if int(os.environ.get("RANK", "0")):
            return
        reached = self.by_feature()
        if os.environ.get(LIVE):
            print(describe(reached), flush=True)
        else:
            logger.info("%s", describe(reached))
        for text in self.in_vain(reached):
            logger.warning("rank 0: %s", text)


def describe(reached: Mapping[str, Mapping[str, bool]]) -> str:
    """One line for all features that ran, one for each place that was never called."""
    ran = [name for name, places in reached.items() if any(places.values())]
    never = [
        f"\n  {name}: {place} never called"
        for name, places in reached.items()
        for place, called in places.items()
        if not called
    ]
    return f"features reached in the first step: {', '.join(ran) or 'none'}{''.join(never)}"


def _why(place: str) -> str:
    if place.startswith("kernels."):
        return _KERNEL
    return _WHY.get(place, _MODEL)
