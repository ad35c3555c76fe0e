"""Replicas share the questions, an interrupted run resumes, the report names what was measured."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed.errors import ConfigError, DataError
from mindspeed.evaluation import evaluate, prepared_tasks, run, samples
from mindspeed.evaluation.prompts import TaskOptions
from mindspeed.evaluation.task import task
from tests.support.fabricated import WRITERS, KnowsAnswers


def planned_for(root, *names):
    known = {}
    for name in names:
        known.update(WRITERS[name](root / name))
    paths = [f"{name}={root / name}" for name in names]
    return prepared_tasks.prepare_tasks(names, paths, options=TaskOptions()), known


def evaluated(planned, model, output=None, **identity):
    return evaluate.evaluate(
        planned,
        model,
        identity=evaluate.identity_of(planned, identity, {}),
        replica=run.Replica(),
        is_writer=True,
        output=output,
        batch_size=2,
    )


@pytest.mark.parametrize("size", [2, 3, 7])
def test_replicas_evaluate_every_question_once(tmp_path, size):
    planned, known = planned_for(tmp_path, "mmlu", "gsm8k")
    asked = [question for item in planned for question in item.questions]
    outcomes = []
    for index in range(size):
        outcomes += run.answer_all(asked, KnowsAnswers(known), replica=run.Replica(index, size))
    assert sorted(o["key"] for o in outcomes) == sorted(q.key for q in asked)
    ordered = run.in_order(outcomes, asked)
    assert [o["key"] for o in ordered] == [q.key for q in asked]
    alone = run.answer_all(asked, KnowsAnswers(known))
    assert run.in_order(alone, asked) == ordered


class Dies(KnowsAnswers):
    """Is interrupted when it has answered ``lives`` batches."""

    def __init__(self, answers, lives):
        super().__init__(answers)
        self.lives = lives

    def score(self, pairs):
        self._live()
        return super().score(pairs)

    def _live(self):
        if not self.lives:
            raise KeyboardInterrupt
        self.lives -= 1


def test_an_interrupted_run_evaluates_only_the_remaining_questions(tmp_path):
    planned, known = planned_for(tmp_path, "boolq")
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        evaluated(planned, Dies(known, 3), out)
    assert not (out / "results.json").exists()
    model = KnowsAnswers(known)
    results = evaluated(planned, model, out)
    assert len(set(model.prompts)) == 4  # of ten, in batches of two
    assert results["tasks"] == evaluated(planned, KnowsAnswers(known))["tasks"]
    lines = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert [line["key"] for line in lines] == [f"boolq/{i}" for i in range(10)]
    assert sorted(path.name for path in out.iterdir()) == [
        "results.json",
        "run.json",
        "samples.jsonl",
    ]


def test_a_partial_line_is_dropped_and_files_of_any_number_of_replicas_are_read(tmp_path):
    planned, known = planned_for(tmp_path, "boolq")
    out = tmp_path / "out"
    evaluated(planned, KnowsAnswers(known), out)
    lines = (out / "samples.jsonl").read_text().splitlines(keepends=True)
    (out / "samples.jsonl").unlink()
    (out / "samples-0.jsonl").write_text("".join(lines[:2]) + lines[2][:20])
    (out / "samples-1.jsonl").write_text("".join(lines[5:7]))
    model = KnowsAnswers(known)
    assert evaluated(planned, model, out)["tasks"]["boolq"]["score"] == 1.0
    assert len(set(model.prompts)) == 6


def test_a_finished_run_evaluates_nothing(tmp_path):
    planned, known = planned_for(tmp_path, "boolq")
    evaluated(planned, KnowsAnswers(known), tmp_path / "out")
    model = KnowsAnswers(known)
    evaluated(planned, model, tmp_path / "out")
    assert model.prompts == []


def test_a_directory_belongs_to_one_run(tmp_path):
    planned, known = planned_for(tmp_path, "boolq")
    evaluated(planned, KnowsAnswers(known), tmp_path / "out", path="a")
    with pytest.raises(ConfigError, match="holds another run, which differs in model; choose"):
        evaluated(planned, KnowsAnswers(known), tmp_path / "out", path="b")
    others = prepared_tasks.prepare_tasks(
        ["boolq"], [str(tmp_path / "boolq")], options=TaskOptions(limit=3)
    )
    with pytest.raises(ConfigError, match="holds another run, which differs in tasks"):
        evaluated(others, KnowsAnswers(known), tmp_path / "out", path="a")


def test_a_damaged_file_is_named(tmp_path):
    planned, known = planned_for(tmp_path, "boolq")
    evaluated(planned, KnowsAnswers(known), tmp_path / "out")
    (tmp_path / "out" / "samples.jsonl").write_text("{}}\n")
    with pytest.raises(DataError, match=r"samples\.jsonl is damaged"):
        evaluated(planned, KnowsAnswers(known), tmp_path / "out")


KILLED = """
import os, signal
from pathlib import Path
from tests.evaluation.test_run import Dies, evaluated, planned_for

class Killed(Dies):
    def _live(self):
        if not self.lives:
            os.kill(os.getpid(), signal.SIGKILL)
        self.lives -= 1

