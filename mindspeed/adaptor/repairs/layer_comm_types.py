"""A list of ``--cp-comm-type``, one for each layer, is read one place too far.

Layers are numbered from 1 and ``TransformerLayer`` takes entry number n of a list that is numbered
from 0: every layer gets its successor's algorithm, and the last layer ends in an IndexError. While
a layer is built, the repair puts one entry more in front.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mindspeed.adaptor.patch import Patch
from mindspeed.adaptor.signatures import bind

OWNER = "repair:layer-comm-types"


def needed(values: Mapping[str, Any]) -> bool:
    """Do Megatron's arguments give the layers types of their own?"""
    types = values.get("cp_comm_type")
    return isinstance(types, list | tuple) and len(types) > 1


def read_from_one(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``TransformerLayer.__init__``."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        config = bind(original, (self, *args), kwargs)["config"]
        types = config.cp_comm_type
        if not isinstance(types, list):
            return original(self, *args, **kwargs)
        # Layers of multi-token prediction are numbered after the last one.
        prediction = [types[-1]] * (config.mtp_num_layers or 0)
        config.cp_comm_type = [types[0], *types, *prediction]
        try:
            return original(self, *args, **kwargs)
        finally:
            config.cp_comm_type = types

    return __init__


PATCHES = (
    Patch(
        "megatron.core.transformer.transformer_layer:TransformerLayer.__init__",
        read_from_one,
        OWNER,
        "every layer gets its own entry of a list of --cp-comm-type",
        expects="(self, config, submodules, layer_number, ...)",
    ),
)
