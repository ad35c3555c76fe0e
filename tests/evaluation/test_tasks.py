"""A fake model that knows some answers gets exactly the expected score, in every benchmark."""

from __future__ import annotations

import dataclasses
import json

import pytest

from mindspeed.errors import ConfigError
from mindspeed.evaluation import answer_matching, code_execution, evaluate, prepared_tasks, run
from mindspeed.evaluation.prompts import PREPARE, TaskOptions
from mindspeed.evaluation.task import FROM_OPTIONS, SAME_FILE, builtin, task
from tests.support.fabricated import WRITERS, KnowsAnswers

MODES = [
    ("boolq", "loglikelihood"),
    ("boolq", "generate"),
    ("mmlu", "loglikelihood"),
    ("mmlu", "generate"),
    ("gsm8k", "generate"),
    ("human_eval", "generate"),
    ("agieval", "auto"),
    ("agieval", "generate"),
    ("bbh", "generate"),
    ("bbh_cot", "generate"),
    ("ceval", "loglikelihood"),
    ("ceval", "generate"),
]
WAYS_TO_SAY = {  # how a model may put an answer, and what it adds of its own
    "boolq": lambda answer: f" {answer.lower()}, because\n",
    "mmlu": lambda answer: f" ({answer}) as\nB",
    "ceval": lambda answer: f"{answer}。\nB",
    "gsm8k": lambda answer: f" 2 and 3. The answer is ${answer}.00.\n\nQ: 5?\nA: The answer is 9.",
    "human_eval": lambda answer: f"{answer}\n\nprint(add_0(3))",
    "agieval": lambda answer: f" {answer}.\nA",
    "bbh": lambda answer: f" {answer}\n\nQ: more [navigate-0]",
    "bbh_cot": lambda answer: f"It is (D), no.\nSo the answer is {answer}.\n\nQ: more",
}
WRONG = {
    "boolq": lambda right: "No" if right == "Yes" else "Yes",
    "gsm8k": lambda right: right[:-1] + "x",
    "human_eval": lambda right: "    return None",
    "agieval": lambda right: {"E": "A", "A": "B", "B": "C", "C": "D", "D": "A"}.get(right, "A"),
}


def one_letter_on(right):
    return "".join("ABCD"[("ABCD".index(c) + 1) % 4] if c in "ABCD" else c for c in right)


def score(name, root, mode, wrong=0, **options):
    """Results and the stand-in, of which ``wrong`` answers are wrong: the first ones asked."""
    right = WRITERS[name](root)
    planned = prepared_tasks.prepare_tasks(
        [name], [str(root)], options=TaskOptions(mode), allow_code=True, **options
    )
    [item] = planned
    asked = [mark_of(question) for question in item.questions]
    change = WRONG.get(name, one_letter_on)
    known = {**right, **{mark: change(right[mark]) for mark in asked[:wrong]}}
    model = KnowsAnswers(known, WAYS_TO_SAY[name])
    identity = evaluate.identity_of(planned, {"path": "stand-in"}, {})
    results = evaluate.evaluate(
        planned, model, identity=identity, replica=run.Replica(), is_writer=True, batch_size=3
    )
    return results["tasks"][name], model, item


def mark_of(question):
    return question.body.rpartition("[")[2].partition("]")[0]


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("wrong", [0, 3])
@pytest.mark.parametrize(("name", "mode"), MODES)
def test_the_score_is_the_fraction_of_right_answers(tmp_path, name, mode, wrong):
    result, _, item = score(name, tmp_path, mode, wrong)
    assert len(item.questions) == (16 if name == "bbh_cot" else 10)
    assert result["questions"] == len(item.questions) and result["unscored"] == 0
    assert result["score"] == pytest.approx(1 - wrong / len(item.questions))


@pytest.mark.parametrize("name", ["mmlu", "ceval", "agieval", "bbh"])
def test_subjects_and_groups_add_up(tmp_path, name):
    result, _, item = score(name, tmp_path, "auto", wrong=2)
    subjects, groups = result["subjects"], result["groups"]
    assert set(subjects) == {question.subject for question in item.questions}
    assert sum(part["questions"] for part in subjects.values()) == result["questions"]
    assert sum(part["questions"] for part in groups.values()) == result["questions"]
    assert "ungrouped" not in groups
    means = [part["score"] for part in subjects.values()]
    assert result["macro"] == pytest.approx(sum(means) / len(means))


