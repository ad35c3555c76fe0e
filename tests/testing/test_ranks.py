"""A call on N ranks returns N results, or the root cause, and never poisons the next call."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mindspeed.testing import RankError, RankPool


def all_sum(value: float) -> tuple[int, int, float]:
    tensor = torch.tensor(value * (dist.get_rank() + 1))
    dist.all_reduce(tensor)
    return dist.get_rank(), dist.get_world_size(), tensor.item()


def scaled(tensor: torch.Tensor) -> torch.Tensor:
    print("scaling on", dist.get_rank())
    return tensor * dist.get_rank()


def one_rank_raises(bad: int) -> None:
    if dist.get_rank() == bad:
        raise ValueError(f"rank {bad} does not like this")
    dist.barrier()


def one_rank_dies(bad: int, how: str) -> None:
    if dist.get_rank() == bad:
        os._exit(7) if how == "exit" else os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


def one_rank_forgets_a_collective() -> None:
    if dist.get_rank() == 1:
        return
    dist.barrier()


def leave_traces() -> tuple[str | None, float]:
    before = os.environ.get("TRACE"), torch.rand(1).item()
    os.environ["TRACE"] = "here"
    dist.new_group([0])
    return before


def start_a_child(pid_file: str) -> None:
    child = subprocess.Popen(["sleep", "600"])
    Path(pid_file).write_text(str(child.pid))


def own_environment() -> tuple[str | None, ...]:
    return tuple(os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "SPECIAL"))


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_every_rank_returns_its_result_in_order(ranks, world_size):
    total = sum(range(1, world_size + 1)) * 2.0
    expected = [(rank, world_size, total) for rank in range(world_size)]
    assert ranks(world_size, all_sum, 2.0) == expected


def test_tensors_are_sent_both_ways_and_output_is_labelled(ranks, capsys):
    results = ranks(2, scaled, torch.ones(3))
    assert torch.equal(results[1], torch.ones(3)) and torch.equal(results[0], torch.zeros(3))
    assert "[rank 1] scaling on 1" in capsys.readouterr().out


def test_a_raising_rank_stops_the_others_at_once_with_its_traceback_on_top(ranks):
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks(4, one_rank_raises, 2, timeout=300)
    assert time.monotonic() - start < 60, "the others wait in a barrier for ever"
    assert str(caught.value).startswith("rank 2 of 4 raised in ")
    assert "does not like this" in str(caught.value)
    assert caught.value.rank == 2 and isinstance(caught.value.original, ValueError)
    assert ranks(4, all_sum, 1.0)[0] == (0, 4, 10.0)


@pytest.mark.parametrize(
    ("how", "text"), [("exit", "exited with code 7"), ("signal", "killed by signal 11 (SIGSEGV)")]
)
def test_a_dying_rank_is_named_with_its_exit_code(ranks, how, text):
    with pytest.raises(RankError) as caught:
        ranks(3, one_rank_dies, 1, how, timeout=300)
    assert caught.value.kind == "died" and caught.value.rank == 1
    assert text in str(caught.value).splitlines()[1]
    assert ranks(3, all_sum, 1.0)[0] == (0, 3, 6.0)


@pytest.mark.slow
def test_a_hang_is_ended_with_the_stack_of_the_hanging_rank(ranks):
    with pytest.raises(RankError) as caught:
        ranks(2, one_rank_forgets_a_collective, timeout=3)
    assert caught.value.kind == "hung" and caught.value.rank == 0
    assert "in one_rank_forgets_a_collective" in str(caught.value)
    assert "rank 1" not in str(caught.value), "rank 1 had returned"


def test_no_state_leaks_from_one_call_into_the_next(ranks):
    first, second = ranks(2, leave_traces), ranks(2, leave_traces)
    assert first == second
    assert first[0] == first[1], "all ranks start from the same seed"
    assert first[0][0] is None


def test_processes_started_by_a_rank_end_with_the_call(ranks, tmp_path):
    ranks(1, start_a_child, str(tmp_path / "pid"))
    pid = int((tmp_path / "pid").read_text())
    state = Path(f"/proc/{pid}/stat")
    assert not state.exists() or state.read_text().split(")")[1].split()[0] == "Z"


def test_a_call_has_its_own_environment(ranks):
    assert ranks(2, own_environment, env={"SPECIAL": "yes"}) == [
        ("0", "2", "yes"),
        ("1", "2", "yes"),
    ]
    assert "SPECIAL" not in os.environ


def test_a_nested_function_is_refused_with_an_explanation(ranks):
    with pytest.raises(ValueError, match="top level of a module"):
        ranks(1, lambda: None)


@pytest.mark.slow
def test_a_setup_that_cannot_be_imported_is_reported(ranks):
    with pytest.raises(RankError, match=r"No module named 'mindspeed\.no_such"):
        ranks(1, own_environment, setup="mindspeed.no_such_module")


def early_and_late() -> object:
    import late_of_ranks

    return late_of_ranks.Thing()


def test_types_of_a_result_are_imported_after_what_the_ranks_set_up(ranks, tmp_path, monkeypatch):
    (tmp_path / "early_of_ranks.py").write_text("")
    (tmp_path / "late_of_ranks.py").write_text(
        "import sys\nassert 'early_of_ranks' in sys.modules\nclass Thing: pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = ranks(1, early_and_late, setup="early_of_ranks", backend=None)
    assert type(found).__name__ == "Thing"


@pytest.mark.slow
def test_nothing_is_left_after_ctrl_c(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, signal, time
            from mindspeed.testing import run_ranks

            # A shell that starts the tests in the background has Ctrl-C ignored.
            signal.signal(signal.SIGINT, signal.default_int_handler)

            def hang(folder):
                open(os.path.join(folder, f"pid{os.environ['RANK']}"), "w").write(str(os.getpid()))
                time.sleep(600)

            if __name__ == "__main__":
                run_ranks(2, hang, os.environ["PID_FOLDER"], timeout=600)
            """
        )
    )
    caller = subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, "PID_FOLDER": str(tmp_path)},
        stderr=subprocess.PIPE,
    )
    while len(list(tmp_path.glob("pid*"))) < 2:
        assert caller.poll() is None, caller.stderr.read()
        time.sleep(0.05)
    caller.send_signal(signal.SIGINT)
    assert b"KeyboardInterrupt" in caller.communicate(timeout=60)[1]
    time.sleep(0.2)
    for path in tmp_path.glob("pid*"):
        assert not Path("/proc", path.read_text()).exists()


