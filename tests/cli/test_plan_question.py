"""``mindspeed plan MODEL --on 16xh100``: what is printed and written of the answers."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace

import pytest

from tests.support.lazy import needs

needs("megatron.core")

from mindspeed.cli import plan_run
from mindspeed.cli.main import main
from mindspeed.planner.interval import JobKind, interval_of
from mindspeed.planner.search.result import Closest
from tests.cli.plan_search_job import BEST, CANDIDATES, FOUND, GIB, Priced, invented

MODEL = "qwen3-8b"
SPREAD = interval_of(JobKind(False, "bf16"), "h100")
ANSWER = replace(
    FOUND,
    interval=SPREAD,
    candidates=(replace(CANDIDATES[0], flags=("--model", MODEL, "--bf16")), *CANDIDATES[1:]),
)


@pytest.fixture
def ask(monkeypatch, capsys):
    def run(*words, found=ANSWER):
        module, calls = invented(found)
        monkeypatch.setitem(sys.modules, "mindspeed.planner.search.plan", module)
        monkeypatch.setattr(plan_run, "install_adaptor", lambda: None)
        status = main(["plan", MODEL, *map(str, words)])
        return status, capsys.readouterr(), calls

    return run


def test_each_purpose_has_a_row_and_a_command(ask):
    status, printed, calls = ask("--on", "16xh100")
    assert status == 0, printed.err
    assert [options["devices"] for _, _, options in calls] == [16] * 3
    assert all(cluster == "h100" for _, cluster, _ in calls)
    assert ["--lora-r=16" in words for words, _, _ in calls] == [False, False, True]
    rows = [line.split() for line in printed.out.splitlines() if " yes " in line]
    assert [row[-2:] for row in rows] == [["43%", "30.000"]] * 3
    low, _, high = SPREAD.text(1.5).split()
    assert all(row[row.index("1.5") + 1 :][:3] == [low, "to", high] for row in rows)
    start = "torchrun --nnodes=2 --nproc-per-node=8 -m mindspeed"
    assert f"{start} pretrain --model {MODEL} --bf16 --data FILE" in printed.out
    assert printed.out.count(f"{start} finetune --load hf:FOLDER --bf16 --data FILE.jsonl") == 2
    assert "assumed: one document each" in printed.out


def test_one_purpose_prints_its_plan_too(ask):
    status, printed, calls = ask("--on", "16xh100", "--for", "lora", "--seq-length", "8192")
    assert status == 0 and len(calls) == 1, printed.err
    assert calls[0][0][-2:] == ["--seq-length", "8192"]
    assert "likely" in printed.out and "front of time and memory" in printed.out


def test_json_and_files(ask, tmp_path):
    status, printed, _ = ask("--on", "16xh100", "--json", "--out", tmp_path / "plan")
    assert status == 0
    found = json.loads(printed.out)
    assert found["model"] == MODEL
    purposes = ["pretrain", "finetune", "lora"]
    assert [one["purpose"] for one in found["answers"]] == purposes
    first = found["answers"][0]
    assert first["interval"]["low"] == SPREAD.low and "--bf16" in first["assumed"]
    assert first["candidates"][0]["mfu"] == 0.4321
    for name in purposes:
        assert (tmp_path / "plan" / name / "candidate-1.sh").exists()


def test_the_page_has_a_plan_of_each_purpose(ask, tmp_path):
    status, printed, _ = ask("--on", "16xh100", "--html", tmp_path / "plan.html")
    assert status == 0 and "wrote" in printed.err
    text = (tmp_path / "plan.html").read_text(encoding="utf-8")
    found = json.loads(text.partition('type="application/json">')[2].partition("</script>")[0])
    assert [one["title"] for one in found] == ["pretraining", "full fine-tuning", "LoRA, rank 16"]
    commands = ("pretrain --model", "finetune --load", "finetune --load")
    for one, starts in zip(found, commands, strict=True):
        assert len(one["layouts"]) == len(CANDIDATES)
        for layout in one["layouts"]:
            assert f"-m mindspeed {starts}" in layout["command"]
            tp = dict(word.split("=") for word in layout["name"].split()[:1])["tp"]
            assert f"--tensor-model-parallel-size={tp}" in layout["command"]


def test_what_does_not_fit_says_why(ask):
    closest = Closest(BEST, Priced(1.5, 80 * GIB), 3 * GIB)
    found = replace(ANSWER, candidates=(), front=(), closest=closest, fitting=0)
    status, printed, _ = ask("--on", "1xh100", "--for", "pretrain,lora", found=found)
    assert status == 3, printed.err
    rows = [
        line.split() for line in printed.out.splitlines() if " no " in line and "80.000" in line
    ]
    assert len(rows) == 2
    assert "3.00 GiB too much" in printed.out.replace("\n", " ")


def test_interrupted(ask):
    status, _, calls = ask("--on", "16xh100", found=replace(ANSWER, interrupted=True))
    assert status == 130 and len(calls) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "on which devices? mindspeed plan qwen3-8b --on 16xh100"),
        ("--cluster h100", "on which devices?"),
        ("--on 16xh10", "no preset of that name; closest: h100"),
        ("--on 16xh100 --cluster a100", "--on says it: remove --cluster"),
        ("--on 16xh100 --devices 8", "--on says it: remove --devices"),
        ("--on 16xh100 --for training", "--for training: there are pretrain, finetune, lora"),
        ("--on 16xh100 --check", "--check is for a job by its flags"),
        ("--on 16xh100 --model llama2-7b", "--model: the model is qwen3-8b already"),
    ],
)
def test_wrong_flags_are_named(ask, words, message):
    with_status = ask(*shlex.split(words))
    assert with_status[0] in (1, 2) and not with_status[2]
    assert message in " ".join(with_status[1].err.split())


def test_purposes_belong_to_a_model(capsys):
    assert main(["plan", "--for", "lora", "--cluster", "h100", "--model", MODEL]) in (1, 2)
    assert "--for belongs to a model" in capsys.readouterr().err
