"""Freeze a model and give its linear layers adapters.

Only the adapters and ``modules_to_save`` stay trainable. A holds the same values however the model
is sharded: each matrix is drawn unsharded, seeded by its name, and a rank keeps its slice.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.built_model import unwrap
from mindspeed.errors import ConfigError
from mindspeed.lora.config import ALL_LINEAR, HEAD, WHOLE, LoraConfig
from mindspeed.lora.drawing import draw
from mindspeed.lora.experts import give_expert_adapters
from mindspeed.lora.layers import linear_layers, order_of, parts_of
from mindspeed.lora.linear import AdaptedLinear, give_adapter
from mindspeed.lora.names import (
    expert_layer,
    first_expert,
    is_adapter_weight,
    is_expert,
    named_modules,
    short_name,
    targeted,
)
from mindspeed.te.grouped import GroupedLinear

_ENDS = ("word_embeddings", "output_layer")


def attach(chunks: Iterable[Any], config: LoraConfig) -> None:
    """Freeze a model and attach adapters. Collective over the pipeline.

    Call it before the model is wrapped for data parallelism and before its optimizer is made. The
    base model's weights may be loaded before or after; an adapter changes nothing until it is
    trained.

    Args:
        chunks: This rank's pipeline stages, wrapped for precision or not.
        config: What is adapted, and how.

    Raises:
        ConfigError: A name matches no module (the message lists what there is), or the model has
            adapters already.
    """
    modules = unwrap(chunks)
    if adapted(modules):
        raise ConfigError("the model has adapters already; merge them first (lora.merge)")
    _check_names(modules, config)
    for module in modules:
        module.requires_grad_(False)
        for name, layer, shard in list(linear_layers(module)):
            parts = parts_of(name, layer, module.config, shard)
            known = _known_name(module, name, layer)
            if targets := _targets(known, parts, config):
                if isinstance(layer, GroupedLinear):
                    give_expert_adapters(layer, config, shard, targets, parts, known)
                else:
                    order = order_of(parts, module.config.kv_channels)
                    give_adapter(layer, config, shard, targets, parts, order, known)
                draw(name, layer)
        _unfreeze(module, config.modules_to_save)
        _carry_gradients(module, config.forward_hooks)
        module.config.moe_router_bias_update_rate = 0.0  # the router is frozen too
        module.lora_config = config
        module.__class__ = _adapted_class(type(module))  # type: ignore[arg-type]


def _known_name(chunk: Any, name: str, layer: Any) -> str:
    """The name under which :attr:`LoraConfig.modules` knows a layer: grouped experts by one."""
    if not isinstance(layer, GroupedLinear):
        return name
    mlp, _, leaf = name.rpartition(".experts.")
    return expert_layer(mlp, first_expert(chunk.config), leaf)


def _targets(name: str, parts: dict[str, int], config: LoraConfig) -> set[str]:
    """The parts of a layer that get an A and B of their own, or ``all``."""
    if not config.modules:
        return targeted(name, parts, config.target_modules)
    return {part for part in (*parts, WHOLE) if f"{name}.{part}" in config.modules}


def detach(chunk: Any) -> None:
    """Make a stage a plain one again, once its layers have no adapters any more."""
    if hasattr(chunk, "lora_config"):
        del chunk.lora_config
        chunk.__class__ = type(chunk).__base__


def adapted(chunks: Iterable[Any]) -> LoraConfig | None:
    """The adapters' options if a model has adapters, else None."""
    configs = [getattr(module, "lora_config", None) for module in unwrap(chunks)]
    return next((config for config in configs if config is not None), None)


def adapted_layers(chunk: Any) -> list[tuple[str, AdaptedLinear]]:
    """Layers with adapters by their names in the whole model."""
    named = named_modules(chunk)
    return [(name, module) for name, module in named if isinstance(module, AdaptedLinear)]


@contextlib.contextmanager
def switched_off(chunks: Iterable[Any]) -> Iterator[None]:
    """Inside, the model computes as the frozen one. Modules that are trained whole stay so."""
    layers = [layer for chunk in unwrap(chunks) for _, layer in adapted_layers(chunk)]
    for layer in layers:
        layer.switched_off = True
    try:
        yield
    finally:
        for layer in layers:
            layer.switched_off = False


def meant(chunks: Iterable[Any], config: LoraConfig) -> tuple[set[str], set[str]]:
    """Names of the options that mean a module of these chunks, and names of their linear layers."""
    matched, there = set[str](), set[str]()
    for module in unwrap(chunks):
        for name, layer, shard in linear_layers(module):
            there.add(short_name(name))
            parts = parts_of(name, layer, module.config, shard)
            matched |= {t for t in config.target_modules if targeted(name, parts, (t,))}
        saved = {n for n, _ in named_modules(module) if _means(n, config.modules_to_save)}
        matched |= {s for s in config.modules_to_save if any(_means(n, (s,)) for n in saved)}
    return matched, there


