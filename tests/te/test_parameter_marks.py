"""Whatever the layout, the gradient norm counts of each parameter what one rank counts."""

from __future__ import annotations

import pytest

from tests.te import marks_ranks
from tests.te.marks_ranks import Layout

SETUP = "tests.support.warm"
TP = {"tp": 2, "etp": 2}
SP = {**TP, "sp": True}
MODELS = [
    Layout("dense", impl, lora=lora, bias=bias)
    for impl in ("te", "local")
    for lora, bias in ((False, True), (True, False))
]
MODELS += [Layout("dense", impl, drawn=False) for impl in ("te", "local")]
MODELS += [Layout("mla", impl, lora=lora) for impl in ("te", "local") for lora in (False, True)]
EXPERTS = [
    Layout("moe", impl, grouped=grouped, lora=lora)
    for impl, grouped in (("te", True), ("te", False), ("local", False))
    for lora in (False, True)
]
EXPERT_LAYOUTS = (
    {"tp": 2, "sp": True, "ep": 2},
    {"tp": 2, "sp": True},
    SP,
    {"ep": 2},
    {"etp": 2},
)
BIASES = [Layout("moe", "te", grouped=grouped, bias=True) for grouped in (False, True)]
LAYOUTS = [model._replace(**sizes) for model in MODELS for sizes in (TP, SP)]
LAYOUTS += [model._replace(**sizes) for model in EXPERTS for sizes in EXPERT_LAYOUTS]
LAYOUTS += [model._replace(**sizes) for model in BIASES for sizes in EXPERT_LAYOUTS[:2]]


@pytest.mark.slow
def test_the_norm_counts_each_parameter_once(ranks):
    models = list({layout.model for layout in LAYOUTS})
    (truth,) = ranks(1, marks_ranks.counted, models, {}, setup=SETUP, timeout=300)
    shapes = {model: found["shapes"] for model, found in truth.items()}
    wrong = []
    for found in ranks(2, marks_ranks.counted, LAYOUTS, shapes, setup=SETUP, timeout=300):
        for layout, parameters in found.items():
            expected = truth[layout.model]["squares"]
            assert expected.keys() == parameters["squares"].keys()
            assert parameters["norm"] == pytest.approx(truth[layout.model]["norm"], rel=1e-5), (
                layout
            )
            assert any("lora" in name for name in expected) is layout.lora
            for name, square in parameters["squares"].items():
                if square != pytest.approx(expected[name], rel=1e-3, abs=1e-11):
                    wrong.append(f"{layout} {name}: {square} counted, {expected[name]} right")
    assert not wrong, "\n".join(wrong)


def test_layerwise_muon_counts_biases_of_experts_once(ranks):
    (truth,) = ranks(1, marks_ranks.counted, BIASES, {}, setup=SETUP, timeout=120)
    shapes = {model: found["shapes"] for model, found in truth.items()}
    layouts = [model._replace(**EXPERT_LAYOUTS[0]) for model in BIASES]
    for found in ranks(2, marks_ranks.counted, layouts, shapes, True, setup=SETUP, timeout=120):
        for layout, norm in found.items():
            squares = sum(truth[layout.model]["squares"].values())
            assert norm == pytest.approx(squares**0.5, rel=1e-5), layout
