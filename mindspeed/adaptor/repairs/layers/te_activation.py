"""Defect: the flag for activations of Transformer Engine has no effect, or another activation.

Where: ``gpt_builders.py`` of Megatron-LM does not hand ``--use-te-activation-func`` to
``get_gpt_layer_with_transformer_engine_spec`` for models without experts (Megatron-LM PR 3300);
``TEActivationOp`` builds ReLU for SiLU without a gate.
Symptom: silent.
Fix: the flag is the default of the layer spec; SiLU without a gate is refused.
Versions: >=0.15 (Megatron-LM passes the flag on since 0.17, other callers need not).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from mindspeed.adaptor.patch import repair
from mindspeed.errors import ConfigError


def needed(values: Mapping[str, Any]) -> bool:
    """Whether the flag is known to be given."""
    return bool(values.get("use_te_activation_func"))


def use_by_default(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap what makes the spec of a layer; since 0.17 its submodules are made by a function."""

    def spec(*args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("use_te_activation_func", True)
        return original(*args, **kwargs)

    return spec


def refuse_another_activation(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``TEActivationOp.__new__``."""

    def __new__(cls: type, config: Any) -> Any:
        if config.activation_func is torch.nn.functional.silu and not config.gated_linear_unit:
            raise ConfigError(
                "--use-te-activation-func: Megatron would build ReLU for SiLU without a gate; "
                "drop the flag, or use --swiglu"
            )
        return original(cls, config)

    return __new__


PATCHES = (
    repair(
        "megatron.core.models.gpt.gpt_layer_specs:get_gpt_layer_with_transformer_engine_spec",
        use_by_default,
        "--use-te-activation-func counts without experts, too",
        expects="(num_experts, ...)",
        versions=">=0.15,<0.17",
    ),
    repair(
        "megatron.core.models.gpt.gpt_layer_specs:get_gpt_layer_with_transformer_engine_submodules",
        use_by_default,
        "the same since 0.17",
        expects="(num_experts, ...)",
        versions=">=0.17",
    ),
)
PATCHES_OF_TRANSFORMER_ENGINE = (
    repair(
        "megatron.core.extensions.transformer_engine:TEActivationOp.__new__",
        refuse_another_activation,
        "Megatron builds ReLU for SiLU without a gate",
        expects="(cls, config)",
        versions=">=0.15",
    ),
)
