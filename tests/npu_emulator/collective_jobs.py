"""Jobs of test_collectives.py on two ranks with an emulated NPU each."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mindspeed.device.torch_cuda_shim import collectives
from mindspeed.journal import Journal


def every_collective(device):
    """Results of all collectives of `device`, by name, as nested lists."""
    if device == "npu":
        torch.npu.set_device(dist.get_rank())
    else:  # gloo of older torch lacks some
        collectives.install(Journal())
    rank, size = dist.get_rank(), dist.get_world_size()

    def mine(*shape):
        count = torch.Size(shape).numel()
        return (torch.arange(count, dtype=torch.float32) + 10 * rank).view(shape).to(device)

    def fresh(*shape):
        return torch.zeros(shape, device=device)

    done = {}

    def note(name, *tensors):
        assert all(tensor.device.type == device for tensor in tensors)
        done[name] = [tensor.tolist() for tensor in tensors]

    x = mine(4)
    dist.all_reduce(x)
    note("all_reduce", x)
    x = mine(3, 2).t()[0].contiguous()
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    note("all_reduce max", x)
    x = mine(4)
    dist.broadcast(x, src=1)
    note("broadcast", x)
    x = mine(4)
    dist.reduce(x, dst=0)
    note("reduce", *([x] if rank == 0 else []))
    parts = [fresh(2, 2) for _ in range(size)]
    dist.all_gather(parts, mine(2, 2))
    note("all_gather", *parts)
    whole = fresh(4 * size)
    dist.all_gather_into_tensor(whole, mine(4))
    note("all_gather_into_tensor", whole)
    part = fresh(2)
    dist.reduce_scatter(part, list(mine(4).chunk(size)))
    note("reduce_scatter", part)
    dist.reduce_scatter_tensor(part, mine(4))
    note("reduce_scatter_tensor", part)
    got = fresh(4)
    work = dist.all_to_all_single(got, mine(4), async_op=True)
    work.wait()
    note("all_to_all_single", got)
    splits = [3, 1] if rank == 0 else [1, 0]  # from and to each rank
    got = fresh(sum(splits))
    dist.all_to_all_single(got, mine(sum(splits)), splits, splits)
    note("all_to_all_single uneven", got)
    outs = [fresh(2) for _ in range(size)]
    dist.all_to_all(outs, list(mine(4).chunk(size)))
    note("all_to_all", *outs)
    gathered = [fresh(2) for _ in range(size)] if rank == 0 else None
    dist.gather(mine(2), gathered, dst=0)
    note("gather", *(gathered or []))
    got = fresh(2)
    dist.scatter(got, list(mine(4).chunk(size)) if rank == 0 else None, src=0)
    note("scatter", got)
    got = fresh(2)
    if rank == 0:
        dist.send(mine(2), 1)
        dist.recv(got, 1)
    else:
        dist.recv(got, 0)
        dist.send(mine(2), 0)
    note("send and recv", got)
    got = fresh(2)
    pair = [dist.P2POp(dist.isend, mine(2), 1 - rank), dist.P2POp(dist.irecv, got, 1 - rank)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    note("batch_isend_irecv", got)
    dist.barrier()
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    done["all_gather_object"] = objects
    return done


def every_collective_of_hccl():
    dist.init_process_group("hccl")
    return dist.get_backend(), every_collective("npu")


def cpu_tensors_of_hccl():
    dist.init_process_group("hccl")
    dist.all_reduce(torch.ones(1, device="npu"))
    dist.all_reduce(torch.ones(1))


def gradients_through_collectives():
    """A functional collective inside autograd, on a subgroup."""
    import torch.distributed.nn.functional as functional

    group = dist.new_group([0, 1])
    x = torch.full((2,), 2.0 + dist.get_rank(), device="npu", requires_grad=True)
    (functional.all_reduce(x * x, group=group).sum() * (1 + dist.get_rank())).backward()
    return x.grad.tolist()


def fused_products():
    """The products fused with a collective, and what they should be."""
    import torch_npu

    dist.init_process_group("hccl")
    rank = dist.get_rank()
    hcom = dist.group.WORLD._get_backend(torch.device("npu")).get_hccl_comm_name(rank)
    generator = torch.Generator().manual_seed(rank)
    # Small whole numbers: their sums are exact in fp16, the dtype of these operators.
    draw = lambda *shape: torch.randint(-4, 5, shape, generator=generator).half()  # noqa: E731
    x, w = draw(4, 6), draw(6, 3)
    got = [torch_npu.npu_mm_all_reduce_base(x.npu(), w.npu(), hcom, reduce_op="sum")]
    got.append(torch_npu.npu_mm_reduce_scatter_base(x.npu(), w.npu(), hcom, 2))
    got += torch_npu.npu_all_gather_base_mm(x.npu(), w.npu(), hcom, 2)
    return x, w, [tensor.cpu() for tensor in got]
