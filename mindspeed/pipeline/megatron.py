"""No-op layers in Megatron's transformer blocks (:mod:`mindspeed.pipeline.noop_layers`)."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import BaseTransformerLayer

from mindspeed.errors import ConfigError
from mindspeed.pipeline.noop_layers import problem_of, without_noop


class NoopTransformerLayer(MegatronModule, BaseTransformerLayer):
    """Returns its input; has no parameters and no checkpoint entries.

    Args:
        config: of the model.
        global_layer_number: number in the whole model, 1-based, as of other layers.
        copies: return a copy. The last layer of a model chunk must: the schedule frees outputs
            after sending them and refuses views, and an activation checkpoint returns a view of an
            output that is its input.
    """

    def __init__(
        self, config: TransformerConfig, global_layer_number: int, copies: bool, **_: Any
    ) -> None:
        super().__init__(config=config)
        self.layer_number = global_layer_number
        self._copies = copies

    def forward(
        self, hidden_states: torch.Tensor, *_: Any, context: Any = None, **__: Any
    ) -> tuple[torch.Tensor, Any]:
        """Returns hidden states ``[s, b, h]`` of any dtype and the cross-attention context."""
        return (hidden_states.clone() if self._copies else hidden_states), context

    def extra_repr(self) -> str:
        """Shown by ``print(model)``."""
        return f"layer_number={self.layer_number}"


def with_noop_layers(
    block: TransformerBlockSubmodules,
    config: TransformerConfig,
    first_layer: int,
    noop_layers: Collection[int],
) -> TransformerBlockSubmodules:
    """Replace the specs of no-op layers in one model chunk.

    The other layers are unchanged and are numbered in checkpoints as if no-op layers did not
    exist. The standard deviation of Megatron's default initialisation of output projections, in
    ``config``, is adjusted to the number of computing layers.
    """
    problem = problem_of(noop_layers, config.num_layers)
    if problem:
        raise ConfigError(f"--noop-layers {problem}")
    computing = without_noop(range(config.num_layers), noop_layers)
    _initialise_for(len(computing), config)
    indices = range(first_layer, first_layer + len(block.layer_specs))
    specs = [
        _noop_spec(index, copies=index == indices[-1])
        if index in noop_layers
        else replace(spec, module=stored_as(computing.index(index), len(computing), spec.module))
        for index, spec in zip(indices, block.layer_specs, strict=True)
    ]
    return replace(block, layer_specs=specs)


def stored_as(index: int, num_layers: int, layer: type) -> type:
    """A layer class whose checkpoint entries are those of layer ``index`` of ``num_layers``.

    Megatron stacks the parameters of equal layers in tensors ``[num_layers, ...]`` and passes each
    layer its offset. Where layers differ it uses names with layer numbers instead; the
    ``layer_spec`` seam takes these from the attribute ``stored_as``.
    """

    class StoredAs(layer):  # type: ignore[misc,valid-type]
        stored_as = index

        def sharded_state_dict(
            self,
            prefix: str = "",
            sharded_offsets: Sequence[tuple[int, int, int]] = (),
            metadata: dict[str, Any] | None = None,
        ) -> dict[str, Any]:
            offsets = [(0, index, num_layers)] if sharded_offsets else []
            return super().sharded_state_dict(prefix, offsets, metadata)  # type: ignore[no-any-return]

    StoredAs.__name__ = StoredAs.__qualname__ = layer.__name__
    return StoredAs


def _noop_spec(index: int, copies: bool) -> ModuleSpec:
    params = {"global_layer_number": index + 1, "copies": copies}
    return ModuleSpec(module=NoopTransformerLayer, params=params)


def _initialise_for(num_layers: int, config: TransformerConfig) -> None:
    method = config.output_layer_init_method
    default = config.init_method_std / math.sqrt(2.0 * config.num_layers)
    if (
        isinstance(method, functools.partial)
        and method.func is torch.nn.init.normal_
        and method.keywords.get("std") == default
    ):
        std = config.init_method_std / math.sqrt(2.0 * num_layers)
        config.output_layer_init_method = functools.partial(method.func, mean=0.0, std=std)
