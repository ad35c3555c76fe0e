"""What becomes of the activations of every site of every layer: a plan, which is data.

A site is a module of a layer by its path (``self_attention.core_attention``), the whole layer
(``layer``), or a computation inside a module (``mlp.activation``). Its action says what happens to
the tensors that autograd saves while the site computes:

| action               | saved tensors                                       |
| -------------------- | --------------------------------------------------- |
| ``keep``             | stay on the device                                  |
| ``recompute``        | are dropped and computed again in backward          |
| ``recompute_output`` | likewise, and the output that the next site saves   |
| ``offload``          | are in host memory until backward needs them        |

Sites nest. The innermost site with an action decides, but a site that is computed again decides
for everything inside it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from mindspeed.parsing import decode_json

LAYER = "layer"
"""The site that is a whole layer."""
ATTENTION_SUBLAYER, MLP_SUBLAYER = "attention_sublayer", "mlp_sublayer"
"""The sites that are its two halves: norm, attention or MLP, and the residual connection."""


class SiteAction(str, Enum):
    """What happens to the tensors that autograd saves."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    RECOMPUTE_OUTPUT = "recompute_output"
    OFFLOAD = "offload"

    @property
    def recomputes(self) -> bool:
        """Whether the site runs again in backward."""
        return self in (SiteAction.RECOMPUTE, SiteAction.RECOMPUTE_OUTPUT)


LayerPlan = Mapping[str, SiteAction]
"""Site -> action."""


@dataclass(frozen=True)
class ChunkPlan:
    """The plan of one model chunk.

    Attributes:
        layers: Path of a layer in the chunk -> the actions of its sites. Layers and sites that are
            not named keep everything.
    """

    layers: Mapping[str, LayerPlan] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any(self.layers.values())

    def actions(self) -> Iterator[tuple[str, str, SiteAction]]:
        """Layer, site and action of everything that is planned."""
        for layer, sites in self.layers.items():
            for site, action in sites.items():
                yield layer, site, action

    def offloading_layers(self) -> list[str]:
        """Layers of which something is offloaded."""
        return [name for name, sites in self.layers.items() if SiteAction.OFFLOAD in sites.values()]

    def joined(self, other: ChunkPlan) -> ChunkPlan:
        """Both plans; where both have an action for a site, that of ``other``."""
        layers = {layer: dict(sites) for layer, sites in self.layers.items()}
        for layer, site, action in other.actions():
            layers.setdefault(layer, {})[site] = action
        return ChunkPlan(layers)

    def to_json(self) -> str:
        """The plan as JSON, with sorted keys: equal plans give equal texts."""
        layers = {
            layer: {site: action.value for site, action in sites.items()}
            for layer, sites in self.layers.items()
            if sites
        }
        return json.dumps(layers, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> ChunkPlan:
        """The plan of :meth:`to_json`.

        Raises:
            ValueError: It is not an object of objects of actions; says where.
        """
        return ChunkPlan({layer: layer_plan(sites, layer) for layer, sites in _items(text)})

    def digest(self) -> str:
        """SHA-256 of the JSON: ranks that communicate inside a layer need equal plans."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def layer_plan(sites: Any, where: str) -> LayerPlan:
    """Actions by site, from JSON values.

    Raises:
        ValueError: Not an object of actions; ``where`` is in the message.
    """
    if not isinstance(sites, dict):
        raise ValueError(f"{where}: an object of site: action is needed, not {sites!r}")
    known = [action.value for action in SiteAction]
    for site, action in sites.items():
        if action not in known:
            raise ValueError(f"{where}, {site}: {action!r} is none of {', '.join(known)}")
    return {site: SiteAction(action) for site, action in sites.items()}


def _items(text: str) -> Iterator[tuple[str, Any]]:
    try:
        layers = decode_json(text)
    except ValueError as error:
        raise ValueError(f"no JSON: {error}") from None
    if not isinstance(layers, dict):
        raise ValueError("an object of layer: sites is needed")
    return iter(layers.items())
