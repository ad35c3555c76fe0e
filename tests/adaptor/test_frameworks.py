"""Features run inside frameworks that bound Megatron's functions before they called repatch."""

from __future__ import annotations

import pytest

from tests.adaptor import framework_ranks

WARM = "tests.support.warm"


@pytest.mark.parametrize("on", [True, False])
def test_schedule_and_optimizer_run_although_their_functions_were_bound_before(ranks, tmp_path, on):
    options = {"reuse_fp32_param": True, "pipeline_schedule": "zb-h1"} if on else {}
    for result in ranks(
        2, framework_ranks.train, str(tmp_path), options, 2, 2, setup=WARM, timeout=300
    ):
        assert (result["schedule"] == "ScheduledPipeline") is on
        assert result["optimizer"] is on
        places = result["reached"]
        assert set(places) == ({"pipeline-schedule", "reuse-fp32-param"} if on else set())
        for name in places:
            assert all(places[name].values()), places
        assert not [text for text in result["log"] if "no effect" in text]


def test_a_feature_that_never_ran_is_a_warning_with_the_reason(ranks, tmp_path):
    """The model has GELU, the feature a SwiGLU."""
    (result,) = ranks(
        1, framework_ranks.train, str(tmp_path), {"use_fused_swiglu": True, "swiglu": True}, 1, 2,
        setup=WARM, timeout=300,
    )  # fmt: skip
    (text,) = [text for text in result["log"] if "no effect" in text]
    assert text.startswith("rank 0: --use-fused-swiglu has had no effect in the first step (")
    assert "kernels.swiglu: no layer of this model computes it" in text
    (result,) = ranks(
        1, framework_ranks.train, str(tmp_path), {"use_fused_swiglu": True, "swiglu": True}, 1, 1,
        setup=WARM, timeout=300,
    )  # fmt: skip
    assert not result["log"]  # the first step is not over


def test_positions_may_be_set_before_a_micro_batch_is_sharded(ranks):
    (result,) = ranks(1, framework_ranks.set_positions, setup=WARM, backend=None)
    assert result["kept"] and result["ends"] == [3, 4, 8] and result["left"] is None
    first, *others = result["refused"]
    assert "needs set_actual_seq_len first" in first
    assert len(others) == 3
    assert all("restart at the documents of set_actual_seq_len" in text for text in others)


def test_a_name_that_is_almost_one_of_ours_is_refused(ranks):
    names = ["reuse_fp32_params", "schedule_method", "reuse-fp32-param"]
    (texts,) = ranks(1, framework_ranks.refused_names, names, setup=WARM, backend=None)
    for name, text in zip(names, texts, strict=True):
        assert text.startswith(f"unknown option '{name}'; ")


def test_repairs_are_on_unless_arguments_say_that_they_are_not_needed(ranks):
    told = ranks(1, framework_ranks.repaired_by_what_is_told, setup="mindspeed.megatron_adaptor")
    assert told == [[True, True, False, True, True]]
