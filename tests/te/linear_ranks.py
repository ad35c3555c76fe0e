"""Linear layers of every kind on the ranks of one tensor-parallel group, with seeded weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from mindspeed.instruments import CommLedger, saved_for_backward
from mindspeed.te import kernels
from tests.support import gpt_ranks

SEQUENCE, BATCH, IN, OUT, R, SCALE = 8, 3, 12, 20, 3, 2.5


class Case(NamedTuple):
    """A layer: ``te``, ``ops`` (a sequence of operations of Transformer Engine), ``local``
    (Megatron's), ``converted`` (Megatron's, computed by ours).
    """

    kind: str
    mode: str
    sp: bool
    bias: bool = True
    frozen: bool = False
    lora: bool = False

    @property
    def name(self) -> str:
        return "-".join(map(str, self))


def cases(size: int) -> list[Case]:
    """All combinations that exist on ``size`` ranks."""
    found = []
    for kind, mode, sp, bias, frozen, lora in product(
        ("te", "ops", "local", "converted"), ("column", "row"), *[(False, True)] * 4
    ):
        if (sp and size == 1) or (lora and not frozen) or (kind == "ops" and (bias or lora)):
            continue
        found.append(Case(kind, mode, sp, bias, frozen, lora))
    return found


def whole(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors of the layer that is not sharded."""
    generator = torch.Generator().manual_seed(7)
    shapes = {
        "x": (SEQUENCE, BATCH, IN), "weight": (OUT, IN), "bias": (OUT,),
        "grad": (SEQUENCE, BATCH, OUT), "A": (R, IN), "B": (OUT, R),
    }  # fmt: skip
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, shape in shapes.items()
    }


def build(case: Case, dtype: torch.dtype) -> torch.nn.Module:
    """The layer of this rank."""
    size, rank, tensors = dist.get_world_size(), dist.get_rank(), whole(dtype)
    shard = {"column": 0, "row": 1}[case.mode]
    module = {"te": _te, "ops": _ops}.get(case.kind, _megatron)(case, dtype)
    with torch.no_grad():
        module.weight.copy_(tensors["weight"].chunk(size, shard)[rank])
        if case.bias:
            column = case.mode == "column"
            module.bias.copy_(tensors["bias"].chunk(size)[rank] if column else tensors["bias"])
    if case.frozen:
        module.weight.requires_grad_(False)
        if case.bias:
            module.bias.requires_grad_(False)
    if case.kind == "converted":
        from mindspeed.te import local_linears

        local_linears.convert(module)
    if case.lora:
        _adapt(module, case, tensors)
    return module.train()


def _te(case: Case, dtype: torch.dtype) -> torch.nn.Module:
    from mindspeed.te.linear import Linear

    return Linear(
        IN, OUT, parallel_mode=case.mode, sequence_parallel=case.sp, bias=case.bias,
        tp_group=dist.group.WORLD, params_dtype=dtype, device="cpu",
    )  # fmt: skip


def _ops(case: Case, dtype: torch.dtype) -> torch.nn.Module:
    from mindspeed.te import ops

    group = dist.group.WORLD
    product = ops.BasicLinear(
        IN, OUT, device="cpu", dtype=dtype, tensor_parallel_mode=case.mode,
        tensor_parallel_group=group, sequence_parallel=case.sp,
    )  # fmt: skip
    layer = ops.Sequential(product)
    if case.mode == "row":
        layer.append((ops.ReduceScatter if case.sp else ops.AllReduce)(group))
    layer.weight, layer.bias = product.weight, None
    return layer


def _megatron(case: Case, dtype: torch.dtype) -> torch.nn.Module:
    from megatron.core import tensor_parallel
    from megatron.core.model_parallel_config import ModelParallelConfig

    config = ModelParallelConfig(
        tensor_model_parallel_size=dist.get_world_size(), sequence_parallel=case.sp,
        params_dtype=dtype,
    )  # fmt: skip
    options = {"config": config, "init_method": torch.nn.init.zeros_, "bias": case.bias}
    options |= {"skip_bias_add": False}
    if case.mode == "column":
        return tensor_parallel.ColumnParallelLinear(IN, OUT, gather_output=False, **options)
    return tensor_parallel.RowParallelLinear(IN, OUT, input_is_parallel=True, **options)


def _adapt(module: Any, case: Case, tensors: dict[str, torch.Tensor]) -> None:
    from mindspeed.lora import LoraConfig
    from mindspeed.lora.linear import AdapterOptions, give_adapter, tp_shard_of

    size, rank, dtype = dist.get_world_size(), dist.get_rank(), module.weight.dtype
    config = LoraConfig(("dense",), r=R, alpha=SCALE * R)
    rows = module.weight.shape[0]
    shard = tp_shard_of(module)
    options = AdapterOptions.of(config, shard, {"all": rows}, None, type(module), "dense", {"all"})
    give_adapter(module, options)
    a, b = tensors["A"], tensors["B"]
    if case.mode == "column":
        b = b.chunk(size, 0)[rank]
    else:
        a = a.chunk(size, 1)[rank]
    module.lora_A["all"].data = a.to(dtype).clone()
    module.lora_B["all"].data = b.to(dtype).clone()


