"""Regions by themselves: what their functions say in the first and in the second run."""

from __future__ import annotations

import threading

import pytest
from torch import nn

from mindspeed.tensor_parallel import regions
from mindspeed.tensor_parallel.regions import Closing, RecomputedRegion


def test_outside_of_a_region_everything_is_as_always():
    assert not regions.keeps_gathered_inputs()
    assert not regions.output_unread(nn.Linear(1, 1))
    assert regions.next_gather() is None


def test_only_the_closing_layer_is_unread_and_only_in_the_second_run():
    closing, around, other = nn.Linear(1, 1), nn.Identity(), nn.Linear(1, 1)
    region = RecomputedRegion(Closing([(closing, around)]))
    with region.first_run():
        assert regions.keeps_gathered_inputs()
        assert not regions.output_unread(closing)
    with region.second_run():
        assert regions.keeps_gathered_inputs()
        assert regions.output_unread(closing)
        assert not regions.output_unread(other)
        with RecomputedRegion().second_run():
            assert not regions.output_unread(closing)
        assert regions.output_unread(closing)
    assert not regions.output_unread(closing)


@pytest.mark.parametrize("where", [0, 1])
def test_a_hook_may_read_the_output(where):
    modules = nn.Linear(1, 1), nn.Identity()
    hook = modules[where].register_forward_hook(lambda module, inputs, output: None)
    with RecomputedRegion(Closing([modules])).second_run():
        assert not regions.output_unread(modules[0])
        hook.remove()
        assert regions.output_unread(modules[0])


def run_again(region: RecomputedRegion, gathers: int, log: list[object]) -> None:
    with region.second_run():
        for number in range(gathers):
            ahead = regions.next_gather()
            log.append(number)
            if ahead is not None:
                ahead.begin()


def started_with(log: list[object]):
    def start():
        log.append("gradient")
        return "gathered", None

    return start


def test_a_gather_of_backward_starts_after_the_last_of_the_second_run():
    region, log = RecomputedRegion(), []
    with region.first_run():
        assert [regions.next_gather() for _ in range(3)] == [None] * 3
    with regions.ahead_of(started_with(log)) as ahead:
        run_again(region, 3, log)
    assert log == [0, 1, 2, "gradient"]
    assert ahead.started == ("gathered", None)
    # Nobody waits for a gradient in a second run that another one began.
    run_again(region, 3, log)
    assert log[4:] == [0, 1, 2]


def test_a_region_without_gathers_leaves_the_gather_to_the_one_around_it():
    inner, outer, log = RecomputedRegion(), RecomputedRegion(), []
    with outer.first_run():
        regions.next_gather()
    with inner.first_run():
        pass
    with regions.ahead_of(started_with(log)) as ahead:
        run_again(inner, 0, log)
        assert ahead.started is None
        run_again(outer, 1, log)
    assert log == [0, "gradient"]


def test_a_gather_that_no_second_run_starts_is_not_started():
    log: list[object] = []
    with regions.ahead_of(started_with(log)) as ahead:
        assert regions.next_gather() is None
    assert (ahead.started, log) == (None, [])
    with pytest.raises(ValueError), regions.ahead_of(started_with(log)):
        raise ValueError
    region = RecomputedRegion()
    with region.first_run():
        regions.next_gather()
    run_again(region, 1, log)
    assert log == [0]


def test_threads_have_regions_of_their_own():
    found = []
    with RecomputedRegion().first_run():
        thread = threading.Thread(target=lambda: found.append(regions.keeps_gathered_inputs()))
        thread.start()
        thread.join()
    assert found == [False]
