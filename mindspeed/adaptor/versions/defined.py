"""Names of later releases of Megatron that older ones get, so that what is written here is for one.

Only names whose meaning an older release can have: the default of a field that came later, and a
function under its later name. A feature that needs more says so in its trait ``megatron``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed.adaptor.patch import Patch
from mindspeed.adaptor.versions.fields import DEFAULTS_OF_LAYERS

_OWNER = "versions"
_CONFIG = "megatron.core.transformer.transformer_config:TransformerConfig."
_RENAMED = "moe_router_padding_for_quantization"  # from moe_router_padding_for_fp8


def _align_size(config: Any) -> int:
    """The multiple of the rows of an expert."""
    from megatron.core.fp8_utils import get_fp8_align_size

    return get_fp8_align_size(config.fp8_recipe)  # type: ignore[no-any-return]


def _defaults() -> Iterator[Patch]:
    for versions, fields in DEFAULTS_OF_LAYERS.items():
        for name, default in fields.items():
            value = property(lambda config: config.moe_router_padding_for_fp8)
            yield Patch(
                _CONFIG + name,
                lambda _, value=value if name == _RENAMED else default: value,  # type: ignore[misc]
                _OWNER,
                "a field of a later release has its default",
                kind="define",
                versions=versions,
            )


PATCHES = (
    *_defaults(),
    Patch(
        "megatron.core.transformer.moe.moe_utils:get_align_size_for_quantization",
        lambda _: _align_size,
        _OWNER,
        "the name of 0.16",
        kind="define",
        versions="<0.16",
    ),
)