def test_the_prompt_of_mmlu_is_the_published_one(tmp_path):
    _, model, _ = score("mmlu", tmp_path, "loglikelihood")
    [prompt] = {prompt for prompt in model.prompts if prompt.endswith("[anatomy-1]?" + TAIL)}
    shot = "Which, [anatomy-dev-0]?" + TAIL + " A\n\n"
    intro = "The following are multiple choice questions (with answers) about anatomy.\n\n"
    assert prompt.startswith(intro + shot)
    assert prompt.count("Answer:") == 6
    assert "about high school physics." in model.prompts[-1] + model.prompts[0]


TAIL = "\nA. one, or\nB. two\nC. three\nD. four\nAnswer:"


def test_gsm8k_shows_reasoning_in_one_line_and_ends_with_the_number(tmp_path):
    _, model, item = score("gsm8k", tmp_path, "generate")
    question = item.questions[0]
    assert len(question.shots) == 5
    assert all(shot.startswith("Q: ") and "####" not in shot for shot in question.shots)
    assert question.shots[0].endswith("24 - 5 = 19 are left. The answer is 19.")
    assert model.prompts[0].endswith("?\nA:")


def test_gsm8k_prefers_examples_of_the_data(tmp_path):
    right = WRITERS["gsm8k"](tmp_path)
    rows = (tmp_path / "test.jsonl").read_text()
    (tmp_path / "train.jsonl").write_text(rows.replace("[q-", "[train-"))
    [item] = prepared_tasks.prepare_tasks(
        ["gsm8k"], [str(tmp_path)], options=TaskOptions(), shots=2
    )
    assert len(right) == 10
    assert item.questions[0].shots[0] == "Q: [train-0] 0 + 0?\nA: 0+0=so. The answer is 1,000."


def test_bbh_excludes_its_few_shot_examples(tmp_path):
    item = score("bbh", tmp_path, "generate")[2]
    assert {mark_of(q) for q in item.questions}.isdisjoint({f"navigate-{i}" for i in range(3)})
    assert item.questions[0].shots[0] == "Q: Where? [navigate-0]\nA: (A)"


def test_chains_of_thought_come_without_the_notice_of_their_file(tmp_path):
    _, model, _ = score("bbh_cot", tmp_path, "generate")
    assert model.prompts[0].startswith("Go.\n\nQ: [shot-")
    assert model.prompts[0].endswith("A: Let's think step by step.\n")


def test_several_right_letters_are_generated_even_where_others_are_compared(tmp_path):
    _, _, item = score("agieval", tmp_path, "auto")
    by_mark = {mark_of(question): question for question in item.questions}
    assert by_mark["jec-1"].choices == () and by_mark["jec-0"].choices == (" A", " B", " C", " D")
    assert by_mark["lsat-0"].choices[-1] == " E"
    assert by_mark["geo-0"].body.endswith("从A到D, 我们应选择")
    assert "shot-2" in by_mark["geo-0"].shots[-1] and by_mark["geo-0"].shots[-1].endswith(" B")


def test_hidden_labels_become_a_submission(tmp_path):
    known = WRITERS["ceval"](tmp_path)
    planned = prepared_tasks.prepare_tasks(
        ["ceval"], [str(tmp_path)], options=TaskOptions(), split="test"
    )
    results = evaluate.evaluate(
        planned,
        KnowsAnswers(known),
        identity=evaluate.identity_of(planned, {}, {}),
        replica=run.Replica(),
        is_writer=True,
        output=tmp_path / "out",
    )
    assert results["tasks"]["ceval"]["score"] is None
    assert results["tasks"]["ceval"]["unscored"] == 10
    submission = json.loads((tmp_path / "out" / "submission.json").read_text())
    assert submission["law"] == {"0": "A", "1": "B", "2": "C", "3": "D", "4": "A"}


