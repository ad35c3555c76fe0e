"""Which defects the installed Megatron has, and where releases keep the same thing.

A test of a repair shows the defect without it only where the repair's own range of versions says
that Megatron has it; the right result it shows with every release.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

from mindspeed.adaptor.importing import PostImportHooks
from mindspeed.adaptor.repairs.scripts import absent_triton
from mindspeed.adaptor.versions import at_least, megatron_version


def has_defect(repair: ModuleType, name: str = "") -> bool:
    """Whether the installed Megatron has the defect of a repair, by the ranges of its patches.

    Args:
        repair: the module with ``PATCHES``.
        name: end of the patched target; empty for any.
    """
    found = [patch for patch in repair.PATCHES if patch.target.endswith(name)]
    assert found, f"{repair.__name__} patches no {name}"
    return any(patch.applies_to(megatron_version()) for patch in found)


def brought_by(release: str) -> Any:
    """Mark of a test of something that came with this release of Megatron."""
    import pytest

    return pytest.mark.skipif(not at_least(release), reason=f"megatron-core {release} brought it")


def stand_in_for_triton() -> None:
    """Let megatron.core 0.18 and newer be imported where Triton is absent."""
    hooks = PostImportHooks()
    hooks.install()
    absent_triton.install(hooks)


def submodules_of(spec: Any) -> Any:
    """The submodules of a layer's spec: since 0.18 some are functions with arguments bound."""
    return spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules


def build(spec: Any, **arguments: Any) -> Any:
    """The module of such a spec."""
    from megatron.core.transformer.spec_utils import build_module

    return spec(**arguments) if isinstance(spec, partial) else build_module(spec, **arguments)


def prediction_layer(layer: Any) -> Any:
    """The transformer layer inside a layer of multi-token prediction; renamed in 0.17."""
    return getattr(layer, "mtp_model_layer", None) or layer.transformer_layer


def prediction_losses() -> Any:
    """The sums ``[predictions]`` of the losses of multi-token prediction; renamed in 0.19."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    tracker = MTPLossLoggingHelper.tracker
    return tracker.get("loss_values", tracker.get("values"))
