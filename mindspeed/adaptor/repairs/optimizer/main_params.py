"""Defect: main parameters from a checkpoint reach some of a rank's optimizers only.

Where: ``--load-main-params-from-ckpt``. ``ChainedOptimizer._split_state_dict`` of
``megatron.core.optimizer.optimizer`` gives the state dict of a single model chunk to the first of
several optimizers (dense layers, experts), and counts chunks as if each belonged to one optimizer
(Megatron-LM PR 3676). ``DistributedOptimizer._build_model_param_to_state_dict_param_map`` takes
every key that contains a parameter's name for its own (PR 3569).
Symptom: main parameters of experts are the rounded 16-bit ones; virtual stages with experts, or a
layer with more than ten experts, end in an ``AssertionError``.
Fix: each optimizer gets the state dicts of its own chunks, keys are found by their whole name, and
a checkpoint that has no more digits than the weights is reported.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mindspeed.adaptor.patch import repair
from mindspeed.errors import CheckpointError

NEEDED_WITH = ("load_main_params_from_ckpt",)
logger = logging.getLogger("mindspeed")
_PREFIXES = ("model", "model_")  # of the chunks' keys: "model0", or "model_0" in NeMo


def by_chunks(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``ChainedOptimizer._split_state_dict``."""

    def _split_state_dict(self: Any, state_dict: Mapping[str, Any] | None) -> list[Any]:
        parts = self.chained_optimizers
        if state_dict is None or len(self.model_chunks) == 1:
            return [state_dict] * len(parts)
        states = _states(state_dict, len(self.model_chunks))
        numbers = {id(chunk): number for number, chunk in enumerate(self.model_chunks)}
        return [
            {
                f"model{own}": states[numbers[id(chunk)]]
                for own, chunk in enumerate(getattr(part, "model_chunks", ()))
            }
            or None
            for part in parts
        ]

    return _split_state_dict


def by_whole_names(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``DistributedOptimizer._build_model_param_to_state_dict_param_map``."""

    def _build_model_param_to_state_dict_param_map(self: Any, state_dict: Any) -> dict[Any, Any]:
        found = {}
        states = _states(state_dict, len(self.model_chunks))
        for chunk, state in zip(self.model_chunks, states, strict=True):
            keys = {_bare(key): key for key in state}
            for name, parameter in chunk.named_parameters():
                key = keys.get(_bare(name))
                value = None if key is None else state[key]
                if value is None or value.shape != parameter.shape:
                    raise CheckpointError(
                        f"--load-main-params-from-ckpt: the checkpoint has no {_bare(name)} of "
                        f"shape {tuple(parameter.shape)}; drop the flag"
                    )
                found[parameter] = value
        if not any(map(_adds_digits, found, found.values())):
            logger.warning(
                "--load-main-params-from-ckpt has no effect: the weights of the checkpoint have "
                "the precision of the model (--ckpt-format torch_dist reads them so)"
            )
        return found

    return _build_model_param_to_state_dict_param_map


def _states(state_dict: Mapping[str, Any], chunks: int) -> list[Mapping[str, Any]]:
    for prefix in _PREFIXES:
        if f"{prefix}0" in state_dict:
            return [state_dict[f"{prefix}{number}"] for number in range(chunks)]
    if chunks > 1:
        raise CheckpointError(
            f"--load-main-params-from-ckpt: the checkpoint is not of {chunks} model chunks"
        )
    return [state_dict.get("model", state_dict)]


def _adds_digits(parameter: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a value is more precise than the parameter of this shape."""
    from megatron.core.fp8_utils import is_float8tensor

    return value.dtype != parameter.dtype or bool(is_float8tensor(parameter))


def _bare(name: str) -> str:
    """A parameter's name without those of the modules around the model."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


PATCHES = (
    repair(
        "megatron.core.optimizer.optimizer:ChainedOptimizer._split_state_dict",
        by_chunks,
        "main parameters of a checkpoint reach every optimizer of a rank",
        expects="(self, state_dict)",
        versions=">=0.15",
    ),
    repair(
        "megatron.core.optimizer.distrib_optimizer:"
        "DistributedOptimizer._build_model_param_to_state_dict_param_map",
        by_whole_names,
        "main parameters of a checkpoint are found by their whole name",
        expects="(self, state_dict)",
        versions=">=0.15",
    ),
)
