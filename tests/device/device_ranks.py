"""Jobs for the ranks of test_collectives.py; every function returns its mismatches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version

from mindspeed import device
from mindspeed.device import torch_versions
from mindspeed.device.torch_cuda_shim.collectives import AS_BYTES
from mindspeed.device.torch_versions import gloo_reduces_all
from mindspeed.journal import Journal

REDUCIBLE = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.complex64),
)
MOVABLE = (*REDUCIBLE, torch.bool, *sorted(AS_BYTES, key=str))


def _value(rank: int, dtype: torch.dtype, shape: tuple[int, ...] = (2, 3)) -> torch.Tensor:
    """Small whole numbers that differ per rank and are exact in every dtype."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float32) % 3 + rank).to(dtype).reshape(shape)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    wide = torch.complex128 if a.is_complex() else torch.float64
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.to(wide), b.to(wide))


def as_with_torch(release: str, job: Callable[[], list[str]]) -> list[str]:
    """What ``job`` returns when this torch is taken for an older one."""
    torch_versions._HERE = Version(release)
    return job()


def moving_collectives() -> list[str]:
    """Every collective that moves, in every dtype, against what must arrive."""
    device.install(Journal(), device.named("cpu"))
    rank, world = dist.get_rank(), dist.get_world_size()
    wrong = []
    for dtype in MOVABLE:
        mine = _value(rank, dtype)
        everyone = [_value(r, dtype) for r in range(world)]
        got: dict[str, tuple[Any, Any]] = {}

        outs = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(outs, mine)
        got["all_gather"] = (torch.stack(outs), torch.stack(everyone))
        outs = [torch.empty(6, dtype=dtype) for _ in range(world)]
        dist.all_gather(outs, mine)
        got["all_gather other shape"] = (torch.stack(outs), torch.stack(everyone).view(world, 6))
        out = torch.empty(2 * world, 3, dtype=dtype)
        dist.all_gather_into_tensor(out, mine)
        got["all_gather_into_tensor"] = (out, torch.cat(everyone))
        out = torch.empty(2 * world, 3, dtype=dtype)
        dist.all_gather_into_tensor(out, mine, async_op=True).wait()
        got["all_gather_into_tensor async"] = (out, torch.cat(everyone))
        for shape in ((6 * world,), (world, 2, 3), (world, 6)):
            out = torch.empty(shape, dtype=dtype)
            dist.all_gather_into_tensor(out, mine)
            got[f"all_gather_into_tensor {shape}"] = (out, torch.cat(everyone).view(shape))
        out = mine.clone()
        dist.broadcast(out, src=1)
        got["broadcast"] = (out, everyone[1])
        outs = [torch.empty_like(mine) for _ in range(world)]
        dist.gather(mine, outs if rank == 0 else None, dst=0)
        if rank == 0:
            got["gather"] = (torch.stack(outs), torch.stack(everyone))
        out = torch.empty_like(mine)
        dist.scatter(out, everyone if rank == 0 else None, src=0)
        got["scatter"] = (out, everyone[rank])
        out = torch.empty(world, 3, dtype=dtype)
        dist.all_to_all_single(out, _value(rank, dtype, (world, 3)))
        rows = torch.stack([_value(r, dtype, (world, 3))[rank] for r in range(world)])
        got["all_to_all_single"] = (out, rows)
        got["all_to_all_single uneven"] = _uneven(rank, world, dtype)
        outs = [torch.empty_like(mine) for _ in range(world)]
        dist.all_to_all(outs, [mine for _ in range(world)])
        got["all_to_all"] = (torch.stack(outs), torch.stack(everyone))
        out = torch.empty_like(mine)
        sent = dist.isend(mine, (rank + 1) % world)
        dist.recv(out, (rank - 1) % world)
        sent.wait()
        got["send/recv"] = (out, everyone[rank - 1])
        wrong += [f"{name} {dtype}" for name, pair in got.items() if not _equal(*pair)]
    return wrong