def test_a_prompt_that_is_too_long_loses_examples_first(tmp_path):
    right = WRITERS["mmlu"](tmp_path)
    [item] = prepared_tasks.prepare_tasks(["mmlu"], [str(tmp_path)], options=TaskOptions())
    question = item.questions[0]
    two = len(question.prompt(2))
    model = KnowsAnswers(right, max_length=two + 5)
    outcomes = run.answer_all([question], model)
    assert outcomes[0]["shots"] == 2 and not outcomes[0]["truncated"]
    assert len(model.prompts[0]) == two
    assert "of 1 prompts 1 have fewer examples" in run.length_note(outcomes, [question])
    assert run.length_note([{**outcomes[0], "shots": 5}], [question]) is None
    assert run.answer_all([question], KnowsAnswers(right, max_length=10))[0]["truncated"]


def test_programs_of_a_finished_run_are_not_run_again(tmp_path, monkeypatch):
    right = WRITERS["human_eval"](tmp_path / "data")
    paths = [str(tmp_path / "data")]
    planned = prepared_tasks.prepare_tasks(
        ["human_eval"], paths, options=TaskOptions(limit=2), allow_code=True
    )
    common = {"identity": evaluate.identity_of(planned, {}, {}), "output": tmp_path / "out"}
    for _ in range(2):
        results = evaluate.evaluate(
            planned,
            KnowsAnswers(right, WAYS_TO_SAY["human_eval"]),
            replica=run.Replica(),
            is_writer=True,
            **common,
        )
        assert results["tasks"]["human_eval"]["score"] == 1.0
        monkeypatch.setattr(code_execution, "run_programs", None)


def test_pass_at_k_counts_problems_not_programs(tmp_path):
    """Two programs per problem; each problem's second one is wrong."""
    right = WRITERS["human_eval"](tmp_path)
    options = TaskOptions(samples=2)
    planned = prepared_tasks.prepare_tasks(
        ["human_eval"], [str(tmp_path)], options=options, allow_code=True
    )

    class SecondIsWrong(KnowsAnswers):
        def generate(self, prompts, stops, max_new_tokens, seed):
            texts = super().generate(prompts, stops, max_new_tokens, seed)
            seen = {}
            for i, prompt in enumerate(prompts):
                if seen.setdefault(prompt, i) != i:
                    texts[i] = "    return 'wrong'"
            return texts

    results = evaluate.evaluate(
        planned,
        SecondIsWrong(right, WAYS_TO_SAY["human_eval"]),
        identity=evaluate.identity_of(planned, {}, {}),
        replica=run.Replica(),
        is_writer=True,
        batch_size=20,
    )
    result = results["tasks"]["human_eval"]
    assert (result["metric"], result["questions"], result["score"]) == ("pass@1", 10, 0.5)
    assert results["code_execution"] == code_execution.isolation_record()


def test_a_task_without_choices_cannot_be_compared(tmp_path):
    WRITERS["gsm8k"](tmp_path)
    with pytest.raises(ConfigError, match="gsm8k has no choices to compare"):
        prepared_tasks.prepare_tasks(
            ["gsm8k"], [str(tmp_path)], options=TaskOptions("loglikelihood")
        )


def test_every_description_is_complete():
    sizes = {"mmlu": 57, "ceval": 52, "agieval": 21, "bbh": 27}
    for item in builtin().values():
        subjects = [name for names in item.groups.values() for name in names]
        assert len(subjects) == len(set(subjects))
        if item.name in sizes:
            assert len(subjects) == sizes[item.name]
        assert item.score in {*answer_matching.MATCHERS, "program"}
        assert item.prepare in {None, *PREPARE}
        assert item.shot_files == SAME_FILE or isinstance(item.shot_files, tuple)
        assert item.choices == FROM_OPTIONS or isinstance(item.choices, tuple)
        for variant in item.variants:
            assert set(variant["subjects"]) <= set(subjects)
            fields = {field.name for field in dataclasses.fields(item)}
            assert set(variant) - {"subjects"} <= fields
    assert set(task("ceval").subject_words) == {s for g in task("ceval").groups.values() for s in g}


def test_an_unknown_task_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"--task mmul is unknown; allowed are boolq, mmlu"):
        task("mmul")
