"""coc_ops against products of whole matrices: every method, any number of ranks and chunks.

The matrices hold small whole numbers, so every order of summation gives the same bits.
"""

from __future__ import annotations

import re

import pytest
import torch

from mindspeed.ops import overlap
from mindspeed.ops.lcal_functional import CocOps
from mindspeed.testing import RankError
from tests.ops import coc_ranks

M, K, N = 32, 8, 6  # rows and inner length of the whole problem


def whole(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).float()


def problem(method, p, transposed, bias):
    """Each rank's arguments, each rank's outputs by name, and the shapes of the outputs."""
    gathers = "gather" in method
    a, b = whole(M, K, seed=0), whole(K, N, seed=1)
    bias = whole(1, N, seed=2) if bias else None
    product = a @ b + (0 if bias is None else bias)
    rows, columns, inner = a.chunk(p), a.chunk(p, 1), b.chunk(p)
    arguments, expected = [], []
    for rank in range(p):
        left = rows[rank] if gathers else columns[rank]
        right = b if gathers else inner[rank]
        given = {
            "input1": left.contiguous(),
            "input2": right.t().contiguous() if transposed else right,
        }
        arguments.append(given if bias is None else {**given, "bias": bias})
        scattered = product.chunk(p)[rank] if "scatter" in method else product
        gathered = {"comm_output": a} if method.endswith("v2") else {}
        expected.append({"output": scattered, **gathered})
    return arguments, expected, {name: tuple(x.shape) for name, x in expected[0].items()}


