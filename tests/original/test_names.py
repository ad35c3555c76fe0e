"""The original's import paths: what works, what an import of the rest says."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

import mindspeed
from mindspeed.original import table
from tests.support.lazy import needs

needs("megatron.core")

from tests.original import framework_calls

WARM = {"setup": "tests.support.warm", "backend": None, "timeout": 180}
GLOO = {**WARM, "backend": "gloo"}


def test_all_names_of_the_table_are_there(ranks):
    (found,) = ranks(1, framework_calls.every_name, **WARM)
    assert len(found) == sum(len(row.works) for row in table().values()) > 80
    assert found["mindspeed.te.pytorch.module.linear.TERowParallelLinear"] == "type"
    assert found["mindspeed.core.context_parallel.mpu"] == "module"


def test_an_import_of_what_is_not_offered_says_what_to_use():
    with pytest.raises(ImportError, match="--use-ascend-mc2 switches it on"):
        importlib.import_module("mindspeed.core.tensor_parallel.ascend_turbo.initialize")
    with pytest.raises(ImportError, match=r"batch_index of the original .* no parts of a batch"):
        from mindspeed.utils import batch_index  # noqa: F401
    with pytest.raises(ImportError, match="the stages of --moe-fb-overlap start their messages"):
        from mindspeed.core.transformer.moe.moe_feature.fb_overlap.modules.attention import (
            launch_async_all2all,  # noqa: F401
        )
    with pytest.raises(ImportError, match=r"see docs/features/coc\.md"):
        from mindspeed.core.tensor_parallel.coc_feature.adaptor import (
            MindSpeedCoCRowParallelLinear,  # noqa: F401
        )
    with pytest.raises(ImportError, match=r"docs/migrating\.md lists what there is"):
        from mindspeed.patch_utils import nothing  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'mindspeed\.absent'"):
        importlib.import_module("mindspeed.absent")


def test_an_attribute_that_is_not_offered_is_absent():
    module = importlib.import_module("mindspeed.utils")
    assert getattr(module, "batch_index", None) is None
    with pytest.raises(AttributeError, match="no parts of a batch"):
        _ = module.batch_index
    assert "set_position_ids" in dir(module)


def test_directories_of_an_older_checkout_do_not_hide_the_names(monkeypatch, tmp_path):
    """Such as ``mindspeed/model/__pycache__``, for Python a package without names."""
    (tmp_path / "model").mkdir()
    monkeypatch.setattr(mindspeed, "__path__", [*mindspeed.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "mindspeed.model", raising=False)
    assert "GPTModel" in dir(importlib.import_module("mindspeed.model"))


def test_swift_starts_on_an_npu(ranks):
    (found,) = ranks(1, framework_calls.trainer_on_npu, **WARM)
    assert found.pop("error") < 1e-5
    assert found == {
        "same module": True,
        "same class": True,
        "helpers": [True, True],
        "not offered": None,
        "registered": None,
    }


def test_the_bridge_reads_the_defaults_of_all_flags(ranks):
    (found,) = ranks(1, framework_calls.model_defaults, **WARM)
    assert found["alone"] == {"optimization_level"}
    defaults = found["defaults"]
    assert defaults["context_parallel_algo"] == "ulysses_cp_algo" and not defaults["tp_2d"]
    assert "optimizer" not in defaults and "use_flash_attn" not in defaults  # Megatron's own
    assert found["listed"] > 60


def test_verl_takes_a_patch_of_torch_compile_back_for_a_while(ranks):
    assert ranks(1, framework_calls.torch_compile, **WARM) == [(True, True, True)]


def test_other_codes_patches(ranks):
    (found,) = ranks(1, framework_calls.patches, **WARM)
    conflict, missing, package, ours = found.pop("refused")
    assert conflict.startswith("register_patch: tests.original.library.double is already replaced")
    assert missing == (
        "register_patch: tests.original.library.Layer.backward: module tests.original.library has "
        "no Layer.backward"
    )
    assert "there is no package no_such_package.function" in package
    assert "is already replaced by 'repair:" in ours
    assert found == {
        "before": (4, 4),
        "after": (7, 7),
        "method": -5,
        "class": True,
        "forced": 3,
        "removed": (4, 4, True, 5),
        "left": {},
    }


def test_a_feature_of_other_code_is_applied(ranks):
    (found,) = ranks(1, framework_calls.added_feature, **WARM)
    assert found == {
        "args": (True, "fast", 1),
        "messages": [
            "--fast-double cannot be combined with --slow-double; remove one",
            "--fast-double needs --bf16; add it",
        ],
        "results": [102, 2, 2],
    }


def test_twinkle_gives_all_values_to_repatch(ranks):
    (found,) = ranks(1, framework_calls.runtime_values, **WARM)
    assert "context-parallel" in found.pop("on")
    assert found == {"in force": ("megatron_cp_algo", 1), "defaults": "ulysses_cp_algo"}


def test_groups_of_context_parallelism_and_heads_of_a_whole_sequence(ranks):
    """Against the whole sequence; the gradient of a permutation is its inverse."""
    whole = torch.arange(16 * 12.0).reshape(16, 1, 12)
    for rank, found in enumerate(ranks(4, framework_calls.groups_and_heads, **GLOO)):
        first, column = rank - rank % 2, [rank % 2, rank % 2 + 2]
        assert found.pop("ulysses") == (rank % 2, [first, first + 1], 2)
        assert found.pop("ring") == (rank // 2, column, 2)
        assert found.pop("window") == (column, 2)
        features, right = found.pop("whole")
        assert right and torch.equal(features, whole[..., 3 * rank : 3 * rank + 3])
        features, right = found.pop("sections")
        own = [rank, *range(4 + 2 * rank, 6 + 2 * rank)]
        assert right and torch.equal(features, whole[..., own])
        assert not found


def test_ranks_of_a_double_ring(ranks):
    for rank, (inner, outer, hybrid) in enumerate(ranks(4, framework_calls.double_ring, **GLOO)):
        first = rank - rank % 2
        assert (inner, outer, hybrid) == ([first, first + 1], [rank % 2, rank % 2 + 2], None)


def test_version_tests_of_frameworks_choose_what_fits(npu_ranks, tmp_path):
    """On an emulated NPU, by the expressions of their released code."""
    (found,) = npu_ranks(1, framework_calls.version_tests, str(tmp_path), backend=None)
    assert found == {
        "mcore-bridge sees an NPU": True,
        "mcore-bridge uses plain layers": False,
        "twinkle requires": True,
        "one version": True,
        "ms-swift loads optimizers itself": False,
        "ms-swift keeps Megatron's layer": True,
        "repatch": ["args"],
    }


def test_a_module_that_swift_puts_in_place_of_the_originals_stays(ranks):
    assert ranks(1, framework_calls.missing_delta_rule, **WARM) == [True]
