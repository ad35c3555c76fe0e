"""Defect: parts of a model communicate over the global tensor-parallel group, not over the model's.

Where: ``MultiTokenPredictionLayer`` (its projection and its recomputation) and ``MLASelfAttention``
of the local layer spec (latent queries and keys) call collectives without the group of the
``pg_collection`` that the model was built with (finding 4 of Megatron-LM issue 7452);
``CrossAttention`` builds its projections without it (finding 6).
Symptom: silent; tensors of other samples if that group has other ranks than the global one.
Fix: such a model is refused when it is built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed.adaptor.patch import repair
from mindspeed.adaptor.signatures import bind
from mindspeed.errors import ConfigError


def refuse_parts(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``LanguageModule.__init__``: refuse parts that would use another group."""

    def __init__(self: Any, config: Any, pg_collection: Any = None) -> None:
        original(self, config, pg_collection)
        part = _part_with_global_group(config)
        if part:
            _refuse_own_group(part, getattr(pg_collection, "tp", None))

    return __init__


def refuse_cross_attention(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``CrossAttention.__init__``."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        groups = bind(original, (self, *args), kwargs).get("pg_collection")
        _refuse_own_group("cross attention", getattr(groups, "tp", None))
        original(self, *args, **kwargs)

    return __init__


def _refuse_own_group(part: str, group: Any) -> None:
    if _differs(group):
        raise ConfigError(
            f"{part} communicates over Megatron's global tensor-parallel group, but the "
            "pg_collection of this model has another one; build the model with the global group"
        )


def _part_with_global_group(config: Any) -> str:
    if config.mtp_num_layers:
        return "multi-token prediction (mtp_num_layers)"
    local = config.multi_latent_attention and config.transformer_impl == "local"
    return "multi-latent attention in the local layer spec" if local else ""


def _differs(group: Any) -> bool:
    from megatron.core import parallel_state
    from torch.distributed import get_process_group_ranks

    if group is None or not parallel_state.model_parallel_is_initialized():
        return False
    ranks = get_process_group_ranks(group)
    return ranks != get_process_group_ranks(parallel_state.get_tensor_model_parallel_group())


PATCHES = (
    repair(
        "megatron.core.models.common.language_module.language_module:LanguageModule.__init__",
        refuse_parts,
        "parts that ignore the tensor-parallel group of their model are refused",
        expects="(self, config, pg_collection)",
        versions=">=0.15",
    ),
    repair(
        "megatron.core.transformer.attention:CrossAttention.__init__",
        refuse_cross_attention,
        "cross attention, which ignores the tensor-parallel group of its model, is refused",
        expects="(self, config, submodules, layer_number, attn_mask_type, ...)",
    ),
)
