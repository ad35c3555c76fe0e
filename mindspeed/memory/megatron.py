"""Plans on the layers of a Megatron model chunk: which sites a layer has, and how they are wrapped.

    plan = ChunkPlan({"decoder.layers.0": {"input_layernorm": SiteAction.RECOMPUTE_OUTPUT}})
    install(model, plan, journal)

Sites of a layer are ``layer``, its halves ``attention_sublayer`` and ``mlp_sublayer``, its modules
by path, and three kinds of computations inside modules:

* ``input_layernorm`` and ``pre_mlp_layernorm`` where they are part of the linear layer after them
  (Transformer Engine spec), and ``PATH.layer_norm`` for other such layers (latent attention);
* ``mlp.activation`` and ``mlp.experts.activation``: what is computed between the two linear layers.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mindspeed import device as devices
from mindspeed.journal import Journal, replace_method
from mindspeed.memory import agreement
from mindspeed.memory.between import BetweenCalls
from mindspeed.memory.layer_rules import ChunkLayers
from mindspeed.memory.offload import MIN_BYTES, Offload
from mindspeed.memory.plan import ATTENTION_SUBLAYER, LAYER, MLP_SUBLAYER, ChunkPlan, SiteAction
from mindspeed.memory.runtime import Runtime

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_layer import TransformerLayer

_RUNTIME = "_activation_memory"
"""Attribute of a model chunk: its runtime."""
_NORM_IN_LINEAR = {
    "self_attention.linear_qkv": "input_layernorm",
    "mlp.linear_fc1": "pre_mlp_layernorm",
}
_ACTIVATION = "activation"
_SUBLAYERS = {ATTENTION_SUBLAYER: "_forward_attention", MLP_SUBLAYER: "_forward_mlp"}


@dataclass(frozen=True)
class Site:
    """Location of a site: a method of a module, or what lies between two of its linear layers."""

    module: torch.nn.Module
    method: str = "forward"


def layers_of(model: torch.nn.Module) -> dict[str, TransformerLayer]:
    """The transformer layers of a model chunk by path, multi-token prediction's included."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, TransformerLayer)
    }


def sites_of(layer: torch.nn.Module) -> dict[str, Site]:
    """The sites of a layer, outer ones first; those of sequential experts are not apart."""
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
    from megatron.core.transformer.transformer_layer import TransformerLayer

    sites = {LAYER: Site(layer)}
    if getattr(type(layer), "forward", None) is TransformerLayer.forward:
        sites |= {name: Site(layer, method) for name, method in _SUBLAYERS.items()}
    for path, module in layer.named_modules():
        if not path or isinstance(module, (IdentityOp, IdentityFuncOp, torch.nn.ModuleList)):
            continue
        sites[path] = Site(module)
        if callable(getattr(module, "normalize", None)):
            name = _NORM_IN_LINEAR.get(path, f"{path}.layer_norm")
            sites[name] = Site(module, "normalize")
        if hasattr(module, "linear_fc1") and hasattr(module, "linear_fc2"):
            sites[f"{path}.{_ACTIVATION}"] = Site(module, _ACTIVATION)
    return sites


def chunk_layers(model: torch.nn.Module, config: Any, vp_stage: int | None) -> ChunkLayers:
    """The layers of a model chunk as flags with a number of layers count them."""
    paths = layers_of(model)
    decoder = {path: int(path.rsplit(".", 1)[1]) for path in paths if path.startswith("decoder.")}
    return ChunkLayers(
        decoder,
        {path: x.layer_number - 1 if path in decoder else None for path, x in paths.items()},
        tuple(path for path in paths if path not in decoder),
        vp_stage or 0,
        config.virtual_pipeline_model_parallel_size or 1,
        bool(getattr(model, "post_process", True)),
        0 if config.recompute_granularity else config.recompute_num_layers or 0,
    )


def runtime_of(model: torch.nn.Module) -> Runtime | None:
    """The runtime of a model chunk that has a plan."""
    return getattr(model, _RUNTIME, None)


