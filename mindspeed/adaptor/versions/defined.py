"""Names of later releases of Megatron that older ones get, so that what is written here is for one.

Only names whose meaning an older release can have: the default of a field that came later, and a
function under its later name. A feature that needs more says so in its trait ``megatron``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from mindspeed.adaptor.patch import Patch
from mindspeed.adaptor.versions import later_parameters
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


def _unwrap_model(model: Any, module_instances: Any = None) -> Any:
    """The model chunks inside the modules around them; ``model`` is a list of chunks, or one."""
    if isinstance(model, list):
        return [_unwrap_model(chunk) for chunk in model]
    while hasattr(model, "module"):
        model = model.module
    return model


def _group_if_none(tp_group: Any, is_expert: bool = False, check_initialized: bool = True) -> Any:
    """The tensor-parallel group, unless there is one; None in a process without groups."""
    from megatron.core import parallel_state

    if tp_group is not None or not dist.is_initialized():
        return tp_group
    if is_expert:
        return parallel_state.get_expert_tensor_parallel_group(check_initialized)
    return parallel_state.get_tensor_model_parallel_group(check_initialized)


def _groups() -> property:
    """The process groups of attention."""

    def groups(module: Any) -> Any:
        from megatron.core import parallel_state

        return SimpleNamespace(
            tp=parallel_state.get_tensor_model_parallel_group(),
            cp=parallel_state.get_context_parallel_group(),
        )

    return property(groups)


def _group_of_linear() -> property:
    """The tensor-parallel ranks of a linear layer of the local spec."""
    return property(lambda layer: _group_if_none(None, layer.is_expert))


def _tracker() -> Any:
    """What routers have recorded for the log, by name."""
    from megatron.core import parallel_state

    return parallel_state.get_moe_layer_wise_logging_tracker()


def _of_state(name: str, **options: bool) -> property:
    """A process group of Megatron's parallel state."""

    def group(module: Any) -> Any:
        from megatron.core import parallel_state

        return getattr(parallel_state, name)(**options)

    return property(group)


_NAMES_OF_0_15: dict[str, Callable[[], Any]] = {
    "megatron.core.process_groups_config:ProcessGroupCollection": lambda: SimpleNamespace,
    "megatron.core.utils:unwrap_model": lambda: _unwrap_model,
    "megatron.core.utils:get_pg_rank": lambda: lambda group: group.rank() if group else 0,
    "megatron.core.utils:get_tensor_model_parallel_group_if_none": lambda: _group_if_none,
    "megatron.core.transformer.attention:Attention.pg_collection": _groups,
    "megatron.core.tensor_parallel.layers:ColumnParallelLinear.tp_group": _group_of_linear,
    "megatron.core.tensor_parallel.layers:RowParallelLinear.tp_group": _group_of_linear,
    "megatron.core.transformer.moe.moe_utils:get_moe_layer_wise_logging_tracker": lambda: _tracker,
    "megatron.core.transformer.moe.router:Router.tp_cp_group": lambda: _of_state(
        "get_tensor_and_context_parallel_group"
    ),
    "megatron.core.transformer.moe.router:Router.tp_dp_cp_group": lambda: _of_state(
        "get_tensor_and_data_parallel_group", with_context_parallel=True
    ),
}

PATCHES = (
    *_defaults(),
    *later_parameters.PATCHES,
    *(
        Patch(
            target,
            lambda _, make=make: make(),  # type: ignore[misc]
            _OWNER,
            "the name of 0.15",
            kind="define",
            versions="<0.15",
        )
        for target, make in _NAMES_OF_0_15.items()
    ),
    Patch(
        "megatron.core.transformer.moe.moe_utils:get_align_size_for_quantization",
        lambda _: _align_size,
        _OWNER,
        "the name of 0.16",
        kind="define",
        versions="<0.16",
    ),
)
