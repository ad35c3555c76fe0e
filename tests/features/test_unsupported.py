"""Combinations of Megatron's flags that cannot train are refused; those next to them are not."""

from __future__ import annotations

import pytest

from mindspeed.errors import ConfigError
from mindspeed.features.registry import resolve

OFFLOAD = {"optimizer_cpu_offload": True, "use_precision_aware_optimizer": True}

REFUSED = {
    "offload-plain-optimizer": ({"optimizer_cpu_offload": True, "bf16": True}, "-precision-aware"),
    "offload-fp32": (OFFLOAD, "--bf16 or --fp16"),
}
ACCEPTED = {
    "offload": OFFLOAD | {"bf16": True},
    "fp32": {"use_precision_aware_optimizer": True},
}


@pytest.mark.parametrize("case", REFUSED)
def test_combination_is_refused(case):
    values, text = REFUSED[case]
    with pytest.raises(ConfigError, match=text):
        resolve(values, "cpu")


@pytest.mark.parametrize("case", ACCEPTED)
def test_combination_is_accepted(case):
    resolve(ACCEPTED[case], "cpu")