def install(
    model: torch.nn.Module,
    plan: ChunkPlan,
    journal: Journal,
    *,
    owner: str = "this plan",
    min_bytes: int = MIN_BYTES,
    offload: Offload | None = None,
) -> Runtime:
    """Execute a plan on a model chunk, together with the plans that were installed before.

    Args:
        model: The chunk.
        plan: Layers by their path in the chunk.
        journal: Restores the layers.
        owner: Whose plan it is, for messages.
        min_bytes: Smaller tensors are not copied to the host, unless ``offload`` says otherwise.
        offload: Makes the host copies of the chunk from now on; chunks may share one.

    Returns:
        The runtime of the chunk; its ``plan`` may be replaced between two iterations.

    Raises:
        ValueError: A layer or a site does not exist; names the nearest. Another plan has another
            action for a site; names both owners.
    """
    runtime = runtime_of(model)
    if runtime is None:
        runtime = Runtime(ChunkPlan(), environment=_environment(model), min_bytes=min_bytes)
        setattr(model, _RUNTIME, runtime)
        journal.call_on_undo(lambda: _uninstall(model))
    layers = layers_of(model)
    check_names(plan, {name: sites_of(layer) for name, layer in layers.items()})
    for layer, site, action in plan.actions():
        before = runtime.plan.layers.get(layer, {}).get(site, action)
        if before is not action:
            raise ValueError(
                f"{layer}, {site}: {action.value} by {owner}, but {before.value} by "
                f"{runtime.owners[layer, site]}; remove one"
            )
        runtime.owners[layer, site] = owner
    joined = runtime.plan.joined(plan)
    for name, sites in plan.layers.items():
        wrap(runtime, name, layers[name], sites, journal)
    runtime.plan = joined
    if offload is not None:
        runtime.offload = offload
    return runtime


def refuse_different_plans(plan: ChunkPlan, owner: str) -> None:
    """Refuse a plan that other ranks of the pipeline stage do not have: second runs communicate.

    A collective of all ranks of the stage.

    Raises:
        TrainingError: On all ranks; names those with another plan.
    """
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized() or dist.get_backend() == "fake":
        return
    here = devices.current().torch_device()
    agreement.refuse_different(plan.digest(), stage_groups(), here, f"the plan of {owner}")


def stage_groups() -> list[Any]:
    """Groups that connect all ranks of a pipeline stage."""
    from megatron.core import parallel_state

    return [
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
    ]


def check_names(plan: ChunkPlan, known: dict[str, Any]) -> None:
    """Refuse layers and sites that do not exist.

    Raises:
        ValueError: Names the nearest that exist.
    """
    for layer, site, action in plan.actions():
        if layer not in known:
            raise ValueError(f"plan: no layer {layer!r}{_nearest(layer, known)}")
        if (site, action) == (LAYER, SiteAction.RECOMPUTE_OUTPUT):
            raise ValueError(
                f"plan: {layer}: the output of a whole layer is saved by the next one, outside of "
                f"the plan; use {SiteAction.RECOMPUTE.value}"
            )
        if site not in known[layer]:
            raise ValueError(f"plan: {layer} has no site {site!r}{_nearest(site, known[layer])}")


def wrap(
    runtime: Runtime,
    name: str,
    layer: torch.nn.Module,
    sites: Iterable[str],
    journal: Journal,
) -> None:
    """Wrap a layer and those of its sites that are not wrapped yet."""
    known, wrapped = sites_of(layer), runtime.wrapped.setdefault(name, set())
    if not wrapped:

        def tensors() -> Iterator[torch.Tensor]:
            yield from layer.parameters()
            yield from layer.buffers()

        replace_method(
            layer, "forward", lambda forward: runtime.layer(name, forward, tensors), journal
        )
        wrapped.add(LAYER)
    for site in sorted(_with_linear_layers(sites) - wrapped, key=lambda one: _order(known, one)):
        wrapped.add(site)
        module, method = known[site].module, known[site].method
        if method != _ACTIVATION:
            replace_method(module, method, _site(runtime, name, site), journal)
            continue
        between = BetweenCalls(runtime, name, site)
        replace_method(module, "forward", between.module, journal)
        replace_method(module.linear_fc1, "forward", between.first, journal)
        replace_method(module.linear_fc2, "forward", between.second, journal)


