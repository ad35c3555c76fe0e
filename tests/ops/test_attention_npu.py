"""Attention through torch_npu on the emulated NPU: the CPU's values, and no mask of all pairs."""

from __future__ import annotations

import pytest
import torch

from tests.ops import attention_npu_jobs as jobs

TRIANGLE, PREFIX = (2048, 2048), (3072, 2048)
PADDING = torch.arange(7) > torch.tensor([4, 6]).view(2, 1, 1, 1)
BIAS = torch.arange(7.0).expand(1, 1, 5, 7)
SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.3])

CASES = {
    # options, queries, keys, then: version of the operator, sparse mode, shape of the mask
    "full": ({}, 5, 7, "", 0, None),
    "top-left": ({"mode": 2}, 5, 7, "", 2, TRIANGLE),
    "causal": ({"mode": 3}, 5, 7, "", 3, TRIANGLE),
    "rule-top-left": ({"mode": 0, "next": 0}, 5, 7, "", 2, TRIANGLE),
    "rule-causal": ({"mode": 0, "next": 2}, 5, 7, "", 3, TRIANGLE),
    "rule-window": ({"mode": 0, "pre": 2, "next": 1}, 5, 7, "", 4, TRIANGLE),
    "prefix": ({"mode": 5, "prefix": [2, 6]}, 5, 7, "", 6, PREFIX),
    "padding": ({"mask": PADDING}, 5, 7, "", 1, (2, 1, 5, 7)),
    "masked-band": ({"mode": 0, "next": 1, "mask": torch.eye(5, 7).bool()}, 5, 7, "", 1, (5, 7)),
    "bias": ({"mode": 3, "pse": BIAS}, 5, 7, "", 3, TRIANGLE),
    "bias-after": ({"pse": BIAS, "pse_type": 0}, 5, 7, "_v2", 0, None),
    "alibi": ({"mode": 2, "pse": SLOPES, "pse_type": 2, "q_start": 3}, 6, 6, "_v2", 2, TRIANGLE),
    "alibi-sqrt": ({"mode": 2, "pse": SLOPES, "pse_type": 3}, 6, 6, "_v2", 2, TRIANGLE),
    "sink": ({"mode": 3, "sink": torch.randn(4)}, 5, 7, "", 3, TRIANGLE),
}  # fmt: skip


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", CASES)
def test_values_are_the_cpus(npu, name):
    options, queries, keys, *_ = CASES[name]
    ours, expected = npu(jobs.npu_and_cpu, options, queries, keys)
    for got, wanted in zip(ours, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", CASES)
def test_mask_rules_become_sparse_modes_with_the_compressed_mask(npu, name):
    options, queries, keys, version, mode, mask = CASES[name]
    names = f"npu_fusion_attention{version}", f"npu_fusion_attention_grad{version}"
    assert npu(jobs.calls, options, queries, keys) == [(one, mode, mask) for one in names]


RECTANGLES = {
    "whole-wide": ({}, 4, 10, [0] * 4),
    "whole-high": ({}, 9, 6, [0] * 3),
    "causal": ({"mode": 3, "q_start": 3}, 5, 7, [0, 0, 0, 0, 2]),
    "causal-blind-rows": ({"mode": 3}, 7, 5, [2]),
    "top-left": ({"mode": 2, "k_start": 2}, 9, 6, [2, 0, 0]),
    "window": ({"mode": 4, "pre": 2, "next": 0}, 5, 7, []),  # by the formula
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECTANGLES)
def test_alibi_of_rectangles_is_split_into_squares(npu, name):
    options, queries, keys, modes = RECTANGLES[name]
    options = {**options, "pse": SLOPES, "pse_type": 2}
    ours, expected = npu(jobs.npu_and_cpu, options, queries, keys)
    for got, wanted in zip(ours, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    found = [(one, mode) for one, mode, _ in npu(jobs.calls, options, queries, keys)]
    names = ("npu_fusion_attention_v2", "npu_fusion_attention_grad_v2")
    assert found == [(one, mode) for one in names for mode in modes]


BLIND = {
    # the first queries of a tall causal mask, a band beside the keys, rows of a mask, a prefix
    "causal": {"mode": 3},
    "band-before": {"mode": 4, "pre": 9, "next": -2},
    "band-behind": {"mode": 0, "pre": -3, "next": 9},
    "mask": {
        "mask": torch.tensor([False, True, False, False, True, True, False]).view(7, 1).expand(7, 5)
    },
    "mask-of-samples": {
        "mask": torch.arange(7).view(1, 1, 7, 1) < torch.tensor([0, 3]).view(2, 1, 1, 1)
    },
    "prefix": {"mode": 5, "prefix": [0, 2]},
    "sink": {"mode": 3, "sink": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "bias": {"mode": 3, "pse": torch.arange(5.0).expand(1, 1, 7, 5)},
    "everything": {"mode": 4, "pre": 9, "next": -9},
}


@pytest.mark.parametrize("name", BLIND)
def test_fully_masked_rows_do_not_depend_on_device_output(npu, name):
    """The emulated operators return NaN for them, as output, statistics and gradient."""
    options = BLIND[name]
    if "mask" in options:  # the batch of attention_npu_jobs is 2
        shape = options["mask"].shape[-2]
        options = {"mask": options["mask"].expand(*options["mask"].shape[:-2], shape, 5)}
    ours, expected = npu(jobs.npu_and_exact, options, 7, 5)
    for got, wanted in zip(ours, expected, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)


def test_fully_masked_rows_of_packed_sequences(npu):
    options = {
        "mode": 3, "layout": "TND",
        "cu_q": torch.tensor([0, 4, 9]), "cu_k": torch.tensor([0, 2, 7]),
    }  # fmt: skip
    ours, expected = npu(jobs.npu_and_exact, options, 9, 7)
    for got, wanted in zip(ours, expected, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)


def test_masks_without_sparse_mode_use_the_formula(npu):
    packed = {"layout": "TND", "mode": 0, "pre": 3, "next": 0}
    lengths = {"cu_q": torch.tensor([0, 2, 5]), "cu_k": torch.tensor([0, 4, 7])}
    assert npu(jobs.calls, packed, 5, 7, lengths) == []


def test_dropout_draws_from_the_devices_generator_and_the_backward_draws_the_same(npu):
    got = npu(jobs.dropout)
    kept = got["kept"]
    assert set(kept.flatten().tolist()) == {0.0, 2.0}
    assert not torch.equal(kept, got["other"])
    assert got["moved"] >= kept.numel()
    rows = torch.arange(1.0, 7.0).view(6, 1, 1, 1)
    expected = (kept * rows / 8).sum(0)  # [b, n, keys]: only the first component has a gradient
    expected = expected.unflatten(1, (2, 2)).sum(2).permute(2, 0, 1)
    torch.testing.assert_close(got["dv"][..., 0], expected)
