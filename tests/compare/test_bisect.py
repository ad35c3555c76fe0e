"""``mindspeed compare --bisect``: the smallest set of flags that makes the same difference."""

from __future__ import annotations

import itertools
import re
import shlex

import pytest

from mindspeed.compare.bisect import FlagChange, changed, changes, flags_of, smallest
from tests.support.lazy import needs

needs("megatron.core")

A = "python -m mindspeed pretrain --layers 4 --bf16 --data a b --lr=1"
B = "python -m mindspeed pretrain --layers 4 --data a c --sequence-parallel --lr=2"


def test_flags_are_split_from_their_values():
    assert flags_of(shlex.split(A))["--data"] == ("--data", "a", "b")
    assert flags_of(["x", "--a", "1", "--a", "2"])["--a"] == ("--a", "2")


def test_changes_turn_a_into_b():
    a, b = shlex.split(A), shlex.split(B)
    found = changes(a, b)
    assert [str(one) for one in found] == [
        "--data a c",
        "--sequence-parallel",
        "--lr=2",
        "without --bf16",
    ]
    assert flags_of(changed(a, found)) == flags_of(b)
    assert changed(a, []) == a


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_every_pair_of_guilty_flags_is_found(count):
    items = [FlagChange(f"--f{n}", (), (f"--f{n}",)) for n in range(count)]
    for guilty in itertools.chain(
        itertools.combinations(items, 1), itertools.combinations(items, 2)
    ):
        tried = []

        def bad(subset, guilty=guilty, tried=tried):
            tried.append(frozenset(subset))
            return set(guilty) <= set(subset)

        assert smallest(items, bad) == [one for one in items if one in guilty]
        assert len(tried) == len(set(tried)) <= count**2


@pytest.mark.slow
def test_the_flag_is_found_in_real_runs(runs, tmp_path, monkeypatch, capsys):
    from mindspeed.cli import compare_bisect
    from mindspeed.cli.main import main
    from mindspeed.compare.recording import read

    def record(self, name, command, title):
        flags = shlex.join(command[1:])
        world = 2 if "--tensor-model-parallel-size" in command else 1
        try:
            return read(runs.record(world, flags, at=f"bisect/{name}-{len(flags)}"))
        except AssertionError:  # refused
            return None

    monkeypatch.setattr(compare_bisect.Bisection, "_record", record)
    b = "pretrain --rotary-base 9000 --tensor-model-parallel-size 2 --sequence-parallel"
    words = ["compare", "--bisect", str(tmp_path), "--", "pretrain", "--", *b.split()]
    assert main(words) == 1
    page = capsys.readouterr().out
    assert "A repeats itself in every bit" in page
    found = [line for line in page.splitlines() if line.startswith("it comes with")]
    assert found == ["it comes with: --rotary-base 9000"]
    assert "OPERATOR: model, forward of micro-batch 0" in page  # the table of positions
    assert re.search(r"  aten\..* at megatron/core/models/common/embeddings/rotary_pos", page)


def test_one_command_is_not_enough(tmp_path, capsys):
    from mindspeed.cli.main import main

    assert main(["compare", "--bisect", str(tmp_path), "--", "mindspeed", "pretrain"]) == 1
    assert "give two commands" in capsys.readouterr().err
