"""Defect: a dense checkpoint cannot be turned into experts.

Where: ``megatron.core.transformer.TransformerConfig`` refuses ``moe_ffn_hidden_size`` for the dense
model that ``--moe-use-upcycling`` builds, and Megatron-LM always sets it (Megatron-LM PR 3647);
``upcycle_state_dict`` of ``megatron.core.transformer.moe.upcycling_utils`` swaps its arguments
where a rank has several model chunks (PR 5442); Megatron-LM hands the dense model to its
``load_checkpoint`` under a name that this does not know.
Symptom: an AssertionError after the model of experts is built, an AttributeError, or a TypeError.
Fix: the dense model has no size of experts; chunks are converted one by one; the model to load is
the first argument.
Versions: several chunks are right since 0.20.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed.adaptor.patch import repair
from mindspeed.adaptor.signatures import bind

NEEDED_WITH = ("moe_use_upcycling",)


def forget_size_of_experts(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``TransformerConfig.__post_init__``."""

    def __post_init__(self: Any) -> None:
        if self.num_moe_experts is None:
            self.moe_ffn_hidden_size = None
        original(self)

    return __post_init__


def convert_each_chunk(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``upcycle_state_dict``, which is right for one chunk."""

    def upcycle_state_dict(moe_model: Any, dense_model: Any) -> dict[str, Any]:
        if len(moe_model) == 1:
            return original(moe_model, dense_model)  # type: ignore[no-any-return]
        return {
            f"model{number}": original([moe], [dense])["model"]
            for number, (moe, dense) in enumerate(zip(moe_model, dense_model, strict=True))
        }

    return upcycle_state_dict


def pass_model_first(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``load_and_upcycle_model``."""

    def load_and_upcycle_model(*args: Any, **kwargs: Any) -> Any:
        given = bind(original, args, kwargs)
        options = dict(given["load_kwargs"])
        if "model" in options:
            given["load_args"] = (options.pop("model"), *given["load_args"])
        return original(**(given | {"load_kwargs": options}))

    return load_and_upcycle_model


PATCHES = (
    repair(
        "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
        forget_size_of_experts,
        "the dense model of an upcycling has no size of experts",
        expects="(self)",
    ),
    repair(
        "megatron.core.transformer.moe.upcycling_utils:upcycle_state_dict",
        convert_each_chunk,
        "each model chunk is converted with its own dense chunk",
        expects="(moe_model, dense_model)",
        versions="<0.20",
    ),
    repair(
        "megatron.core.transformer.moe.upcycling_utils:load_and_upcycle_model",
        pass_model_first,
        "the dense checkpoint is loaded",
        expects=("(load_dense_ckpt_func, moe_model, dense_model, strict, load_args, load_kwargs)"),
    ),
)
