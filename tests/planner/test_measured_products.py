"""The fastest way of each product of a job, by an injected clock, and who may use it."""

from __future__ import annotations

import json

import pytest

from mindspeed.errors import ConfigError
from mindspeed.features.tensor_parallel.coc import Coc
from mindspeed.planner.measured_products import (
    Measured,
    fastest,
    flags_of,
    settings_of,
    write,
)
from mindspeed.tensor_parallel.strategy import MeasuredOn, Overlap, Product, choose
from tests.planner import measured_products_job
from tests.support.lazy import needs

needs("megatron.core")
SETUP = "tests.support.warm"
GATHER = Product("gather_matmul", 128, 64, 96, 2)
SCATTER = Product("matmul_scatter", 128, 96, 64, 2)


def test_fewer_parts_are_taken_where_more_gain_little():
    assert fastest({1: 1.0, 2: 0.70, 4: 0.69, 8: 0.80}) == 2
    assert fastest({1: 1.0, 2: 0.99, 4: 1.2}) == 1
    assert fastest({1: 1.0, 2: 0.7, "fused": 0.6}) == "fused"
    assert fastest({1: 1.0, 2: 0.7, "fused": 0.71}) == 2


def test_a_shape_of_two_products_has_the_parts_of_their_sum(tmp_path):
    other = Product("matmul_scatter", *GATHER.shape, 2)
    found = [Measured(GATHER, {1: 4.0, 2: 1.0, 4: 3.0}), Measured(other, {1: 4.0, 2: 6.0, 4: 1.0})]
    found.append(Measured(SCATTER, {1: 2.0, 2: 1.5, "fused": 1.0}))
    settings = settings_of(found, MeasuredOn("here", "bf16", 2))
    assert settings["customized_coc"] == {"[128, 64, 96]": 4}
    flags = flags_of(settings, found, tmp_path / "coc.json")
    assert flags.split()[:3] == ["--use-ascend-coc", "--coc-parallel-num", "4"]
    assert flags.endswith("--coc-fused-kernel")
    whole = [Measured(GATHER, {1: 1.0, 2: 2.0})]
    assert flags_of(settings_of(whole, MeasuredOn("here", "bf16", 2)), whole, tmp_path) == ""


def test_the_command_measures_a_job_and_the_feature_reads_the_file(ranks, tmp_path):
    out = tmp_path / "coc.json"
    ranks(2, measured_products_job.run, str(out), setup=SETUP, backend=None, timeout=120)
    data = json.loads(out.read_text())
    # 64 wide, 8 heads of 8, 4 groups; 176 wide MLP with a gate: the shapes of two ranks.
    shapes = [[128, 64, 64], [128, 64, 176], [128, 32, 64], [128, 64, 32], [128, 88, 64]]
    names = [json.loads(key) for key in data["customized_coc"]]
    assert sorted(names) == sorted([*shapes, [128, 64, 88]])
    # The clock says 4 parts; on one rank 2 parts take longest, and the largest time counts.
    assert set(data["customized_coc"].values()) == {4}
    assert {tuple(times) for times in data["measured"]["seconds"].values()} == {
        ("1", "2", "4", "8")
    }
    assert all(times["2"] == 9 for times in data["measured"]["seconds"].values())

    settings = Coc(use_ascend_coc=True, coc_parallel_num=8, coc_cfgs=str(out)).settings()
    overlap = Overlap(parts=8, parts_of=settings.customized_coc)
    assert choose(overlap, Product("gather_matmul", 128, 64, 176, 2), None).parts == 4


def problems_of(path, **megatron):
    job = {"tensor_model_parallel_size": 2, "sequence_parallel": True, **megatron}
    feature = Coc(use_ascend_coc=True, coc_parallel_num=2, coc_cfgs=str(path))
    return [str(problem) for problem in feature.problems(job)]


def test_a_calibration_of_another_dtype_or_number_of_ranks_is_refused(tmp_path):
    path = tmp_path / "coc.json"
    found = [Measured(GATHER, {1: 2.0, 2: 1.0})]
    write(path, settings_of(found, MeasuredOn("an accelerator", "bf16", 2)))
    assert problems_of(path, bf16=True) == []
    (dtype,) = problems_of(path)
    assert "measured in bf16, the job is fp32; measure this job with mindspeed calibrate" in dtype
    (ranks,) = problems_of(path, bf16=True, tensor_model_parallel_size=4)
    assert "measured on 2 tensor-parallel ranks, the job has 4" in ranks
    path.write_text(json.dumps({"measured": {"device": 3}}))
    assert any("has no device, dtype and ranks" in one for one in problems_of(path, bf16=True))


def test_a_calibration_of_another_device_is_reported(tmp_path, capsys):
    from mindspeed.features.tensor_parallel.coc import _report_device

    path = tmp_path / "coc.json"
    write(path, settings_of([Measured(GATHER, {1: 2.0})], MeasuredOn("H9000", "bf16", 2)))
    _report_device(Coc(use_ascend_coc=True, coc_cfgs=str(path)).settings())
    assert "measured on H9000, this is" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give --out FILE for a cluster, --coc FILE"),
        (["--coc", "x.json"], "give its flags behind --"),
        (["--coc", "x.txt"], "--coc x.txt: the file must end in .json"),
    ],
)
def test_what_cannot_be_measured_is_refused(words, message):
    from mindspeed.cli import main

    with pytest.raises(ConfigError, match=message):
        main.dispatch("calibrate", words)
