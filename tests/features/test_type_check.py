"""``--types`` in front of a training: what is started, where, and what ends the job."""

from __future__ import annotations

import os
import sys

import pytest

from mindspeed.features import registry
from mindspeed.features.compatibility import type_check
from mindspeed.features.compatibility.type_check import TypeCheck


@pytest.fixture
def started(monkeypatch):
    """Commands that were started; the job is a script on 8 ranks, and accepted."""
    calls = []
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--bf16", "--types", "--lr", "1"])
    monkeypatch.setenv("MASTER_ADDR", "here")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.delenv("MINDSPEED_TYPES_CHECKED", raising=False)
    monkeypatch.setattr(
        type_check, "run_with_signals", lambda *words: (calls.append(words), (0, b""))[1]
    )
    yield calls
    os.environ.pop("MINDSPEED_TYPES_CHECKED", None)


def test_the_first_rank_checks_once_with_the_command_line_of_the_job(monkeypatch, started):
    monkeypatch.setenv("RANK", "0")
    for _ in range(2):  # values may be made final again
        TypeCheck(types=True).check({"world_size": 8})
    [(words, environment)] = started
    assert words[:7] == [sys.executable, "-m", "mindspeed", "check", "--types", "--devices", "8"]
    assert words[7:] == ["--", os.path.abspath("pretrain_gpt.py"), "--bf16", "--lr", "1"]
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} & environment.keys()
    assert environment["MINDSPEED_TYPES_CHECKED"], "it would check itself"


def test_other_ranks_wait_and_ranks_of_a_launcher_that_has_checked_do_not(monkeypatch, started):
    monkeypatch.setenv("RANK", "3")
    TypeCheck(types=True).check({"world_size": 8})
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MINDSPEED_TYPES_CHECKED", "1")
    TypeCheck(types=True).check({"world_size": 8})
    assert started == []


def test_what_finetune_sets_by_itself_is_checked(started):
    job = {"finetune": True, "is_instruction_dataset": True, "world_size": 1}
    TypeCheck(types=True).check({**job, "command_words": ("--bf16", "--types", "--finetune")})
    [(words, _)] = started
    assert words[7:] == ["--", "--bf16", "--finetune", "--is-instruction-dataset"]


def test_what_dpo_and_reward_set_by_themselves_is_checked(started):
    job = {"objective": "reward", "world_size": 1}
    TypeCheck(types=True).check({**job, "command_words": ("--bf16",)})
    [(words, _)] = started
    assert words[7:] == ["--", "--bf16", "--objective", "reward"]


@pytest.mark.parametrize("status", [1, 3])
def test_a_job_that_is_not_accepted_ends_with_the_status(monkeypatch, started, status):
    monkeypatch.setattr(type_check, "run_with_signals", lambda *words: (status, b""))
    with pytest.raises(SystemExit) as end:
        TypeCheck(types=True).check({"world_size": 8})
    assert end.value.code == status
    assert "MINDSPEED_TYPES_CHECKED" not in os.environ


def test_it_is_no_part_of_the_job_that_is_checked():
    assert "types" in registry.flags_planned_as("no part")
