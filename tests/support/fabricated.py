"""Fabricated benchmarks in the published formats, ten questions each, and a model that knows them.

Every question carries a mark, ``[anatomy-3]``; the stand-in looks at the last mark of a prompt.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

LETTERS = "ABCD"
_MARK = re.compile(r"\[([\w-]+)\]")


class KnowsAnswers:
    """A respondent that says ``answers[mark]`` and counts what it is asked.

    Args:
        answers: Mark -> answer.
        speak: Answer -> generated text.
        max_length: Characters, which are its tokens.
    """

    def __init__(
        self,
        answers: Mapping[str, str],
        speak: Callable[[str], str] = lambda answer: f" {answer}",
        max_length: int = 10**6,
    ) -> None:
        self.answers, self.speak, self.max_length = answers, speak, max_length
        self.prompts: list[str] = []

    def count(self, text: str) -> int:
        return len(text)

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        self.prompts += [prompt for prompt, _ in pairs]
        hits = [self._answer(prompt) == choice.strip() for prompt, choice in pairs]
        return [(-0.5, True) if hit else (-2.0, False) for hit in hits]

    def generate(
        self, prompts: Sequence[str], stops: Sequence[str], max_new_tokens: int, seed: int
    ) -> list[str]:
        self.prompts += prompts
        return [self.speak(self._answer(prompt)) for prompt in prompts]

    def _answer(self, prompt: str) -> str:
        return self.answers[_MARK.findall(prompt)[-1]]


def write_json_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, "utf-8")


def write_csv(path: Path, rows: Sequence[Sequence[str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


def boolq(root: Path) -> dict[str, str]:
    rows = [
        {
            "question": f"is [q-{i}] even",
            "passage": f"It is {i}.",
            "title": "t",
            "answer": not i % 2,
        }
        for i in range(10)
    ]
    write_json_lines(root / "dev.jsonl", rows)
    write_json_lines(root / "train.jsonl", [{**row, "question": "[train-0]"} for row in rows])
    return {f"q-{i}": "No" if i % 2 else "Yes" for i in range(10)}


def mmlu(root: Path) -> dict[str, str]:
    for subject in ("anatomy", "high_school_physics"):
        for split, number in (("test", 5), ("dev", 5)):
            mark = subject if split == "test" else f"{subject}-dev"
            rows = [
                [f"Which, [{mark}-{i}]?", "one, or", "two", "three", "four", LETTERS[i % 4]]
                for i in range(number)
            ]
            write_csv(root / split / f"{subject}_{split}.csv", rows)
    subjects = ("anatomy", "high_school_physics")
    return {f"{subject}-{i}": LETTERS[i % 4] for subject in subjects for i in range(5)}


def ceval(root: Path) -> dict[str, str]:
    head = ["id", "question", "A", "B", "C", "D"]
    for subject in ("law", "logic"):
        for split, extra in (("val", ["answer"]), ("dev", ["answer", "explanation"]), ("test", [])):
            mark = {"val": subject, "test": f"{subject}-test", "dev": f"{subject}-dev"}[split]
            rows = [
                [str(i), f"问题 [{mark}-{i}]", "甲", "乙", "丙", "丁", LETTERS[i % 4], "因为"]
                for i in range(5)
            ]
            columns = [*head, *extra]
            table = [columns, *(row[: len(columns)] for row in rows)]
            write_csv(root / split / f"{subject}_{split}.csv", table)
    names = ("law", "logic", "law-test", "logic-test")
    return {f"{name}-{i}": LETTERS[i % 4] for name in names for i in range(5)}


def gsm8k(root: Path) -> dict[str, str]:
    rows = [
        {
            "question": f"[q-{i}] {i} + {i}?",
            "answer": f"{i}+{i}=<<{i}+{i}=1>>so.\n#### {1000 + i:,}",
        }
        for i in range(10)
    ]
    write_json_lines(root / "test.jsonl", rows)
    return {f"q-{i}": str(1000 + i) for i in range(10)}


def human_eval(root: Path) -> dict[str, str]:
    rows = [
        {
            "task_id": f"HumanEval/{i}",
            "prompt": f'def add_{i}(x):\n    """[f-{i}]"""\n',
            "entry_point": f"add_{i}",
            "canonical_solution": f"    return x + {i}\n",
            "test": f"def check(function):\n    assert function(1) == {i + 1}\n",
        }
        for i in range(10)
    ]
    write_json_lines(root / "HumanEval.jsonl.gz", rows)
    return {f"f-{i}": f"    return x + {i}" for i in range(10)}


def agieval(root: Path) -> dict[str, str]:
    def row(mark: str, options: list[str], label: Any, answer: str | None = None) -> dict[str, Any]:
        question = f"What? [{mark}]"
        common = {"passage": None, "question": question, "options": options or None}
        return {**common, "label": label, "answer": answer, "other": None}

    four = [f"({letter})x" for letter in LETTERS]
    sets = {
        "lsat-ar": [row(f"lsat-{i}", [*four, "(E)x"], "EABCD"[i]) for i in range(4)],
        "jec-qa-kd": [row(f"jec-{i}", four, ["A", "C"] if i else ["B"]) for i in range(2)],
        "gaokao-geography": [row("geo-0", ["A. x\tB. x\tC. x\tD. x"], "D")],
        "math": [row(f"math-{i}", [], None, ["\\frac{1}{2}", "12"][i]) for i in range(2)],
        "gaokao-mathcloze": [row("cloze-0", [], None, "$\\sqrt{2}$")],
    }
    for name, rows in sets.items():
        write_json_lines(root / "v1" / f"{name}.jsonl", rows)
    examples = {name: [row(f"{name}-shot-{i}", four, "B", "1") for i in range(3)] for name in sets}
    names = list(sets)
    table = [["", *names]]
    for i in range(3):
        table.append([f"sample {i + 1}", *(repr(examples[name][i]) for name in names)])
        table.append([f"explanation {i + 1}", *("Because." for _ in names)])
    write_csv(root / "few_shot_prompts.csv", table)
    letters = {f"lsat-{i}": "EABCD"[i] for i in range(4)}
    formulas = {"math-0": "$0.5$", "math-1": "12", "cloze-0": "$\\sqrt2$"}
    return {**letters, "jec-0": "B", "jec-1": "CA", "geo-0": "D", **formulas}


def bbh(root: Path) -> dict[str, str]:
    """Five examples of each are asked, three stand in front of them."""
    for name in ("navigate", "snarks"):
        examples = [
            {"input": f"Where? [{name}-{i}]", "target": f"({LETTERS[i % 4]})"} for i in range(8)
        ]
        (root / "cot-prompts").mkdir(parents=True, exist_ok=True)
        (root / f"{name}.json").write_text(json.dumps({"canary": "x", "examples": examples}))
        (root / "cot-prompts" / f"{name}.txt").write_text(
            f"canary\n-----\nGo.\n\nQ: [shot-{name}]\nA: Let's think step by step.\n"
            "Hm. So the answer is (B).\n"
        )
    return {f"{n}-{i}": f"({LETTERS[i % 4]})" for n in ("navigate", "snarks") for i in range(8)}


WRITERS = {
    "boolq": boolq,
    "mmlu": mmlu,
    "gsm8k": gsm8k,
    "human_eval": human_eval,
    "agieval": agieval,
    "bbh": bbh,
    "bbh_cot": bbh,
    "ceval": ceval,
}
