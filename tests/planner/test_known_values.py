"""FakeTensors that carry values: operators, writes, masks, collectives, and what has none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tests.support.lazy import Lazy

known = Lazy("mindspeed.planner.count.known_values")
VALUES = torch.tensor([[3.0, 1.0, 2.0], [0.0, 5.0, 4.0]])


@contextmanager
def planning() -> Iterator[torch.Tensor]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True), known.KnownValues():
        tensor = torch.rand(2, 3)
        known.assume(tensor, VALUES)
        yield tensor


def _unknown(read) -> bool:
    from torch._subclasses.fake_tensor import DataDependentOutputException

    try:
        read()
    except DataDependentOutputException:
        return True
    return False


def test_results_have_values() -> None:
    with planning() as x:
        assert x.topk(2).indices.tolist() == [[0, 2], [1, 2]]
        assert (x > 2).sum(0).tolist() == [1, 1, 1]
        assert x.t().reshape(-1)[1:3].tolist() == [0.0, 1.0]
        assert int((x.sum(1) + torch.arange(2)).max()) == 10
        assert x.long().numpy().tolist() == VALUES.tolist()


def test_shapes_follow_masks() -> None:
    with planning() as x:
        mask = x > 2
        assert x.masked_select(mask).tolist() == [3.0, 5.0, 4.0]
        assert mask.nonzero().tolist() == [[0, 0], [1, 1], [1, 2]]
        unknown = torch.rand(2, 3)
        assert unknown.masked_select(mask).shape == (3,)
        assert unknown[mask].shape == (3,)
        assert _unknown(unknown.masked_select(mask).sum().item)


def test_what_is_computed_of_anything_else_has_none() -> None:
    with planning() as x:
        assert _unknown((x + torch.rand(2, 3)).sum().item)
        assert _unknown(torch.rand_like(x).sum().item)
        assert _unknown(x.bernoulli().sum().item)


def test_writes_change_all_views() -> None:
    with planning() as x:
        view = x.view(-1)[:2]
        x[0, 0] = 7.0
        assert view.tolist() == [7.0, 1.0]
        x[0].copy_(torch.rand(3))
        assert _unknown(view.sum().item)
        assert _unknown(x.sum().item)


def test_gradients_flow_through() -> None:
    with planning() as x:
        weight = torch.rand(2, 3, requires_grad=True)
        picked = (weight * 2).masked_select(x > 2)
        picked.sum().backward()
        assert weight.grad is not None
        assert weight.grad.shape == (2, 3)


def test_collectives_of_ranks_that_hold_the_same(ranks) -> None:
    (found,) = ranks(1, collectives, backend=None)
    assert found == {
        "all_gather": [1, 2, 3, 4] * 4,
        "all_to_all": [3] * 4,
        "uneven": [2, 3] * 4,
        "broadcast": [1, 2, 3, 4],
        "all_reduce": "unknown",
    }


def collectives() -> dict[str, object]:
    """On rank 2 of 4."""
    import torch.distributed as dist

    from mindspeed.training.fake_job import fake_groups

    values, found = torch.tensor([1, 2, 3, 4]), {}
    with fake_groups(2, 4), planning():
        x = torch.randint(9, (4,))
        known.assume(x, values)
        gathered = torch.empty(16, dtype=torch.int64)
        dist.all_gather_into_tensor(gathered, x)
        found["all_gather"] = gathered.tolist()
        exchanged = torch.empty(4, dtype=torch.int64)
        dist.all_to_all_single(exchanged, x)
        found["all_to_all"] = exchanged.tolist()
        uneven = torch.empty(8, dtype=torch.int64)
        dist.all_to_all_single(uneven, x, [2] * 4, [1, 0, 2, 1])
        found["uneven"] = uneven.tolist()
        dist.broadcast(x, 0)
        found["broadcast"] = x.tolist()
        dist.all_reduce(x)
        found["all_reduce"] = "unknown" if _unknown(x.sum().item) else "known"
    return found
