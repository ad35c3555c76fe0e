"""Defect: a per-layer list of ``--cp-comm-type`` is indexed off by one.

Where: ``megatron.core.transformer.transformer_layer.TransformerLayer.__init__`` indexes the list,
which is 0-based, with ``layer_number``, which is 1-based.
Symptom: every layer gets the algorithm of the next one; the last layer raises an IndexError.
Fix: prepend a dummy entry to the list while a layer is built.
Versions: <0.17.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mindspeed.adaptor.patch import repair
from mindspeed.adaptor.signatures import bind


def needed(values: Mapping[str, Any]) -> bool:
    """Whether ``cp_comm_type`` is a list with one entry per layer."""
    if "cp_comm_type" not in values:
        return True  # nobody told
    types = values["cp_comm_type"]
    return isinstance(types, list | tuple) and len(types) > 1


def prepend_dummy_entry(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``TransformerLayer.__init__``."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        config = bind(original, (self, *args), kwargs)["config"]
        types = config.cp_comm_type
        if not isinstance(types, list):
            return original(self, *args, **kwargs)
        # MTP layers are numbered after the last transformer layer.
        prediction = [types[-1]] * (config.mtp_num_layers or 0)
        config.cp_comm_type = [types[0], *types, *prediction]
        try:
            return original(self, *args, **kwargs)
        finally:
            config.cp_comm_type = types

    return __init__


PATCHES = (
    repair(
        "megatron.core.transformer.transformer_layer:TransformerLayer.__init__",
        prepend_dummy_entry,
        "per-layer lists of --cp-comm-type are indexed by layer_number - 1",
        expects="(self, config, submodules, layer_number, ...)",
        versions="<0.17",
    ),
)
