"""One rank searches a schedule; all have it, at every door, or the same error."""

from __future__ import annotations

import contextlib

import pytest
import torch.distributed as dist

from tests.pipeline.schedule import search_ranks


@pytest.fixture(scope="module")
def alone():
    """What one process finds."""
    count, rows, _ = search_ranks.searched(2.0)
    assert count == 1
    return rows


@contextlib.contextmanager
def launched():
    """The environment of a launcher that opens a store before the ranks start."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}


def test_with_process_groups_one_rank_searches(ranks, alone):
    found = ranks(4, search_ranks.searched, 2.0)
    assert sum(count for count, _, _ in found) == 1
    assert all(rows == alone for _, rows, _ in found)


def test_before_process_groups_one_rank_searches_in_the_launchers_store(ranks, alone):
    with launched() as env:
        found = ranks(4, search_ranks.searched, 2.0, backend=None, env=env)
    assert sum(count for count, _, _ in found) == 1
    assert all(rows == alone for _, rows, _ in found)


def test_flags_are_read_with_one_search_of_a_v_and_one_of_a_loop(ranks):
    with launched() as env:
        found = ranks(4, search_ranks.flags_read, backend=None, env=env)
    assert sum(count for count, _ in found) == 2
    assert {schedule for _, schedule in found} == {"v-auto"}


def test_a_job_that_starts_again_searches_again(ranks, alone):
    with launched() as env:
        for attempt in ("0", "1"):
            again = {**env, "TORCHELASTIC_RESTART_COUNT": attempt}
            found = ranks(2, search_ranks.searched, 2.0, backend=None, env=again)
            assert sum(count for count, _, _ in found) == 1
            assert all(rows == alone for _, rows, _ in found)


def test_without_a_store_every_rank_searches(ranks, alone):
    found = ranks(2, search_ranks.searched, 2.0, backend=None)
    assert [count for count, _, _ in found] == [1, 1]
    assert all(rows == alone for _, rows, _ in found)


def test_a_store_that_does_not_answer_is_done_without(alone, monkeypatch):
    def gone():
        raise dist.DistStoreError("nobody")

    monkeypatch.setattr("mindspeed.pipeline.schedule.auto.store_of_ranks", gone)
    assert search_ranks.searched(2.0)[:2] == (1, alone)


def test_ranks_that_ask_for_different_schedules_do_not_wait_for_each_other(ranks, alone):
    found = ranks(2, search_ranks.different, [2.0, 3.0])
    assert [count for count, _, _ in found] == [1, 1]
    assert found[0][1] == alone != found[1][1]


def test_a_limit_below_the_front_is_refused_by_all_in_the_same_words(ranks):
    found = ranks(4, search_ranks.searched, 0.5)
    assert sum(count for count, _, _ in found) == 1
    assert {kind for _, kind, _ in found} == {"ConfigError"}
    (text,) = {text for _, _, text in found}
    assert "the smallest one needs 1 A" in text


def test_a_rank_that_fails_in_the_search_ends_the_others_with_its_message(ranks):
    found = ranks(4, search_ranks.searched, 2.0, "no space left")
    assert sum(count for count, _, _ in found) == 1
    assert sorted(kind for _, kind, _ in found) == ["OSError", *["RuntimeError"] * 3]
    assert {text for _, _, text in found} == {"no space left"}