@pytest.mark.slow
def test_a_pool_keeps_the_servers_used_most_recently(monkeypatch):
    monkeypatch.setattr("mindspeed.testing.ranks.MOST_SERVERS", 2)
    with RankPool() as pool:
        setups = ["", "json", "csv"]
        for setup in setups[:-1]:
            pool.run(1, own_environment, setup=setup)
        pool.run(1, own_environment, setup=setups[0])
        least_recent = pool._servers[setups[1]]
        pool.run(1, own_environment, setup=setups[-1])
        assert list(pool._servers) == [*setups[2:-1], setups[0], setups[-1]]
        assert not least_recent.alive()
        assert all(server.alive() for server in pool._servers.values())


@pytest.mark.slow
def test_a_pool_closes_its_servers():
    with RankPool() as pool:
        pool.run(1, own_environment)
        (server,) = pool._servers.values()
    assert not server.alive()


def parents() -> tuple[int, int]:
    """Processes of the caller's copy of the server, and of the server."""
    copy = os.getppid()
    return copy, int(Path("/proc", str(copy), "stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.slow
def test_pools_that_share_a_directory_share_a_server():
    with tempfile.TemporaryDirectory(prefix="ranks-", dir="/tmp") as folder:
        one, other = RankPool(shared=Path(folder)), RankPool(shared=Path(folder))
        with one, other:
            ((copy, server),) = one.run(1, parents)
            ((other_copy, same),) = other.run(1, parents)
            assert server == same and copy != other_copy
            with pytest.raises(RankError, match="exited with code 7"):
                one.run(2, one_rank_dies, 1, "exit")
            one.close()
            assert other.run(1, parents) == [(other_copy, server)]
            os.kill(server, signal.SIGKILL)
            wait_for_the_end_of(other_copy)
            ((_, another),) = other.run(1, parents)  # starts one again
            assert another != server
    wait_for_the_end_of(another)  # as its directory is gone


def wait_for_the_end_of(pid: int) -> None:
    end = time.monotonic() + 60
    while Path("/proc", str(pid)).exists():
        assert time.monotonic() < end
        time.sleep(0.05)
