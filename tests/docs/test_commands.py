"""The commands of the pages, run in the order in which a reader meets them.

A bash block below ``<!-- run -->`` is executed, all blocks in one directory. Trainings are made
shorter (:data:`SHORTER`); everything else runs as it is printed.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.lazy import needs

needs("megatron.core", "tokenizers", "transformers", "matplotlib")

from tests.docs.test_every_command import named_commands
from tests.support import commands_job

DOCS = Path(__file__).resolve().parents[2] / "docs"

# In the order of the story: what a page reads, an earlier one has written.
PAGES = ("data", "training", "convert", "finetune", "inference", "evaluation", "plots")
SHORTER = {
    "pretrain": ("--train-iters=4", "--lr-warmup-iters=1", "--save-interval=4", "--eval-iters=1"),
    "finetune": ("--train-iters=4", "--lr-warmup-iters=1"),
}
LEFT_BEHIND = (
    "data/corpus_text_document.bin",
    "data/instructions_packed_labels_document.bin",
    "run/loss.png",
    "hf/model.safetensors",
    "again/release",
    "hf-again/config.json",
    "merged/latest_checkpointed_iteration.txt",
    "lora-for-peft/adapter_model.safetensors",
    "scores/results.json",
)

CHINESE = sorted(page.relative_to(DOCS / "zh").as_posix() for page in (DOCS / "zh").rglob("*.md"))

_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_RUN = re.compile(r"^<!-- run -->\n+```bash\n(.*?)^```", re.DOTALL | re.MULTILINE)
_BASH = re.compile(r"^```bash\n(.*?)^```", re.DOTALL | re.MULTILINE)


def executed(text: str) -> Iterator[list[str]]:
    """Words of every command of a page that is to be run."""
    for block in _RUN.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                assert words[0] == "mindspeed", f"only our own commands can be run: {line}"
                yield words[1:]


def ranks_of(command: list[str]) -> int:
    """Processes that the command would start."""
    given = dict(pairwise(command))
    if "--nproc" in given:
        return int(given["--nproc"])
    if command[0] not in ("generate", "evaluate"):
        return 1  # convert --tp 2 writes for two ranks
    return int(given.get("--tp", 1)) * int(given.get("--pp", 1)) * int(given.get("--dp", 1))


def test_commands_are_found():
    text = "<!-- run -->\n\n```bash\nmindspeed a \\\n    --b 'c d'  # why\n\nmindspeed e\n```\n"
    text += "```bash\nmindspeed not-this\n```\n"
    assert list(executed(text)) == [["a", "--b", "c d"], ["e"]]
    assert ranks_of(["generate", "--tp", "2", "--pp", "2"]) == 4
    assert ranks_of(["convert", "--tp", "2", "--pp", "2"]) == 1


@pytest.mark.parametrize("page", PAGES)
def test_every_tutorial_page_has_commands_that_are_run(page):
    assert list(executed((DOCS / f"{page}.md").read_text("utf-8")))


@pytest.mark.parametrize("page", CHINESE)
def test_the_chinese_page_has_the_same_commands_and_headings(page):
    """A Chinese page may be shorter, in the same order; its blocks are the same."""
    english = (DOCS / page).read_text("utf-8")
    chinese = (DOCS / "zh" / page).read_text("utf-8")

    def code(text: str) -> list[str]:
        return [re.sub(r"\s*#.*", "", block) for block in _BASH.findall(text)]

    assert code(chinese) == code(english)
    assert list(executed(chinese)) == list(executed(english))
    headings = [
        re.findall(r"^#+ ", _FENCE.sub("", text), re.MULTILINE) for text in (english, chinese)
    ]
    assert headings[0] == headings[1]
    assert set(named_commands(chinese)) <= set(named_commands(english))


def test_chinese_pages_are_listed_in_the_order_of_the_english_ones():
    listed = re.findall(r"([\w/-]+\.md)$", (DOCS.parent / "mkdocs.yml").read_text(), re.MULTILINE)
    chinese = [page.removeprefix("zh/") for page in listed if page.startswith("zh/")]
    assert chinese == [page for page in listed if page in CHINESE]


def test_both_first_pages_lead_to_the_same_pages():
    english, chinese = (
        re.findall(r"\]\((?:\.\./)?((?:features/)?[\w-]+\.md)\)", path.read_text("utf-8"))
        for path in (DOCS / "index.md", DOCS / "zh" / "index.md")
    )
    assert [page for page in chinese if page != "index.md"] == english


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_commands_of_the_pages_work_one_after_the_other(ranks, tmp_path):
    for page in PAGES:
        for command in executed((DOCS / f"{page}.md").read_text("utf-8")):
            results = ranks(
                ranks_of(command),
                commands_job.run,
                [*command, *SHORTER.get(command[0], ())],
                str(tmp_path),
                setup=commands_job.SETUP,
                backend=None,
                timeout=240,
            )
            for status, _, errors in results:
                assert status == 0, f"{page}.md: mindspeed {shlex.join(command)}\n{errors}"
    missing = [name for name in LEFT_BEHIND if not (tmp_path / name).exists()]
    assert missing == []
