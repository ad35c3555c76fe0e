"""What of fp8 is not emulated is refused from the flags, with the flag and the way out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mindspeed.errors import ConfigError
from mindspeed.features.registry import resolve

ON = {"fp8": "hybrid", "fp8_recipe": "tensorwise", "transformer_impl": "transformer_engine"}
DELAYED = ON | {"fp8_recipe": "delayed"}


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("format_", ["e4m3", "hybrid"])
def test_recipes_that_are_emulated(recipe, format_):
    found = resolve(ON | {"fp8": format_, "fp8_recipe": recipe}, "cpu")
    assert [feature.name for feature in found.enabled] == ["fp8"]


def test_off_without_its_flags():
    assert not resolve({"fp8": None, "fp4": None, "fp8_recipe": "delayed"}, "cpu").enabled


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (ON | {"fp8_param_gather": True}, "--fp8-param-gather: parameters in fp8"),
        ({"fp8_param_gather": True}, "--fp8-param-gather: parameters in fp8"),
        ({"reuse_grad_buf_for_mxfp8_param_ag": True}, "--reuse-grad-buf-for-mxfp8-param-ag: param"),
        ({"fp4": "e2m1"}, "--fp4-format: fp4 is not emulated; use --fp8-format"),
        (ON | {"fp4_param": True}, "--fp4-param-gather"),
        (ON | {"fp8_dot_product_attention": True}, "--fp8-dot-product-attention"),
        (ON | {"fp8_multi_head_attention": True}, "--fp8-multi-head-attention"),
        (ON | {"fp8_recipe": "custom"}, "custom is not emulated; use one of delayed"),
        (ON | {"transformer_impl": "local"}, "no effect with --transformer-impl local"),
        (DELAYED | {"moe_grouped_gemm": True}, "use tensorwise, blockwise or mxfp8"),
        (DELAYED | {"recompute_modules": ["mla_up_proj"]}, "mla_up_proj"),
        (ON | {"fp8_amax_history_len": 16}, "--fp8-amax-history-len: has no effect"),
        (ON | {"fp8_margin": 1}, "--fp8-margin: has no effect"),
        (ON | {"fp8_wgrad": False}, "--no-fp8-wgrad: has no effect"),
    ],
)
def test_unsupported_options_are_refused(values, text):
    with pytest.raises(ConfigError) as refusal:
        resolve(values, "cpu")
    assert text in str(refusal.value)


def test_only_the_cpu_emulates(monkeypatch):
    from mindspeed import device

    monkeypatch.setattr(device, "current", lambda: SimpleNamespace(name="npu", on_host=False))
    with pytest.raises(ConfigError, match="emulated on the CPU only, this process runs on npu"):
        resolve(ON, "npu")
