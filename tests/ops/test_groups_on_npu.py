"""Operators with a process group on emulated NPUs: fused kernels, and what falls back to chunks."""

from __future__ import annotations

import pytest
import torch

from tests.ops import coc_ranks, expert_exchange_ranks, group_ranks

M, K, N = 8, 512, 6  # 256 columns a rank, the least that fused kernels take


def whole(*shape, seed, dtype=torch.bfloat16):
    """-1, 0 and 1: sums of hundreds of products are exact in bf16."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, shape, generator=generator).to(dtype)


def test_fused_kernels_are_chosen_where_torch_npu_has_them(npu_ranks):
    for kinds, name_of_hccl_resolves in npu_ranks(2, coc_ranks.kinds_on_npu):
        assert kinds == {
            "all_to_all_all_gather_bmm": "reference",
            "bmm_reduce_scatter_all_to_all": "reference",
            "coc_all_gather_matmul": "torch_npu",
            "coc_all_gather_matmul_v2": "torch_npu",
            "coc_matmul_all_reduce": "torch_npu",
            "coc_matmul_reduce_scatter": "torch_npu",
            "grouped_mat_mul_all_reduce": "torch_npu",
            "mm_all_reduce": "torch_npu",
        }
        assert name_of_hccl_resolves


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["fused", "chunks"])
@pytest.mark.parametrize("transposed", [False, True])
def test_coc_ops(npu_ranks, dtype, transposed):
    a, b, bias = whole(M, K, seed=0), whole(K, N, seed=1), whole(1, N, seed=2)
    a, b, bias = (x.to(dtype) for x in (a, b, bias))
    product = a.float() @ b.float() + bias.float()
    left, rows, right = a.chunk(2, 1), a.chunk(2), b.chunk(2)
    if transposed:
        b, right = b.t().contiguous(), [x.t().contiguous() for x in right]
    scattering = [
        {"input1": left[r].contiguous(), "input2": right[r], "bias": bias} for r in range(2)
    ]
    gathering = [{"input1": rows[r], "input2": b, "bias": bias} for r in range(2)]
    cases = {
        "matmul_all_reduce": (scattering, {"output": product}, "all_reduce", M * N),
        "matmul_reduce_scatter": (scattering, {"output": product}, "reduce_scatter", M * N),
        "all_gather_matmul": (gathering, {"output": product}, "all_gather", M * K // 2),
        "all_gather_matmul_v2": (
            gathering, {"output": product, "comm_output": a.float()}, "all_gather", M * K // 2,
        ),
    }  # fmt: skip
    fused = dtype == torch.bfloat16
    for method, (arguments, expected, op, elements) in cases.items():
        scatter = method == "matmul_reduce_scatter"
        shapes = {
            name: (x.size(0) // 2 if scatter else x.size(0), x.size(1))
            for name, x in expected.items()
        }
        results = npu_ranks(2, coc_ranks.run_coc, method, arguments, shapes, 2, "npu")
        for rank, (outputs, sent) in enumerate(results):
            for name, value in expected.items():
                wanted = value.chunk(2)[rank] if scatter else value
                assert torch.equal(outputs[name].float(), wanted), (method, name)
            # A fused kernel is one collective, whatever the number of chunks.
            calls = [(op, elements * 2)] if fused else [(op, elements * 4 // 2)] * 2
            assert sent == calls


@pytest.mark.parametrize("in_place", [False, True])
def test_mm_all_reduce_add_rms_norm(npu_ranks, in_place):
    x1, x2 = whole(M, K, seed=0), whole(K, N, seed=1)
    residual, gamma = whole(M, N, seed=2), whole(N, seed=3)
    arguments = [
        {"x1": a.contiguous(), "x2": b, "residual": residual.clone(), "gamma": gamma}
        for a, b in zip(x1.chunk(2, 1), x2.chunk(2), strict=True)
    ]
    y64 = x1.double() @ x2.double() + residual.double()
    norm64 = y64 * torch.rsqrt(y64.square().mean(-1, keepdim=True) + 1e-6) * gamma.double()
    job = group_ranks.mm_all_reduce_add_rms_norm
    for y, norm, same, kept, calls in npu_ranks(2, job, in_place, arguments, True, "npu"):
        assert torch.equal(y.double(), y64)
        assert (norm - norm64).abs().max() <= 2**-7 * norm64.abs().max()
        assert same == in_place and kept != in_place
        assert calls == [("all_reduce", M * N * 2)]


@pytest.mark.parametrize("form", ["int8", "int8 fp32 scale", "weight", "weight by group"])
def test_quantised_forms_equal_the_cpu(npu_ranks, ranks, form):
    x1, x2 = whole(M, K, seed=0, dtype=torch.float16), whole(K, N, seed=1, dtype=torch.int8)
    residual = whole(M, N, seed=2, dtype=torch.float16)
    given = {"residual": residual, "gamma": whole(N, seed=3, dtype=torch.float16)}
    if form.startswith("int8"):
        x1, scale = x1.to(torch.int8), torch.full((N,), 0.5)
        if form == "int8":
            scale, given["residual"] = scale.bfloat16(), residual.bfloat16()
            given["gamma"] = given["gamma"].bfloat16()
        given |= {"dequant_scale": scale, "bias": torch.arange(N, dtype=torch.int32)}
    else:
        by_group = form == "weight by group"
        shape = (K // 2 // 64, N) if by_group else (1,)
        scale = whole(*shape, seed=4, dtype=torch.float16) + 2
        given |= {"antiquant_scale": scale, "antiquant_offset": scale / 2}
        given["antiquant_group_size"] = 64 if by_group else 0
    arguments = [
        {"x1": a.contiguous(), "x2": b, **given}
        for a, b in zip(x1.chunk(2, 1), x2.chunk(2), strict=True)
    ]
    job = group_ranks.mm_all_reduce_add_rms_norm
    on_npu = npu_ranks(2, job, False, arguments, True, "npu")
    for got, wanted in zip(on_npu, ranks(2, job, False, arguments), strict=True):
        assert torch.equal(got[0], wanted[0])  # the numbers are exact in fp16
        torch.testing.assert_close(got[1], wanted[1])


def test_grouped_mat_mul_all_reduce(npu_ranks):
    x = [whole(m, K, seed=m) for m in (3, 2)]
    w = [whole(K, n, seed=n) for n in (5, 4)]
    bias = [whole(n, seed=n) for n in (5, 4)]
    arguments = [
        {
            "x": [a.chunk(2, 1)[rank].contiguous() for a in x],
            "weight": [b.chunk(2)[rank] for b in w],
            "bias": bias,
        }
        for rank in range(2)
    ]
    for results, sent in npu_ranks(2, coc_ranks.grouped, arguments, "npu"):
        for got, a, b, c in zip(results, x, w, bias, strict=True):
            assert torch.equal(got.float(), a.float() @ b.float() + 2 * c.float())
        assert sent == [("all_reduce", (3 * 5 + 2 * 4) * 2)]


@pytest.mark.slow
@pytest.mark.parametrize("which", ["first", "second"])
def test_exchanges_of_experts_equal_the_cpu(npu_ranks, ranks, which):
    shapes = {"first": ((4, 2, 3), (2, 6, 5), (2, 5)), "second": ((2, 4, 5), (2, 5, 6), (2, 3))}
    x, w, b = (whole(*s, seed=i, dtype=torch.float32) for i, s in enumerate(shapes[which]))
    arguments = [{"x": x + r, "weight": w - r, "bias": b * r} for r in range(4)]
    out = (2, 4, 5) if which == "first" else (4, 2, 3)
    cotangents = [whole(*out, seed=9 + r, dtype=torch.float32) for r in range(4)]
    run = (expert_exchange_ranks.run, which, 2, 2, arguments, cotangents, {})
    assert_same = torch.testing.assert_close
    for on_npu, on_cpu in zip(npu_ranks(4, *run, "npu"), ranks(4, *run), strict=True):
        for got, wanted in zip(on_npu[:3], on_cpu[:3], strict=True):
            assert_same(got, wanted)
        assert on_npu[3] == on_cpu[3]
