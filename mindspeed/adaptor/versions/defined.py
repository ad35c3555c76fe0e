"""What later releases of Megatron have and older ones get, so that what is written here is for one.

Names: only those whose meaning an older release can have, the default of a field that came later,
and a function under its later name. A feature that needs more says so in its trait ``megatron``.

Parameters that functions got in 0.15: before, the number of a model chunk (``vp_stage``) is global
state, and there is one group of each kind. So a number is set for the time of a call, and a group
that is given must be the global one.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from mindspeed.adaptor.patch import Patch
from mindspeed.adaptor.versions.fields import DEFAULTS_OF_LAYERS
from mindspeed.errors import ConfigError
from mindspeed.journal import Journal

_OWNER = "versions"
_BEFORE = "<0.15"
_NUMBER = "_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK"  # of parallel_state
_STAGE = (
    "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE",
    "_MPU_PIPELINE_MODEL_PARALLEL_RANK",
    "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE",
)
_MODEL = "megatron.core.models.gpt.gpt_model:GPTModel."
_MAPPINGS = "megatron.core.tensor_parallel.mappings:"
_STATE = "megatron.core.parallel_state:"
_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    _STATE + "is_pipeline_first_stage": ("vp_stage",),
    _STATE + "is_pipeline_last_stage": ("vp_stage",),
    "megatron.core.transformer.transformer_block:_get_block_submodules": ("vp_stage", "pp_rank"),
    "megatron.core.transformer.transformer_layer:get_transformer_layer_offset": (
        "vp_stage",
        "pp_rank",
    ),
    "megatron.core.models.gpt.gpt_layer_specs:get_gpt_decoder_block_spec": ("vp_stage", "pp_rank"),
    "megatron.core.pipeline_parallel.schedules:get_pp_rank_microbatches": (
        "overlap_moe_expert_parallel_comm",
        "p2p_communicator",
    ),
    _MODEL + "__init__": ("pg_collection", "vp_stage"),
    _MAPPINGS + "copy_to_tensor_model_parallel_region": ("group",),
    _MAPPINGS + "reduce_from_tensor_model_parallel_region": ("group",),
    _MAPPINGS + "scatter_to_tensor_model_parallel_region": ("group",),
    _MAPPINGS + "gather_from_tensor_model_parallel_region": ("group",),
    _MAPPINGS + "scatter_to_sequence_parallel_region": ("group",),
}


def with_parameters(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A wrapper of a function, which then has these parameters, too; by default they are None."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(original)
        kinds = [parameter.kind for parameter in own.parameters.values()]
        by_place = sum(kind <= inspect.Parameter.POSITIONAL_OR_KEYWORD for kind in kinds)
        added = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
            for name in names
        ]
        before = list(own.parameters.values())
        later = own.replace(parameters=[*before[:by_place], *added, *before[by_place:]])

        def function(*args: Any, **kwargs: Any) -> Any:
            bound = later.bind(*args, **kwargs)
            given = {name: bound.arguments.pop(name, None) for name in names}
            _refuse_others(given)
            with in_chunk(given.get("vp_stage")), _at_stage(given.get("p2p_communicator")):
                return original(*bound.args, **bound.kwargs)

        function.__signature__ = later  # type: ignore[attr-defined]
        return function

    return make


@contextlib.contextmanager
def in_chunk(number: int | None) -> Iterator[None]:
    """The time in which Megatron's global state names this model chunk; None changes nothing."""
    from megatron.core import parallel_state

    if number is None:
        yield
        return
    before = getattr(parallel_state, _NUMBER)
    setattr(parallel_state, _NUMBER, number)
    try:
        yield
    finally:
        setattr(parallel_state, _NUMBER, before)


@contextlib.contextmanager
def _at_stage(communicator: Any) -> Iterator[None]:
    """The time in which Megatron's global state names the pipeline stage of a communicator."""
    from megatron.core import parallel_state

    journal = Journal()
    if communicator is not None:
        group, chunks = communicator.pp_group, communicator.virtual_pipeline_model_parallel_size
        for name, value in zip(_STAGE, (group.size(), group.rank(), chunks), strict=True):
            journal.set(parallel_state, name, value, owner="")
    try:
        yield
    finally:
        journal.undo()


def _refuse_others(given: Mapping[str, Any]) -> None:
    from megatron.core import parallel_state

    group, rank = given.get("group"), given.get("pp_rank")
    others = (
        given.get("overlap_moe_expert_parallel_comm")
        or given.get("pg_collection") is not None
        or (group is not None and group is not parallel_state.get_tensor_model_parallel_group())
        or (rank is not None and rank != parallel_state.get_pipeline_model_parallel_rank())
    )
    if others:
        raise ConfigError(
            "before megatron-core 0.15 a model has the global process groups, not others: "
            "install megatron-core 0.16.1"
        )


def remember_number(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``GPTModel.__init__``: ``vp_stage`` is the number of the chunk, or None."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        from megatron.core import parallel_state

        original(self, *args, **kwargs)
        self.vp_stage = parallel_state.get_virtual_pipeline_model_parallel_rank()

    return __init__


def of_own_number(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``GPTModel.sharded_state_dict``, which asks for the chunk's first layer."""

    def sharded_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        with in_chunk(self.vp_stage):
            return original(self, *args, **kwargs)

    return sharded_state_dict


_PARAMETER_PATCHES = (
    Patch(
        _MODEL + "__init__",
        remember_number,
        _OWNER,
        "a model chunk knows its number",
        expects="(self, config, transformer_layer_spec, vocab_size, max_sequence_length, ...)",
        versions=_BEFORE,
    ),
    *(
        Patch(
            target,
            with_parameters(*names),
            _OWNER,
            f"the parameters {', '.join(names)} of 0.15",
            versions=_BEFORE,
        )
        for target, names in _PARAMETERS.items()
    ),
    Patch(
        _MODEL + "sharded_state_dict",
        of_own_number,
        _OWNER,
        "a model chunk is saved as the one that it is",
        versions=_BEFORE,
    ),
)


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
    *_PARAMETER_PATCHES,
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