planned, known = planned_for(Path({root!r}), "boolq")
evaluated(planned, Killed(known, 2), Path({root!r}) / "out")
"""


@pytest.mark.slow
def test_a_killed_process_keeps_its_answers(tmp_path):
    code = KILLED.format(root=str(tmp_path))
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=200, cwd=root)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()[-2000:]
    planned, known = planned_for(tmp_path, "boolq")
    model = KnowsAnswers(known)
    assert evaluated(planned, model, tmp_path / "out")["tasks"]["boolq"]["score"] == 1.0
    assert len(set(model.prompts)) == 6


def test_files_are_private(tmp_path):
    planned, known = planned_for(tmp_path, "boolq")
    before = os.umask(0)
    try:
        evaluated(planned, KnowsAnswers(known), tmp_path / "out")
    finally:
        os.umask(before)
    assert all(path.stat().st_mode & 0o137 == 0 for path in (tmp_path / "out").iterdir())


def test_results_name_model_prompts_and_numbers(tmp_path):
    planned, known = planned_for(tmp_path, "boolq")
    evaluated(planned, KnowsAnswers(known), tmp_path / "out", files_sha256="abc")
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["model"] == {"files_sha256": "abc"}
    assert len(results["tasks"]["boolq"]["prompts_sha256"]) == 64
    other = prepared_tasks.prepare_tasks(
        ["boolq"], [str(tmp_path / "boolq")], options=TaskOptions(limit=9)
    )
    assert other[0].identity()["prompts_sha256"] != planned[0].identity()["prompts_sha256"]


def test_the_model_hash_sees_names_sizes_and_ends(tmp_path):
    big = tmp_path / "m" / "model.bin"
    big.parent.mkdir()
    big.write_bytes(bytes(300_000))
    first = evaluate.fingerprint_of_files(big.parent)
    assert evaluate.fingerprint_of_files(big.parent) == first
    big.write_bytes(bytes(299_999) + b"x")
    last = evaluate.fingerprint_of_files(big.parent)
    big.rename(tmp_path / "m" / "other.bin")
    assert len({first, last, evaluate.fingerprint_of_files(big.parent)}) == 3


def outcome(subject, index, correct, sample=0):
    return {"subject": subject, "index": index, "sample": sample, "correct": correct}


def test_statistics_are_those_of_a_mean():
    hits = [True, True, False, True]
    outcomes = [outcome("law", i, hit) for i, hit in enumerate(hits)]
    outcomes += [outcome("physician", 0, False), outcome("new", 0, None)]
    result = evaluate.summary(task("ceval"), outcomes)
    assert (result["questions"], result["unscored"], result["score"]) == (5, 1, 0.6)
    deviation = math.sqrt((3 * 0.4**2 + 2 * 0.6**2) / 4)
    assert result["stderr"] == pytest.approx(deviation / math.sqrt(5))
    assert result["macro"] == pytest.approx((0.75 + 0.0) / 2)
    assert result["groups"]["humanities"]["subjects"] == ["law"]
    assert result["subjects"]["physician"]["stderr"] is None  # one question has no deviation


def test_pass_at_ten_is_the_mean_over_problems():
    """Twelve programs for each of two problems, of which 1 and 3 are right."""
    outcomes = [
        {"task": "human_eval", "subject": "", "index": problem, "correct": number < right}
        for problem, right in enumerate((1, 3))
        for number in range(12)
    ]
    result = evaluate.summary(task("human_eval"), outcomes)
    both = [evaluate.pass_at_k(12, right, 10) for right in (1, 3)]
    assert result["pass@10"] == pytest.approx(sum(both) / 2) and result["score"] == pytest.approx(
        (1 / 12 + 3 / 12) / 2
    )
    assert "pass@100" not in result
    assert (
        f"pass@10  {'':11}{100 * result['pass@10']:.2f}".split()
        == next(
            line
            for line in evaluate.table({"human_eval": result}).splitlines()
            if "pass@10" in line
        ).split()
    )


@pytest.mark.parametrize(
    ("n", "c", "k"), [(5, 2, 1), (5, 2, 3), (10, 0, 10), (10, 10, 1), (4, 3, 2)]
)
def test_pass_at_k_is_the_share_of_subsets_with_a_hit(n, c, k):
    from itertools import combinations

    subsets = list(combinations([True] * c + [False] * (n - c), k))
    expected = sum(any(subset) for subset in subsets) / len(subsets)
    assert evaluate.pass_at_k(n, c, k) == pytest.approx(expected)


def test_the_table_has_groups_and_subjects_below_their_task():
    outcomes = [outcome("law", 0, True), outcome("logic", 0, False), outcome("mystery", 0, True)]
    text = evaluate.table({"ceval": evaluate.summary(task("ceval"), outcomes)})
    names = [line.split("  ")[0] or line.strip().split("  ")[0] for line in text.splitlines()]
    assert names[2:] == ["ceval (accuracy)", "humanities", "law", "logic", "ungrouped", "mystery"]
    assert "66.67" in text.splitlines()[2]


def test_nothing_is_written_without_a_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with samples.SampleFile(None, 0) as file:
        file.append([{"key": "a"}])
    assert list(tmp_path.iterdir()) == []