def step(case: Case, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Output and gradients of one forward and backward pass on this rank."""
    module = build(case, dtype)
    x, grad = inputs(case, dtype)
    out = module(x)
    out = out[0] if isinstance(out, tuple) else out
    out.backward(grad)
    found = {"out": out.detach(), "x": x.grad}
    named = {"weight": module.weight, "bias": module.bias}
    if case.lora:
        named |= {"A": module.lora_A["all"], "B": module.lora_B["all"]}
    found |= {n: p.grad for n, p in named.items() if p is not None and p.grad is not None}
    return found


def inputs(case: Case, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's x and output gradient; both are views with permuted strides."""
    size, rank, tensors = dist.get_world_size(), dist.get_rank(), whole(dtype)
    x, grad = tensors["x"], tensors["grad"]
    if case.mode == "column":
        x, grad = x.chunk(size, 0)[rank] if case.sp else x, grad.chunk(size, 2)[rank]
    else:
        x, grad = x.chunk(size, 2)[rank], grad.chunk(size, 0)[rank] if case.sp else grad
    x, grad = (t.transpose(0, 1).contiguous().transpose(0, 1) for t in (x, grad))
    return x.detach().requires_grad_(), grad


def steps(
    dtype: torch.dtype, kinds: tuple[str, ...] = ("te", "ops", "converted")
) -> dict[str, Any]:
    """Output and gradients of all cases."""
    gpt_ranks.start(dist.get_world_size())
    chosen = [case for case in cases(dist.get_world_size()) if case.kind in kinds]
    return {case.name: step(case, dtype) for case in chosen}


def costs() -> dict[str, tuple[Any, ...]]:
    """Collectives of each phase with their bytes, and bytes saved for backward."""
    gpt_ranks.start(dist.get_world_size())
    found = {}
    for case in cases(dist.get_world_size()):
        module = build(case, torch.float32)
        x, grad = inputs(case, torch.float32)
        with CommLedger() as ledger, saved_for_backward(module) as saved:
            out = module(x)
            (out[0] if isinstance(out, tuple) else out).backward(grad)
        calls = Counter((event.phase, event.op, event.payload) for event in ledger.events)
        found[case.name] = (calls, saved.bytes, x.numel() * 4)
    return found


def kept_gathers() -> dict[str, tuple[int, int, int]]:
    """All-gathers and saved bytes of a column layer that keeps what it gathered; of x; equal?"""
    gpt_ranks.start(dist.get_world_size())
    case, found = Case("te", "column", sp=True), {}
    before = step(case, torch.float32)
    seams = _seams()
    for keep in (False, True):
        if keep:
            seams.use_kernels(owner="test", recompute_all_gather=lambda: False)
        module, (x, grad) = build(case, torch.float32), inputs(case, torch.float32)
        with CommLedger() as ledger, saved_for_backward(module) as saved:
            module(x).backward(grad)
        found[str(keep)] = (ledger.calls("all_gather"), saved.bytes, x.numel() * 4)
    after = step(case, torch.float32)
    seams.clear()
    assert all(torch.equal(before[name], after[name]) for name in before)
    return found


def with_replaced_kernels(chunks: int) -> dict[str, Any]:
    """Calls and results of all cases, and of whole models, with CoC's operators as kernels."""
    gpt_ranks.start(dist.get_world_size())
    seams, log = _seams(), []
    plain = {case.name: step(case, torch.float32) for case in _replaceable()}
    losses = {spec: [_loss(spec)] for spec in ("te", "local")}
    seams.use_kernels(owner="test", **coc_kernels(chunks, log))
    found: dict[str, Any] = {}
    for case in _replaceable():
        log.clear()
        result = step(case, torch.float32)
        found[case.name] = (list(log), result, plain[case.name])
    calls = {}
    for spec, values in losses.items():
        log.clear()
        values.append(_loss(spec))
        calls[spec] = Counter(log)
    seams.clear()
    log.clear()
    for case in _replaceable():
        step(case, torch.float32)
    for spec, values in losses.items():
        values.append(_loss(spec))
    return {"steps": found, "losses": losses, "calls": calls, "left": list(log)}


def _loss(spec: str) -> float:
    """Loss of a small model after a backward pass, with sequence parallelism."""
    size = dist.get_world_size()
    options = {"tensor_model_parallel_size": size, "sequence_parallel": True}
    model = gpt_ranks.build(gpt_ranks.config("rmsnorm-swiglu-gqa", **options), spec)
    return gpt_ranks.run(model)["loss"].sum().item()


def _replaceable() -> Iterator[Case]:
    return (case for case in cases(dist.get_world_size()) if case.kind != "local")


def _seams() -> Any:
    from mindspeed import session

    active = session.install()
    active.configure({})
    return active.seams


def coc_kernels(chunks: int, log: list[tuple[str, bool]]) -> dict[str, Callable[..., Any]]:
    """The products of linear layers by the operators of overlapped communication."""
    from mindspeed.ops.lcal_functional import CocOps

    def flat(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1, x.shape[-1])

    def matrix(weight: torch.Tensor, transposed: bool) -> torch.Tensor:
        return weight.detach().t() if transposed else weight.detach()

    def empty(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        return x.new_empty(rows, columns)

    def gather_matmul(x, weight, group, *, transposed=True, bias=None, keep=False):  # type: ignore[no-untyped-def]
        log.append(("gather_matmul", transposed))
        w, rows = matrix(weight, transposed), x.shape[0] * group.size() * x.shape[1]
        out, gathered = empty(x, rows, w.shape[1]), empty(x, rows, x.shape[2])
        CocOps(group, chunks).all_gather_matmul_v2(flat(x), w, out, gathered, bias)
        shape = (-1, x.shape[1])
        return out.unflatten(0, shape), gathered.unflatten(0, shape) if keep else None

    def matmul_scatter(x, weight, group, *, transposed=True, addend=None, **options):  # type: ignore[no-untyped-def]
        log.append(("matmul_scatter", transposed))
        w = matrix(weight, transposed)
        if addend is not None:  # as one product of concatenated operands
            eye = torch.eye(w.shape[1], dtype=w.dtype)
            x, w = torch.cat([x, addend], -1), torch.cat([w, eye])
        out = empty(x, x.shape[0] * x.shape[1] // group.size(), w.shape[1])
        CocOps(group, chunks).matmul_reduce_scatter(flat(x), w, out)
        return out.unflatten(0, (-1, x.shape[1])), None

    def matmul_reduce(x, weight, group, *, transposed=True, addend=None, **options):  # type: ignore[no-untyped-def]
        log.append(("matmul_reduce", transposed))
        w = matrix(weight, transposed)
        if addend is not None:
            eye = torch.eye(w.shape[1], dtype=w.dtype)
            x, w = torch.cat([x, addend], -1), torch.cat([w, eye])
        out = empty(x, x.shape[0] * x.shape[1], w.shape[1])
        CocOps(group, chunks).matmul_all_reduce(flat(x), w, out)
        return out.unflatten(0, (-1, x.shape[1])), None

    plain = kernels.matmul

    def matmul(x, weight, *, transposed=True, **options):  # type: ignore[no-untyped-def]
        log.append(("matmul", transposed))
        return plain(x, weight, transposed=transposed, **options)

    return {
        "matmul": matmul, "gather_matmul": gather_matmul,
        "matmul_scatter": matmul_scatter, "matmul_reduce": matmul_reduce,
    }  # fmt: skip


def fp8_steps(size: int = 256) -> dict[str, float]:
    """Largest differences between sharded layers and the whole one, both with fp8 blocks."""
    from mindspeed.te import fp8
    from mindspeed.te.linear import Linear
    from mindspeed.te.recipes import Float8BlockScaling

    ranks, rank, found = dist.get_world_size(), dist.get_rank(), {}
    torch.manual_seed(5)
    x, grad = torch.randn(64, 4, size), torch.randn(64, 4, size)

    def run(layer: Any, x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x.clone().requires_grad_()
        with fp8.fp8_autocast(enabled=True, fp8_recipe=Float8BlockScaling()):
            out = layer(x)
        out.backward(grad)
        return out.detach(), x.grad, layer.weight.grad, layer.bias.grad

    whole = Linear(size, size, device="cpu")
    torch.nn.init.normal_(whole.bias)
    expected = run(whole, x, grad)
    for mode, sp in product(("column", "row"), (False, True)):
        layer = Linear(
            size, size, parallel_mode=mode, sequence_parallel=sp, tp_group=dist.group.WORLD,
            device="cpu",
        )  # fmt: skip
        column = mode == "column"
        # Dimensions along which x, out, W and b are sharded.
        dims = [0 if sp else None, 2, 0, 0] if column else [2, 0 if sp else None, 1, None]

        def part(t: torch.Tensor, dim: int | None) -> torch.Tensor:
            return t if dim is None else t.chunk(ranks, dim)[rank]

        layer.weight.data.copy_(part(whole.weight.data, dims[2]))
        layer.bias.data.copy_(part(whole.bias.data, dims[3]))
        out, dx, dw, db = run(layer, part(x, dims[0]), part(grad, dims[1]))
        if sp and not column:
            dist.all_reduce(db)  # by the trainer, once per step
        slices = (expected[0], dims[1]), (expected[1], dims[0]), (expected[2], dims[2])
        slices = (*slices, (expected[3], dims[3]))
        for name, ours, (theirs, dim) in zip(
            ("out", "dx", "dw", "db"), (out, dx, dw, db), slices, strict=True
        ):
            theirs = part(theirs, dim)
            found[f"{mode} sp={sp} {name}"] = (
                (ours - theirs).abs().max() / theirs.abs().max()
            ).item()
    return found
