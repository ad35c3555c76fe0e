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
from mindspeed.lora.config import (
    ALL_LINEAR,
    EMBEDDING,
    HEAD,
    OUTPUT,
    WHOLE,
    LoraConfig,
    expert_layer,
    first_expert,
    in_whole_model,
    is_adapter_weight,
    is_expert,
    named_modules,
    short_name,
    targeted,
)
from mindspeed.lora.drawing import draw
from mindspeed.lora.experts import give_expert_adapters
from mindspeed.lora.layers import linear_layers, order_of, parts_of
from mindspeed.lora.linear import AdaptedLinear, AdapterOptions, give_adapter
from mindspeed.lora.megatron_embedding import give_embedding_adapter, share_adapter
from mindspeed.models.naming import plain_name
from mindspeed.te.grouped import GroupedLinear
from mindspeed.te.quantized_weight import QuantizedWeight

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
            if name == OUTPUT and _ties(module, config):
                if isinstance(module.embedding.word_embeddings, AdaptedLinear):
                    share_adapter(layer, config, shard, module.embedding.word_embeddings)
            elif targets := _targets(known, parts, config, tied=_ties(module, config)):
                order = order_of(parts, module.config.kv_channels)
                options = AdapterOptions.of(
                    config, shard, parts, order, type(layer), known, targets
                )
                if isinstance(layer, GroupedLinear):
                    give_expert_adapters(layer, options)
                elif name == EMBEDDING:
                    give_embedding_adapter(layer, options)
                else:
                    give_adapter(layer, options._replace(tied=_tied_weight(module, layer)))
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


def _ties(chunk: Any, config: LoraConfig) -> bool:
    """Whether embedding and output layer are to have one adapter."""
    return config.ensure_weight_tying and chunk.share_embeddings_and_output_weights


def _tied_weight(chunk: Any, layer: Any) -> torch.Tensor | None:
    """The weight of an output layer that has the embedding's, on a stage that has both."""
    return None if layer.weight is not None else chunk.shared_embedding_or_output_weight()  # type: ignore[no-any-return]


def _targets(name: str, parts: dict[str, int], config: LoraConfig, *, tied: bool) -> set[str]:
    """The parts of a layer that get an A and B of their own, or ``all``."""
    if not config.modules:
        asked = targeted(name, parts, config.target_modules)
        if tied and name == EMBEDDING:  # the output layer's name means both, too
            asked |= targeted(OUTPUT, parts, config.target_modules)
        return asked
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
        modules = {above for name, _ in plain_parameters(module) for above in _above(name)}
        matched |= {s for s in config.modules_to_save if any(_means(n, (s,)) for n in modules)}
    return matched, there


def unknown(config: LoraConfig, matched: set[str], there: set[str]) -> list[str]:
    """A problem for each name of the options that is not ``matched`` on any pipeline stage."""
    known = ", ".join(sorted(there))
    return [
        f"{name} matches no linear layer of this model; it has {known} (or {ALL_LINEAR})"
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
            if asked:
                problems += _of_bias(name, layer, config)
            if asked and name in (EMBEDDING, OUTPUT):
                problems += _of_end(name, module, config)
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


def _of_bias(name: str, layer: Any, config: LoraConfig) -> Iterator[str]:
    bias = None if name == EMBEDDING or is_expert(name) else layer.bias
    if config.use_bias and (bias is None or not bias.numel()):
        yield (
            f"--lora-use-bias: {name} has no bias that the one of its adapter could be added to; "
            "adapt other layers, or leave it out"
        )


def _of_end(name: str, chunk: Any, config: LoraConfig) -> Iterator[str]:
    """Why the embedding or the output layer of a stage cannot have an adapter."""
    tied = _ties(chunk, config)
    if tied and not (chunk.pre_process and chunk.post_process):
        yield (
            "--lora-ensure-weight-tying: embedding and output layer are on different pipeline "
            "stages, and have one adapter; use one stage, or leave it out"
        )
    if name == OUTPUT and not tied:
        return
    if not chunk.pre_process:
        yield f"{name} is on two pipeline stages (multi-token prediction): do not adapt it"
    if config.use_dora:
        yield f"--lora-use-dora: {name} has no rows with lengths; train it whole (modules-to-save)"
    if config.from_base:
        yield f"--lora-init {config.init}: PEFT has no factors of {name}; use kaiming"


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


def plain_parameters(chunk: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters of a stage by their names in the whole model, with the local layer spec."""
    for name, parameter in chunk.named_parameters():
        yield plain_name(in_whole_model(chunk, name)), parameter


def _above(name: str) -> Iterator[str]:
    """Modules that a parameter is in, by their names."""
    while name := name.rpartition(".")[0]:
        yield name


def _unfreeze(chunk: Any, names: tuple[str, ...]) -> None:
    for name, parameter in plain_parameters(chunk):
        if any(_means(module, names) for module in _above(name)) and not is_adapter_weight(name):
            _check_saved(chunk, name, parameter)
            parameter.requires_grad_(True)
    tied = getattr(chunk, "share_embeddings_and_output_weights", False)
    if tied and any(_means(end, names) for end in _ENDS):
        # Either name means both ends, which may be on different ranks.
        for end in _ENDS:
            for name, parameter in chunk.named_parameters():
                if name.endswith(f"{end}.weight"):
                    parameter.requires_grad_(True)


def _check_saved(chunk: Any, name: str, parameter: torch.nn.Parameter) -> None:
    """See that a parameter that is trained whole can be stored whole.

    Raises:
        ConfigError: It cannot.
    """
    shards = getattr(parameter, "tensor_model_parallel", False) and _tensor_ranks() > 1
    if is_expert(name) or isinstance(parameter, QuantizedWeight):
        reason = "experts are" if is_expert(name) else "weights in fewer bits are"
    elif shards and ".linear_fc1." in name and chunk.config.gated_linear_unit:
        reason = "gate and up on several tensor-parallel ranks are"
    else:
        return
    raise ConfigError(f"--lora-modules-to-save: {name}: {reason} not trained whole; adapt it")


def _tensor_ranks() -> int:
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return 1
    return parallel_state.get_tensor_model_parallel_world_size()  # type: ignore[no-any-return]


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