SENT = {
    "matmul_all_reduce": ("all_reduce", lambda p: M * N * 4),
    "matmul_reduce_scatter": ("reduce_scatter", lambda p: M * N * 4),
    "all_gather_matmul": ("all_gather", lambda p: M * K * 4 // p),
    "all_gather_matmul_v2": ("all_gather", lambda p: M * K * 4 // p),
}


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("method", SENT)
def test_equals_the_whole_product_and_sends_the_same_bytes(ranks, method, p, chunks):
    arguments, expected, shapes = problem(method, p, transposed=chunks == 2, bias=chunks > 1)
    results = ranks(p, coc_ranks.run_coc, method, arguments, shapes, chunks)
    op, payload = SENT[method]
    for (outputs, sent), wanted in zip(results, expected, strict=True):
        for name, value in wanted.items():
            assert torch.equal(outputs[name], value), name
        assert sent == [(op, payload(p) // chunks)] * chunks


@pytest.mark.parametrize(
    ("machines", "dtype", "calls"),
    [(1, torch.bfloat16, 1), (2, torch.bfloat16, 2), (1, torch.float32, 2)],
    ids=["fused", "two machines", "fp32"],
)
def test_kernels_over_symmetric_memory(ranks, machines, dtype, calls):
    """Without a GPU: that they are called as torch defines them, and where chunks replace them."""
    a, b = whole(M, K, seed=0).to(dtype), whole(K, N, seed=1).to(dtype)
    product = (a.float() @ b.float()).to(dtype)  # sums below 257 are exact in bf16
    gathering = [(rows, b) for rows in a.chunk(2)]
    scattering = [(c.contiguous(), r) for c, r in zip(a.chunk(2, 1), b.chunk(2), strict=True)]
    arguments = {
        "coc_matmul_reduce_scatter": scattering,
        "coc_all_gather_matmul": gathering,
        "coc_all_gather_matmul_v2": gathering,
    }
    shapes = {
        "coc_matmul_reduce_scatter": [(M // 2, N)],
        "coc_all_gather_matmul": [(M, N)],
        "coc_all_gather_matmul_v2": [(M, N), (M, K)],
    }
    sent = {
        "coc_matmul_reduce_scatter": ("reduce_scatter", M * N * dtype.itemsize // calls),
        "coc_all_gather_matmul": ("all_gather", M * K // 2 * dtype.itemsize // calls),
    }
    sent["coc_all_gather_matmul_v2"] = sent["coc_all_gather_matmul"]
    job = coc_ranks.symmetric_memory
    for rank, (results, reasons) in enumerate(ranks(2, job, arguments, shapes, machines)):
        assert reasons == {"torch sees no CUDA device"}
        wanted = {
            "coc_matmul_reduce_scatter": [product.chunk(2)[rank]],
            "coc_all_gather_matmul": [product],
            "coc_all_gather_matmul_v2": [product, a],
        }
        for name, (outputs, events) in results.items():
            assert all(map(torch.equal, outputs, wanted[name])), name
            assert events == [sent[name]] * calls


def test_pure_matmul_sends_nothing():
    a, b, bias, output = whole(M, K, seed=0), whole(K, N, seed=1), whole(1, N, seed=2), None
    for right in (b, b.t().contiguous(), b.t().contiguous().t()):
        output = torch.empty(M, N)
        CocOps().pure_matmul(a, right, output, bias)
        assert torch.equal(output, a @ b + bias)


def test_a_square_b_is_not_transposed():
    a, b, output = whole(4, 5, seed=0), whole(5, 5, seed=1), torch.empty(4, 5)
    CocOps().pure_matmul(a, b, output)
    assert torch.equal(output, a @ b)
    CocOps().pure_matmul(a, b.t(), output)
    assert torch.equal(output, a @ b.t())


def test_ranks_with_empty_input(ranks):
    arguments = [{"input1": torch.ones(0, K), "input2": torch.ones(K, N)}] * 2
    for method in SENT:
        shapes = {"output": (0, N)}
        if method.endswith("v2"):
            shapes["comm_output"] = (0, K)
        for outputs, _ in ranks(2, coc_ranks.run_coc, method, arguments, shapes, 1):
            assert outputs["output"].shape == (0, N)


def test_the_next_chunk_starts_before_the_previous_is_awaited():
    events = []

    class Work:
        def __init__(self, i):
            self.i = i

        def wait(self):
            events.append(f"wait {self.i}")

    def start(i):
        events.append(f"start {i}")
        return Work(i)

    overlap.pipeline(3, start, lambda i: events.append(f"finish {i}"))
    assert events == [
        *("start 0", "start 1", "wait 0", "finish 0"),
        *("start 2", "wait 1", "finish 1", "wait 2", "finish 2"),
    ]


def test_coc_ops_work_on_the_tensor_parallel_group_of_megatron(ranks):
    a, b = whole(4, 3, seed=0), whole(3, 2, seed=1)
    for refusal, output in ranks(2, coc_ranks.group_of_megatron, a, b, torch.empty(4, 2)):
        assert "coc_ops.matmul_all_reduce: group: expected one in CocOps(group)" in refusal
        assert torch.equal(output, 2 * (a @ b))


@pytest.mark.slow
def test_opcheck(ranks):
    assert all(ranks(2, coc_ranks.coc_opcheck, torch.ones(4, 3), torch.ones(3, 2), timeout=180))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input2": torch.ones(K + 1, N)}, r"input2: expected shape \(8, 6\) or \(6, 8\)"),
        ({"input2": torch.ones(K, N).half()}, "input2: expected the dtype of input1"),
        ({"input1": torch.ones(K)}, "input1: expected 2 dimensions"),
        ({"output": torch.ones(M + 1, N)}, r"output: expected shape \(32, 6\)"),
        ({"output": torch.ones(N, M).t()}, "output: expected a contiguous tensor"),
        ({"output": torch.ones(M, N).double()}, "output: expected the dtype of input1"),
        ({"bias": torch.ones(N, 1)}, r"bias: expected shape \(1, 6\) or \(6,\)"),
        (
            {"input1": torch.ones(M, K, requires_grad=True)},
            "has no gradient, but input1 requires one",
        ),
    ],
)
def test_refuses(change, message):
    good = {"input1": torch.ones(M, K), "input2": torch.ones(K, N), "output": torch.ones(M, N)}
    with pytest.raises(ValueError, match=f"mindspeed.ops.coc_ops.pure_matmul.*{message}"):
        CocOps().pure_matmul(**{**good, **change})


@pytest.mark.parametrize(
    ("method", "arguments", "shapes", "chunks", "message"),
    [
        ("matmul_all_reduce", (6, K), {"output": (6, N)}, 4, "chunks: expected a number of chunks"),
        ("matmul_all_reduce", (6, K), {"output": (6, N)}, 0, "chunks: expected a number of chunks"),
        (
            "matmul_reduce_scatter",
            (5, K),
            {"output": (2, N)},
            1,
            "input1: expected a number of rows",
        ),
        ("all_gather_matmul", (6, K), {"output": (6, N)}, 1, "output: expected shape (12, 6)"),
        (
            "all_gather_matmul_v2",
            (6, K),
            {"output": (12, N), "comm_output": (6, K)},
            1,
            "comm_output: expected shape (12, 8)",
        ),
    ],
)
def test_refuses_on_ranks(ranks, method, arguments, shapes, chunks, message):
    given = [{"input1": torch.ones(arguments), "input2": torch.ones(K, N)}] * 2
    with pytest.raises(RankError, match=re.escape(message)):
        ranks(2, coc_ranks.run_coc, method, given, shapes, chunks)


@pytest.mark.parametrize("form", ["tensor", "channel", "group"])
def test_int8_weights_are_dequantised_before_the_sum(ranks, form):
    """Whole numbers and scales that are powers of two: every order gives the same bits."""
    k, p = 80, 2  # rows of a rank: two groups of 32, and one of 16
    arguments, product = [], torch.zeros(M, N, dtype=torch.float64)
    shape = {"tensor": (1,), "channel": (N,), "group": (3, N)}[form]
    bias = whole(1, N, seed=2)
    for rank in range(p):
        x, weight = whole(M, k, seed=rank), whole(k, N, seed=10 + rank).to(torch.int8)
        scale = 2 ** whole(*shape, seed=20 + rank)
        offset = whole(*shape, seed=30 + rank)
        each = [t.repeat_interleave(32, 0)[:k] if form == "group" else t for t in (scale, offset)]
        product += x.double() @ ((weight.double() + each[1].double()) * each[0].double())
        given = {"input1": x, "input2": weight, "scale": scale, "offset": offset, "bias": bias}
        arguments.append(given)
    options = {"group_size": 32} if form == "group" else {}
    run = (coc_ranks.run_coc_w8a16, arguments, (M, N), options)
    for output, sent in ranks(p, *run):
        assert torch.equal(output, (product + bias).float())
        assert sent == [("all_reduce", M * N * 4)]
