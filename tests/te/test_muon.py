"""Muon: the orthogonal factor against SVD, steps against torch's Muon, shards against the whole."""

from __future__ import annotations

import pytest
import torch

from mindspeed.te.muon import (
    OrthogonalizedOptimizer,
    get_muon_scale_factor,
    newton_schulz,
)
from tests.te.muon_ranks import errors


@pytest.fixture(autouse=True)
def precision():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("shape", [(32, 32), (48, 20), (20, 48), (1, 7)])
def test_the_result_is_near_the_orthogonal_factor(shape):
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("highest")
    x = 1e-3 * torch.randn(shape)
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    in_its_basis = u.mT @ newton_schulz(x, 5) @ vh.mT  # diagonal, with entries near one
    diagonal = in_its_basis.diagonal()
    assert diagonal.min() > 0.6 and diagonal.max() < 1.3
    assert (in_its_basis - diagonal.diag()).abs().max() < 1e-4


def test_a_zero_matrix_stays_zero():
    assert not newton_schulz(torch.zeros(3, 5), 5).any()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim has no Muon before 2.9")
@pytest.mark.parametrize("nesterov", [False, True])
def test_steps_equal_torch_muon(nesterov):
    def fresh():
        torch.manual_seed(4)
        return [torch.nn.Parameter(torch.randn(24, 16)), torch.nn.Parameter(torch.randn(8, 16))]

    def scaled(x):
        factor = get_muon_scale_factor(*x.shape, mode="shape_scaling")
        return factor * newton_schulz(x, 5, "simple")

    ours, theirs = fresh(), fresh()
    muon = OrthogonalizedOptimizer(
        ours, 0.02, 0.9, 0.1, use_nesterov=nesterov, weight_decay_method="decoupled",
        fp32_matmul_prec="medium", scaled_orthogonalize_fn=scaled,
    )  # fmt: skip
    reference = torch.optim.Muon(
        theirs, lr=0.02, momentum=0.9, weight_decay=0.1, nesterov=nesterov, ns_steps=5
    )
    for step in range(5):
        torch.manual_seed(step)
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        muon.step()
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        # Both iterate in bf16 and round the norm in different places.
        torch.testing.assert_close(a, b, rtol=0, atol=0.02 * 0.05)


def test_l2_adds_to_the_gradient():
    weights = [torch.nn.Parameter(torch.ones(2, 3)) for _ in range(2)]
    for w, decay, grad in zip(weights, (0.5, 0.0), (0.25, 0.75), strict=True):
        muon = OrthogonalizedOptimizer(
            [w], 0.1, 0.9, decay, use_nesterov=False, weight_decay_method="l2",
            fp32_matmul_prec="highest", scaled_orthogonalize_fn=torch.clone,
        )  # fmt: skip
        w.grad = torch.full_like(w, grad)
        muon.step()
    assert weights[0].equal(weights[1])


def test_vectors_are_refused():
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    muon = OrthogonalizedOptimizer(
        [p], 0.1, 0.9, 0.0, use_nesterov=False, weight_decay_method="decoupled",
        fp32_matmul_prec="medium", scaled_orthogonalize_fn=torch.clone,
    )  # fmt: skip
    with pytest.raises(ValueError, match="Muon takes matrices"):
        muon.step()


@pytest.mark.parametrize(("mode", "tolerance"), [("duplicated", 0.0), ("distributed", 1e-5)])
def test_shards_of_two_ranks_equal_the_full_matrix(ranks, mode, tolerance):
    for dim in (0, 1):
        assert max(ranks(2, errors, dim, mode)) <= tolerance