def _with_linear_layers(sites: Iterable[str]) -> set[str]:
    """Sites between linear layers need these wrapped, too, and inside of their own wrappers.

    What lies between two calls begins after the whole first one, its own site included.
    """
    found = set(sites)
    for site in sites:
        path, _, name = site.rpartition(".")
        if name == _ACTIVATION:
            found |= {f"{path}.linear_fc1", f"{path}.linear_fc2"}
    return found


def _order(known: Mapping[str, Site], site: str) -> tuple[bool, int]:
    """Modules from the outside to the inside, then what lies between their calls."""
    return known[site].method == _ACTIVATION, list(known).index(site)


def _site(runtime: Runtime, layer: str, site: str) -> Callable[..., Any]:
    return lambda forward: runtime.site(layer, site, forward)


def _uninstall(model: torch.nn.Module) -> None:
    if hasattr(model, _RUNTIME):
        delattr(model, _RUNTIME)


def _nearest(name: str, known: Iterable[str]) -> str:
    names = list(known)
    found = difflib.get_close_matches(name, names, n=3, cutoff=0.4) or names
    return f"; there are {', '.join(found)}" if found else ""


def remember_state(modules: Iterable[torch.nn.Module]) -> Callable[[], None]:
    """Remember what a run of ``modules`` leaves behind; the result restores it.

    Buffers that count (tokens of experts), the losses of experts and of multi-token prediction that
    are summed for the log, and attributes: a run that ends early has not cleared what modules pass
    from one of their methods to the next, and autograd's graph of it would live on there.
    """
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    modules = list(modules)
    buffers = [(x, x._version, x.clone()) for module in modules for x in _buffers(module)]
    attributes = [(vars(x), dict(vars(x))) for module in modules for x in _holders(module)]
    logged = _losses_of_experts()
    before = {name: _copied(entry) for name, entry in logged.items()}
    predicted = _copied(MTPLossLoggingHelper.tracker)

    def restore() -> None:
        for table, values in (
            (logged, before),
            (MTPLossLoggingHelper.tracker, predicted),
            *attributes,
        ):
            for name in table.keys() - values.keys():
                del table[name]
            table.update(values)
        with torch.no_grad():
            for buffer, version, value in buffers:
                if buffer._version != version:
                    buffer.copy_(value)

    return restore


def _holders(module: torch.nn.Module) -> Iterator[object]:
    """Objects whose attributes a run sets: all modules, and what dispatches tokens to experts."""
    for part in module.modules():
        yield part
        dispatcher = getattr(part, "token_dispatcher", None)
        if dispatcher is not None:
            yield dispatcher
            if hasattr(dispatcher, "_comm_manager"):
                yield dispatcher._comm_manager


def _buffers(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Those of torch: Megatron's DistributedDataParallel has gradient buffers by that name."""
    return torch.nn.Module.buffers(module)


def _losses_of_experts() -> dict[str, Any]:
    """What is summed for the log, by name: since Megatron 0.18 objects, before dictionaries."""
    from megatron.core.transformer.moe import moe_utils

    if hasattr(moe_utils, "get_moe_metrics_tracker"):
        return moe_utils.get_moe_metrics_tracker().metrics  # type: ignore[no-any-return]
    return moe_utils.get_moe_layer_wise_logging_tracker()  # type: ignore[no-any-return]


def _copied(entry: Any) -> Any:
    """A dictionary, or an object with the same in its attributes, with copies of its tensors."""
    found = copy.copy(entry)
    values = found if isinstance(found, dict) else vars(found)
    values.update((k, v.clone()) for k, v in values.items() if isinstance(v, torch.Tensor))
    return found


def _environment(model: torch.nn.Module) -> Callable[..., Any]:
    """State that a second run must find, and state that it must restore.

    Random states of Megatron's tracker, and what :func:`remember_state` finds.
    """
    from megatron.core.tensor_parallel import random

    layers = layers_of(model)

    def remember(layer: str) -> Callable[[], contextlib.AbstractContextManager[None]]:
        states = random._get_all_rng_states()

        @contextlib.contextmanager
        def restored() -> Iterator[None]:
            restore = remember_state([layers[layer]])
            with random._fork_rng():
                random._set_all_rng_states(*states)
                try:
                    yield
                finally:
                    restore()

        return restored

    return remember
