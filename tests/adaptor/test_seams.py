"""Seams around a model's construction, and which seams a feature may use."""

from __future__ import annotations

import importlib
import inspect
import re
import sys

import pytest
from packaging.version import Version

from mindspeed.adaptor import fused_functions
from mindspeed.adaptor.inventory import all_patches
from mindspeed.adaptor.seams import SEAM_NAMES
from mindspeed.adaptor.versions import TESTED
from mindspeed.features.registry import all_features
from mindspeed.te import attention_policy, kernels
from tests.adaptor import seam_ranks
from tests.support.seams import fresh_seams

MAX_TARGETS = 30  # without repairs and later names, which go when upstream has them


@pytest.mark.slow
def test_arguments_spec_and_chunk_are_called_in_this_order_by_one_patch(ranks):
    (found,) = ranks(1, seam_ranks.around_construction, setup="tests.support.warm", timeout=240)
    assert found["calls"] == [
        ("model_arguments", True),
        ("layer_spec", seam_ranks.FFN),
        ("chunk", (2, 1, None)),
    ]
    assert found["patches"] == 1
    assert found["shared"] == [True, False]
    assert found["widths"] == [[seam_ranks.FFN] * 3, [64] * 3]
    assert found["marked"] == 3, "both decoder layers and that of multi-token prediction"
    assert not found["left"], "the patch goes with the last function"


@pytest.fixture
def seams():
    with fresh_seams() as seams:
        yield seams


@pytest.mark.parametrize("loaded", [False, True], ids=["before Megatron", "after Megatron"])
def test_a_feature_gets_only_the_seams_that_it_declares(seams, loaded):
    if loaded:
        importlib.import_module("megatron.core.fusions.fused_bias_swiglu")
    view = seams.declared_by("mine", ("step", "kernels"))
    view.step.add(lambda iteration: None, owner="mine")
    view.use_kernels(owner="mine", swiglu=lambda x, bias=None: x)
    assert view.journal is seams.journal
    for undeclared in ("schedule", "train"):
        with pytest.raises(AttributeError, match=rf"feature 'mine' uses the seam '{undeclared}'"):
            getattr(view, undeclared)
    with pytest.raises(AttributeError, match="uses the seam 'train'"):
        view.while_training(owner="mine", profile=False)
    with pytest.raises(AttributeError, match="uses the seam 'no_such_seam'"):
        _ = view.no_such_seam


def test_attention_kernels_and_policy_are_replaced_through_one_seam(seams):
    before = kernels.normalize, attention_policy.alibi_slopes
    mine = {"normalize": lambda *args, **options: None, "alibi_slopes": lambda *args: None}
    seams.use_kernels(owner="mine", **mine)
    now = kernels.normalize, attention_policy.alibi_slopes
    assert [function.__wrapped__ for function in now] == list(mine.values())
    for name in ("no_such_kernel", "torch"):
        with pytest.raises(AttributeError, match=rf"'{name}'.*te.kernels.*te.attention_policy"):
            seams.use_kernels(owner="mine", **{name: print})
    seams.clear()
    assert (kernels.normalize, attention_policy.alibi_slopes) == before


def _shared_code(module):
    """Source of the shared functions that a feature hands its seams to, and of those they call."""
    text, seen = inspect.getsource(module), {}
    own = {feature.__module__ for feature in all_features()}
    names = {name for name in sys.modules if name.startswith("mindspeed.features.")} - own
    helpers = [sys.modules[name] for name in names]
    while True:
        called = {
            (helper, name): inspect.getsource(f)
            for helper in helpers
            for name, f in vars(helper).items()
            if inspect.isfunction(f) and re.search(rf"\b{name}\(\s*seams\b", text)
        }
        if called.keys() <= seen.keys():
            return "".join(seen.values())
        seen |= called
        text += "".join(called.values())


@pytest.mark.slow
def test_every_feature_uses_what_it_declares_and_declares_what_exists():
    methods = {"use_kernels": "kernels", "while_training": "train"}
    for feature in all_features():
        module = importlib.import_module(feature.__module__)
        text = inspect.getsource(module) + _shared_code(module)
        used = {methods.get(n, n) for n in re.findall(r"\bseams\.(\w+)", text)}
        used -= {"journal", "Seams"}
        used = {name for name in used if name in (*SEAM_NAMES, "kernels")}
        assert set(feature.seams) == used, feature.name


def test_the_inventory_lists_every_patch_and_stays_in_its_budget():
    listed = all_patches()
    targets = {patch.target for patch in listed}
    for patches in fused_functions.PATCHES.values():
        assert {patch.target for patch in patches} <= targets
    own = [patch for patch in listed if not patch.owner.startswith(("repair:", "versions"))]
    for release in map(Version, TESTED):
        assert len({patch.target for patch in own if patch.applies_to(release)}) <= MAX_TARGETS
    assert len(set(listed)) == len(listed), "no patch twice"
