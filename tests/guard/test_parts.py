"""Spikes, digests of bits, the operator that is named, which rank is blamed, what is kept."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import pytest
import torch

from mindspeed.compare.digest import bits
from mindspeed.guard import checkpoints, job
from mindspeed.guard.megatron_copies import _odd
from mindspeed.guard.megatron_replay import KeptReader, ReplayedStep
from mindspeed.guard.not_finite import FirstNotFinite
from mindspeed.guard.spikes import LEAST, Spikes
from mindspeed.storage import directory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("size", [1, 3, 8, 1001, (1 << 18) + 5])
def test_a_changed_bit_changes_the_digest_of_bits(dtype, size):
    x = (torch.arange(size) % 7 - 3).to(dtype)
    seen = {int(bits(x))}
    for at in {0, size // 2, size - 1}:
        y = x.clone()
        y.view(torch.uint8)[at * x.element_size()] ^= 1
        seen.add(int(bits(y)))
    assert len(seen) == 1 + len({0, size // 2, size - 1})
    assert int(bits(x.clone())) in seen and int(bits(torch.stack([x, x])[1])) == int(bits(x))


def test_digest_of_bits_does_not_depend_on_where_a_tensor_is():
    x = torch.arange(64, dtype=torch.float32)
    assert int(bits(x[1:33])) == int(bits(x[1:33].clone()))
    assert int(bits(x.view(8, 8).t())) == int(bits(x.view(8, 8).t().contiguous()))


def test_a_spike_is_far_above_the_median_of_its_window():
    spikes = Spikes()
    steps = [2.0 + 0.01 * math.sin(3 * step) for step in range(40)]
    assert [spikes.add("loss", one) for one in steps] == [None] * 40
    assert spikes.add("loss", 2.2) is None  # 20 % are needed, too
    found = spikes.add("loss", 3.0)
    assert found is not None and found.steps == 41 and abs(found.median - 2) < 0.01
    assert spikes.add("loss", 1.0) is None and spikes.add("loss", math.nan) is None
    assert spikes.add("loss", 2.01) is None  # one spike does not move the range


def test_what_varies_more_may_vary_more():
    spikes = Spikes()
    for step in range(40):
        assert spikes.add("loss", 2.0 + 0.3 * math.sin(3 * step)) is None
    assert spikes.add("loss", 3.5) is None and spikes.add("loss", 8.0) is not None


def test_the_first_steps_are_not_judged():
    spikes = Spikes()
    assert [spikes.add("loss", 1.0 + 100 * (step == 9)) for step in range(LEAST)] == [None] * LEAST


def named(compute) -> str | None:
    operators = FirstNotFinite(lambda: "here")
    with operators:
        result = compute()
    found = operators.origin(result)
    return found[0] if found else None


def masked(fill: float) -> torch.Tensor:
    scores = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), float("-inf"))
    return torch.softmax(scores, 1) * fill


def in_place() -> torch.Tensor:
    x = torch.ones(2, 4)
    x[1].sub_(2).sqrt_()
    return x.t() * 2


def overflow() -> torch.Tensor:
    x = torch.full((4,), 1e30)
    norm = (x * x).sum().rsqrt()  # of infinity: 0
    return (x * norm) / norm


def unwritten() -> torch.Tensor:
    x = torch.empty(4)
    x.fill_(1.0)
    return x + 1


@pytest.mark.parametrize(
    ("compute", "operator"),
    [
        (lambda: torch.zeros(3).log() * 2 + 1, "log.default"),
        (lambda: masked(1.0), None),
        (lambda: masked(1e38) * 1e38, "mul.Tensor"),
        (in_place, "sqrt_.default"),
        (overflow, "div.Tensor"),
        (unwritten, None),
    ],
    ids=["log", "mask", "mask, overflow", "in place", "infinite on the way", "unwritten"],
)
def test_the_operator_is_named(compute, operator):
    assert named(compute) == operator


def test_what_comes_from_elsewhere_has_no_operator():
    x = torch.tensor([1.0, math.nan])
    assert named(lambda: x * 2) is None


@pytest.mark.parametrize(
    ("held", "text"),
    [
        ({0: 7, 1: 7, 2: 7}, ""),
        ({0: 7, 1: 8, 2: 7}, "rank 1 holds another copy than 2 ranks of the same weights"),
        ({0: 7, 4: 8}, "ranks 0, 4 hold different copies, one of these is wrong"),
        ({0: 7, 1: 8, 2: 9, 3: 7, 4: 7}, "ranks 1, 2 hold other copies than 3 ranks"),
        ({0: 7, 1: 8, 2: 9}, "ranks 0, 1, 2 hold different copies, one of these is wrong"),
    ],
)
def test_the_rank_that_differs_from_most_is_blamed(held, text):
    assert _odd(held).startswith(text) and bool(_odd(held)) == bool(text)


def test_micro_batches_are_read_once_and_given_again():
    class Reader:
        micro_batch_sizes = (1, 2)

        def __init__(self) -> None:
            self.count = 0

        def __next__(self) -> dict:
            self.count += 1
            return {"tokens": self.count}

        def lengths_ahead(self, count: int) -> list[int]:
            return list(range(self.count, self.count + count))

    reader = KeptReader(Reader())
    first = reader.lengths_ahead(2), [next(reader) for _ in range(3)]
    first[1][0].clear()  # what a step does with its micro-batch
    reader.rewind()
    assert reader.lengths_ahead(2) == [0, 1] == first[0]
    assert [next(reader)["tokens"] for _ in range(4)] == [1, 2, 3, 4]
    assert reader.micro_batch_sizes == (1, 2) and not hasattr(reader, "unknown")


def test_a_kept_checkpoint_is_not_deleted(tmp_path):
    for iteration in (2, 4, 6):
        directory.path_of(tmp_path, iteration).mkdir()
    (tmp_path / directory.TRACKER).write_text("6")
    assert checkpoints.latest(str(tmp_path)) == directory.path_of(tmp_path, 6)
    checkpoints.keep(directory.path_of(tmp_path, 2), "why")
    assert directory.remove_old(tmp_path, 1, None) == [4]
    assert directory.iterations(tmp_path) == [6, 2]


@pytest.mark.parametrize(
    ("kind", "iteration", "kept"),
    [("desync", 2, False), ("bitflip", 2, False), ("bitflip", 101, True)],
)
def test_a_step_is_kept_where_it_may_be_computed_again(monkeypatch, kind, iteration, kept):
    found = []

    class Step:
        chunks = ()

        def __init__(self, schedule, options, *, kept):
            found.append(kept)

        def gradients_are_zero(self):
            return False

        def run(self, changes):
            return "losses"

    monkeypatch.setattr(job, "ReplayedStep", Step)
    guard = job.TrainingGuard(job.GuardOptions(frozenset({kind}), interval=100))
    with guard.around_step(iteration):
        assert guard.with_schedule(lambda **options: None)(forward_only=False) == "losses"
    assert found == [kept]


def test_what_is_not_kept_is_read_as_it_is():
    reader = iter([1])
    step = ReplayedStep(
        lambda **options: options, {"model": [], "data_iterator": reader}, kept=False
    )
    assert step.run()["data_iterator"] is reader


def test_threads_of_autograd_note_operators_of_their_own():
    """A mode is on in every thread that autograd has, each of which makes and follows its own."""
    mode = FirstNotFinite(lambda: threading.current_thread().name)
    start, found = threading.Barrier(4), []

    def follow(operator: Callable[[torch.Tensor], torch.Tensor]) -> None:
        start.wait()
        with mode:
            for _ in range(50):
                made = operator(torch.full((64,), -2.0))
                found.append((operator.__name__, mode.origin(made * 2 + 1), "finite"))
                found.append((operator.__name__, mode.origin(made.nan_to_num()), ""))

    kinds = (torch.sqrt, torch.log, torch.acos, torch.log1p)
    threads = [threading.Thread(target=follow, args=(one,), name=one.__name__) for one in kinds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 400
    for name, origin, kind in found:
        assert origin == ((f"{name}.default", name) if kind else None)