def _uneven(rank: int, world: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rank r sends r + 1 rows to everyone."""
    send = _value(rank, dtype, ((rank + 1) * world, 3))
    splits = [r + 1 for r in range(world)]
    out = torch.empty(sum(splits), 3, dtype=dtype)
    dist.all_to_all_single(out, send, splits, [rank + 1] * world)
    parts = [_value(r, dtype, ((r + 1) * world, 3)) for r in range(world)]
    return out, torch.cat([p[rank * (r + 1) :][: r + 1] for r, p in enumerate(parts)])


def reducing_collectives() -> list[str]:
    """Every collective that reduces, in every dtype and operation gloo has, PREMUL_SUM included."""
    device.install(Journal(), device.named("cpu"))
    rank, world = dist.get_rank(), dist.get_world_size()
    wrong = []
    for dtype in REDUCIBLE:
        if dtype.is_complex and not gloo_reduces_all():
            continue
        rows = [_value(r, dtype, (world, 3)) for r in range(world)]
        wide = torch.stack(rows).to(torch.complex128 if dtype.is_complex else torch.float64)
        expected = {dist.ReduceOp.SUM: wide.sum(0)}
        if not dtype.is_complex:
            expected[dist.ReduceOp.MAX] = wide.amax(0)
            expected[dist.ReduceOp.MIN] = wide.amin(0)
            expected[dist.ReduceOp.PRODUCT] = wide.prod(0)
        if dtype.is_floating_point:
            expected[dist.ReduceOp.AVG] = wide.mean(0)
            expected[dist._make_nccl_premul_sum(0.5)] = wide.sum(0) * 0.5
        for op, truth in expected.items():
            truth = truth.to(dtype)
            out = rows[rank].clone()
            dist.all_reduce(out, op)
            ok = {"all_reduce": _equal(out, truth)}
            out, kept = torch.empty(1, 3, dtype=dtype), rows[rank].clone()
            dist.reduce_scatter_tensor(out, kept, op=op)
            ok["reduce_scatter_tensor"] = _equal(out, truth[rank : rank + 1])
            ok["input unchanged"] = _equal(kept, rows[rank])
            out = torch.empty(3, dtype=dtype)
            dist.reduce_scatter(out, input_list=list(rows[rank]), op=op)
            ok["reduce_scatter"] = _equal(out, truth[rank])
            out = rows[rank].clone()
            dist.reduce(out, 0, op)
            ok["reduce"] = rank != 0 or _equal(out, truth)
            wrong += [f"{name} {dtype} {op}" for name, fine in ok.items() if not fine]
    return wrong


def refused_reductions() -> list[str]:
    """Messages of reductions in dtypes without arithmetic on gloo."""
    device.install(Journal(), device.named("cpu"))
    messages = []
    for reduction in (dist.all_reduce, lambda t: dist.reduce_scatter_tensor(t[:1], t)):
        try:
            reduction(torch.zeros(2).to(torch.float8_e4m3fn))
        except TypeError as error:
            messages.append(str(error))
    return messages


def mixed_coalescing() -> list[str]:
    """One coalescing manager with three kinds of collectives; then one that fails; then a sum."""
    device.install(Journal(), device.named("cpu"))
    rank, world = dist.get_rank(), dist.get_world_size()
    wrong = []
    for asynchronous in (False, True):
        a, b = torch.full((4,), rank + 1.0), torch.full((4,), rank + 2.0)
        gathered, scattered = torch.empty(4 * world), torch.empty(4)
        with dist._coalescing_manager(device=torch.device("cuda", 0), async_ops=asynchronous) as cm:
            dist.all_reduce(a)
            dist.all_gather_into_tensor(gathered, torch.full((4,), float(rank)))
            dist.reduce_scatter_tensor(scattered, torch.full((4 * world,), float(rank)))
            dist.all_reduce(b, op=dist.ReduceOp.MAX)
        if asynchronous:
            cm.wait()
        total = world * (world - 1) / 2
        wrong += [] if torch.equal(a, torch.full((4,), total + world)) else ["all_reduce"]
        wrong += [] if torch.equal(b, torch.full((4,), world + 1.0)) else ["max"]
        wrong += [] if scattered.tolist() == [total] * 4 else ["reduce_scatter"]
        truth = torch.arange(world).repeat_interleave(4).float()
        wrong += [] if torch.equal(gathered, truth) else ["all_gather"]
    try:
        with dist._coalescing_manager():
            dist.all_reduce(torch.ones(1))
            raise KeyError("body")
    except KeyError:
        pass
    after = torch.ones(1)
    dist.all_reduce(after)
    return wrong + ([] if after.item() == world else ["sum after a failed body"])


def groups_in_every_spelling() -> list[Any]:
    """Backends, options and device ids as Megatron passes them."""
    results: list[Any] = []
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = 8  # of --nccl-communicator-config-path
    for backend in ("nccl", "cpu:gloo,cuda:nccl", "hccl", None, "gloo"):
        group = dist.new_group([0, 1], backend=backend, pg_options=options, group_desc="test")
        tensor = torch.ones(1, device="cuda")
        dist.all_reduce(tensor, group=group)
        dist.barrier(group, device_ids=[0])
        results.append((dist.get_backend(group), tensor.item()))
    half = dist.split_group(None, [[1], [0]])
    results.append(dist.get_process_group_ranks(half) == [dist.get_rank()])
    mesh = dist.init_device_mesh("cuda", (2,), mesh_dim_names=("dp",))
    other = dist.device_mesh.DeviceMesh.from_group(dist.group.WORLD, "cuda")
    results += [mesh.device_type, mesh.size(), other.device_type]
    return results


def init_like_megatron(port: int) -> list[Any]:
    """Start again with the arguments of Megatron's initialisation, then use the groups."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    device.install(Journal(), device.named("cpu"))
    dist.init_process_group(
        backend="nccl",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world,
        device_id=torch.device("cuda", rank),
    )
    return [dist.get_backend(), *groups_in_every_spelling()]
