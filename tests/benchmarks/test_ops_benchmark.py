"""benchmarks/ops.py runs from end to end and writes its files."""

from __future__ import annotations

import csv
import json
import sys

import pytest
import torch

from mindspeed.ops.catalog import operators
from tests.support import benchmark

sys.path.insert(0, str(benchmark.BENCHMARKS))

from ops_peers import PEERS

OPERATORS = {one.name: one for one in operators()}


def run(*arguments):
    return benchmark.run("ops", "--device", "cpu", "--quick", "--repeats", "1", *arguments)


@pytest.mark.weekly
@pytest.mark.slow
def test_quick_run_on_the_cpu(tmp_path):
    done = run("--out", tmp_path / "figures")
    assert done.returncode == 0, done.stderr
    assert "slower than torch eager of the same formula: " in done.stdout
    with open(tmp_path / "figures.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    document = json.loads((tmp_path / "figures.json").read_text())
    assert len(document["rows"]) == len(rows)
    assert (tmp_path / "figures.png").read_bytes().startswith(b"\x89PNG")
    timed = {(row["operator"], row["dtype"]) for row in rows if row["contender"] == "mindspeed"}
    assert {("rms_norm", "fp32"), ("rms_norm_backward", "bf16")} <= timed
    for row in document["rows"]:
        assert row["milliseconds"] > 0 and row["fraction_of_clone"] > 0
        if row["contender"] == "eager":
            assert row["speed_over_eager"] == 1


@pytest.mark.slow
def test_reported_rates_follow_from_bytes_flops_and_times(tmp_path):
    done = run("--operator", "rms_norm", "matmul_add", "--dtype", "bf16", "--hidden", 32, 48,
               "--out", tmp_path / "figures")  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    assert [(r["operator"], r["hidden"], r["contender"]) for r in rows] == [
        (operator, hidden, contender)
        for operator in ("matmul_add", "rms_norm")
        for hidden in (32, 48)
        for contender in ("mindspeed", "eager")
    ]
    for row in rows:
        hidden, seconds = row["hidden"], row["milliseconds"] / 1e3
        if row["operator"] == "rms_norm":
            # x, gamma, y in bf16; one fp32 number a row
            moved = 2 * (2 * 4096 * hidden + hidden) + 4 * 4096
            assert row["teraflops"] is None
        else:
            # two bf16 matrices; the fp32 gradient is read and written
            moved = 2 * 2 * 4096 * hidden + 2 * 4 * hidden * hidden
            flops = 2 * 4096 * hidden * hidden
            assert row["teraflops"] == pytest.approx(flops / seconds / 1e12)
        assert row["gigabytes_per_second"] == pytest.approx(moved / seconds / 1e9)


@pytest.mark.slow
def test_an_operator_without_workload_is_refused():
    done = run("--operator", "mm_all_reduce")
    assert done.returncode == 2
    assert "--operator: no workload for mm_all_reduce; there are " in done.stderr


def rms_statistics(dy, x, gamma, _, offset):
    return dy, x, gamma, torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6), offset


def norm_without_dropout(x0, residual, weight, bias, rowscale, layerscale, rng, p, *rest):
    return x0, residual, weight, bias, rowscale, layerscale, None, 0.0, *rest


def norm_statistics(dout, dpre, pre, mean, rstd, weight, rng, x0, rows, columns, p, *rest):
    mean = pre.mean(-1, keepdim=True)
    rstd = torch.rsqrt(pre.var(-1, keepdim=True, unbiased=False) + 1e-5)
    return dout, dpre, pre, mean, rstd, weight, None, x0, rows, columns, 0.0, *rest


def positive_sums(prev, prev_max, prev_sum, cur, cur_max, cur_sum, *rest):
    lanes = (x[..., :1].expand_as(x).contiguous() for x in (prev_max, prev_sum, cur_max, cur_sum))
    prev_max, prev_sum, cur_max, cur_sum = lanes
    return prev, prev_max, prev_sum.exp(), cur, cur_max, cur_sum.exp(), *rest


def attended(dout, q, k, v, out, lse, *rest):
    return dout, q, k, v, *OPERATORS["attention"](q, k, v, *rest[:-1]), *rest


def probabilities(dy, x, mask, scale, causal):
    return dy, OPERATORS["scaled_masked_softmax"](x, mask, scale, causal), mask, scale, causal


CONSISTENT = {
    "scaled_masked_softmax_backward": probabilities,
    "attention_backward": attended,
    "rms_norm_backward": rms_statistics,
    "dropout_add_norm": norm_without_dropout,
    "dropout_add_norm_backward": norm_statistics,
    "ring_attention_update": positive_sums,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PEERS)
def test_a_baseline_computes_what_its_operator_computes(name):
    generator = torch.Generator().manual_seed(0)

    def numbers(x):
        is_floating = isinstance(x, torch.Tensor) and x.is_floating_point()
        return torch.randn(x.shape, generator=generator) if is_floating else x

    operator = OPERATORS[name]
    arguments = tuple(numbers(x) for x in operator.workload(256, torch.float32, "cpu"))
    arguments = CONSISTENT.get(name, lambda *same: same)(*arguments)
    ours, theirs = (
        tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in arguments) for _ in range(2)
    )
    out, expected = operator(*ours), PEERS[name].call(theirs, lambda formula: formula)()
    if written := operator.mutated():
        out, expected = ours[written[0]], theirs[written[0]]
    pairs = list(zip(*map(as_list, (out, expected)), strict=False))
    assert pairs
    for got, wanted in pairs:
        torch.testing.assert_close(got.view_as(wanted), wanted, rtol=1e-4, atol=1e-4)


def as_list(value):
    return list(value) if isinstance(value, (tuple, list)) else [value]