def unknown(config: LoraConfig, matched: set[str], there: set[str]) -> list[str]:
    """A problem for each name of the options that is not ``matched`` on any pipeline stage."""
    known = ", ".join(sorted(there))
    return [
        f"{name} matches no linear layer of this model; it has {known} (or {ALL_LINEAR}); "
        "embeddings can only be trained whole, with --lora-modules-to-save"
        for name in (*config.target_modules, *config.modules_to_save)
        if name not in matched
    ]


def _check_names(modules: list[Any], config: LoraConfig) -> None:
    """Every name means a module of some pipeline stage, and none means two things."""
    (matched, there), problems = meant(modules, config), list[str]()
    for module in modules:
        for name, layer, shard in linear_layers(module):
            parts = parts_of(name, layer, module.config, shard)
            asked = targeted(name, parts, config.target_modules)
            if len(asked) > 1 and "all" in asked:
                problems.append(f"{name} is named whole and by its parts: name it one way")
            if asked and config.use_dora and isinstance(layer, GroupedLinear):
                problems.append(
                    f"--lora-use-dora: {name} holds grouped experts, whose rows have no lengths of "
                    "their own; adapt other layers, or leave out --moe-grouped-gemm"
                )
            if asked and is_expert(name) and config.dropout:
                problems.append(
                    f"--lora-dropout {config.dropout}: adapters of experts have none; leave it out"
                )
            if asked and name.endswith("linear_qkv") and "q" not in parts:
                problems.append(
                    f"{name}: {module.config.num_query_groups} key heads cannot be divided among "
                    f"{shard.size} tensor-parallel ranks; adapt other layers, or use fewer ranks"
                )
            if asked and name == "output_layer" and module.share_embeddings_and_output_weights:
                problems.append(
                    f"{name} has the embedding's weights; train both with --lora-modules-to-save"
                )
            if asked and _means(name, config.modules_to_save):
                problems.append(f"{name} is in --lora-target-modules and --lora-modules-to-save")
    group = _stages()
    if group is None or group.size() == 1:
        problems += unknown(config, matched, there)
    elif dist.get_backend(group) != "fake":  # else a dry run, which asks all stages itself
        matched, there, problems = _from_all_stages(matched, there, problems, group)
        problems += unknown(config, matched, there)
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))


def _stages() -> Any:
    """The group of the pipeline's ranks; None outside of a job."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return None
    return parallel_state.get_pipeline_model_parallel_group()


def _from_all_stages(
    matched: set[str], there: set[str], problems: list[str], group: Any
) -> tuple[set[str], set[str], list[str]]:
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, (matched, there, problems), group=group)
    matched, there, problems = set(), set(), []
    for more_matched, more_there, more_problems in found:
        matched, there = matched | more_matched, there | more_there
        problems = problems + more_problems
    return matched, there, problems


def _means(name: str, wanted: tuple[str, ...]) -> bool:
    """Whether a module's name ends in one of the names, or in what HF calls them."""
    ours = {"embed_tokens": "word_embeddings"} | dict.fromkeys(("lm_head", HEAD), _ENDS[1])
    return any(name == w or name.endswith(f".{w}") for w in (ours.get(w, w) for w in wanted))


def _unfreeze(chunk: Any, names: tuple[str, ...]) -> None:
    for name, module in named_modules(chunk):
        if _means(name, names):
            module.requires_grad_(True)
    tied = getattr(chunk, "share_embeddings_and_output_weights", False)
    if tied and any(_means(end, names) for end in _ENDS):
        # Either name means both ends, which may be on different ranks.
        for end in _ENDS:
            for name, parameter in chunk.named_parameters():
                if name.endswith(f"{end}.weight"):
                    parameter.requires_grad_(True)


def _carry_gradients(chunk: Any, names: tuple[str, ...]) -> None:
    """Let the first activations require gradients.

    Recomputation runs a layer inside an autograd function, which returns gradients only if one of
    its inputs requires them; with a frozen embedding none would.
    """
    for name, module in named_modules(chunk):
        if name == "embedding" or name.rpartition(".")[2] in names:
            module.register_forward_hook(_require_gradients)


@functools.cache
def _adapted_class(base: Any) -> type:
    """The class of a stage with adapters; its sharded state dict is that of the base model.

    The stage leaves the adapters out, not each layer: Megatron also collects what is in a list of
    layers, as multi-token prediction has one, without asking the layers.
    """

    def sharded_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = base.sharded_state_dict(self, *args, **kwargs)
        return {name: value for name, value in state.items() if not is_adapter_weight(name)}

    body = {"__module__": base.__module__, "sharded_state_dict": sharded_state_dict}
    return type(base.__name__, (base,), body)


def _require_gradients(module: Any, inputs: Any, output: Any) -> None:
    if torch.is_grad_enabled() and isinstance(output, torch.Tensor) and output.is_leaf:
        output.requires_grad_(True)
