"""Which bytes live: tensors on their way to other ranks, above all."""

from __future__ import annotations


def test_what_is_sent_lives_with_its_handle(ranks) -> None:
    assert ranks(1, sent, backend=None) == [[800, 800, 800, 0, 800, 0, 800, 0, 0]]


def sent() -> list[int]:
    """Bytes alive after a send, after its tensor is dropped, is waited for, and loses its handle.

    Then: a collective before and after its wait, one whose handle is dropped instead, and one that
    the program's stream runs.
    """
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from mindspeed.instruments.live_memory import LiveMemory

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    found = []
    with LiveMemory() as memory:
        tensor = torch.zeros(200)
        work = dist.isend(tensor, 1)
        found.append(memory.total)
        del tensor
        found.append(memory.total)
        work.wait()
        found.append(memory.total)
        del work
        found.append(memory.total)
        work = dist.all_reduce(torch.zeros(200), async_op=True)
        found.append(memory.total)
        work.wait()
        found.append(memory.total)
        work = dist.all_reduce(torch.zeros(200), async_op=True)
        found.append(memory.total)
        del work
        dist.all_reduce(torch.zeros(2))  # the last handle is not held any more
        found.append(memory.total)
        dist.all_reduce(torch.zeros(200))
        found.append(memory.total)
    return found
