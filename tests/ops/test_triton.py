"""The Triton kernels without a GPU: numbers under the interpreter, resources of the sm_90 binary.

The interpreter cuts fp32 to bf16 instead of rounding, which costs up to one unit in the last place
where the hardware loses half of one; hence the wider bound for bf16.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mindspeed.ops.catalog import operators
from tests.ops import triton_jobs as jobs

COMPILER = "tests.ops.preload_triton"
INTERPRETER = "tests.ops.preload_triton_interpreter"
WITH_KERNEL = [
    one for one in operators() if any(x.kind == "triton" for x in one.implementations["cuda"])
]
WITH_WORKLOAD = [one.name for one in WITH_KERNEL if one.workload is not None]


@pytest.mark.weekly_cases("moe_unpermute")
@pytest.mark.slow
@pytest.mark.parametrize("operator", WITH_KERNEL, ids=lambda one: one.name)
def test_interpreted_kernels_agree_with_the_definition(operator, ranks, triton):
    """Each sample in one dtype: what is computed is independent of how it is loaded and stored."""
    assert_close(operator, ranks, triton, every_pair=False)


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.parametrize("operator", WITH_KERNEL, ids=lambda one: one.name)
def test_interpreted_kernels_agree_for_every_sample_in_every_dtype(operator, ranks, triton):
    assert_close(operator, ranks, triton, every_pair=True)


def assert_close(operator, ranks, triton, *, every_pair):
    options = {"env": triton, "setup": INTERPRETER, "timeout": 240}
    (worst,) = ranks(1, jobs.interpret, operator.name, every_pair, **options)
    assert set(worst) == set(operator.dtypes)
    for dtype, error in worst.items():
        assert error <= (2.0 if dtype == torch.bfloat16 else 1.0), dtype


@pytest.mark.weekly_cases("*-4096", "*-16384")
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "hidden",
    [1024, pytest.param(4096, marks=pytest.mark.slow), pytest.param(16384, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name", WITH_WORKLOAD)
def test_binary_for_hopper_spills_nothing_and_loads_vectors(name, hidden, ranks, triton):
    (launches,) = ranks(
        1,
        jobs.compile_for_hopper,
        name,
        hidden,
        torch.bfloat16,
        env=triton,
        setup=COMPILER,
        timeout=240,
    )
    assert launches
    for one in launches:
        assert one["local"] == 0 and one["stack"] == 0, one
        assert one["registers"] * 32 * one["warps"] <= jobs.REGISTERS_PER_BLOCK, one
        assert one["vector_loads"] > 0, one


@pytest.mark.weekly_cases("[a-l]*", "moe_permute", "r*", "s*")
@pytest.mark.slow
@pytest.mark.parametrize("operator", WITH_KERNEL, ids=lambda one: one.name)
def test_an_older_triton_compiles_every_sample(operator, ranks, old_triton):
    """3.6 cannot compile a loop whose condition alone reads what it carries."""
    (count,) = ranks(1, jobs.compile_samples, operator.name, env=old_triton, timeout=240)
    assert count


NARROW = [
    *(
        (name, hidden)
        for name in ("rms_norm", "rms_norm_backward")
        for hidden in (64, 128, 192, 256)
    ),
    ("dropout_add_norm", 256),
    ("dropout_add_norm_backward", 256),
    ("rotary_position_embedding", 128),  # one head, two, eight
    ("rotary_position_embedding_backward", 256),
    ("rotary_position_embedding", 1024),
]


@pytest.mark.weekly_cases(
    "rms_norm-128", "rms_norm-192", "rms_norm_backward-128", "rms_norm_backward-192"
)
@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(("name", "hidden"), NARROW)
def test_several_narrow_rows_share_a_program(name, hidden, ranks, triton):
    ((launch,),) = ranks(
        1,
        jobs.compile_for_hopper,
        name,
        hidden,
        torch.bfloat16,
        env=triton,
        setup=COMPILER,
        timeout=240,
    )
    # One row of a head would keep 256 bytes in flight where memory's latency needs thousands.
    shape = launch["meta"]
    assert shape.get("TOKENS", 1) * shape["ROWS"] * shape["BLOCK"] >= 2048
    assert launch["local"] == 0 and launch["stack"] == 0
    assert launch["widest_load"] == launch["widest_store"] == 16
    assert launch["resident"] * launch["warps"] >= 16  # of 64 that a multiprocessor holds


@pytest.mark.weekly
@pytest.mark.slow
def test_expected_bandwidth_of_the_documentation(ranks, triton):
    (found,) = ranks(1, jobs.expected_bandwidth, env=triton, setup=COMPILER, timeout=240)
    page = (Path(__file__).parents[2] / "docs" / "operators.md").read_text()
    assert found in page, "write the table anew: python benchmarks/triton_bandwidth.py"


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "columns"), [(30, 200), (2000, 3), (3, 5001)])
def test_backward_of_dropout_draws_the_mask_of_the_forward_again(rows, columns, ranks, triton):
    ((rate, same, repeated),) = ranks(
        1, jobs.dropout_masks, rows, columns, env=triton, setup=INTERPRETER, timeout=240
    )
    assert abs(rate - 0.7) < 4 * (0.7 * 0.3 / (rows * columns)) ** 0.5
    assert same
    assert not repeated  # neither another row's mask nor that of the numbers reserved next
