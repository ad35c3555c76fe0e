"""Every command of every page starts: read by bash, then by the parsers of what it would start.

A command in a ``bash`` block, or in backticks with a program first, counts. Those of the tutorials
run, too (test_commands.py).
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs import understood
from tests.docs.shell import CommandLine, NotUnderstood, command_lines
from tests.docs.understood import ROOT, make_files, problem
from tests.support.commands_job import run
from tests.support.lazy import needs

needs("megatron.core", "tokenizers", "transformers", "matplotlib")

HISTORY = ROOT / "CHANGELOG.md"
TABLES = ROOT / "docs/features/index.md"  # of flags, which are no commands
PAGES = [
    page
    for page in [
        *sorted(ROOT.glob("*.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
        ROOT / "examples/README.md",
    ]
    if page not in (HISTORY, TABLES) and "zh" not in page.relative_to(ROOT).parts
]
RUN = (
    "attention",
    "completion",
    "doctor",
    "features",
    "moe",
    "patches",
    "pipeline",
    "recipes",
)
"""Commands that need neither data nor a device, and answer in seconds: these run."""
NEEDS = ("--routing", "--measured", "--profile", "--security", "--live", "trace")
"""Words that name what a job has left."""
SLURM = {
    **{"SLURM_JOB_NODELIST": "node[0-1]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7"},
    **{"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_LOCALID": "0"},
}
"""What Slurm sets in a job."""

_BLOCK = re.compile(r"^ *```bash\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
_FENCE = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
_SPAN = re.compile(r"(`+)(.+?)(?<!`)\1(?!`)", re.DOTALL)
_PROGRAM = re.compile(r"(?:mindspeed|torchrun|python3?|make|pip|benchmarks/\S+|tools/\S+\.sh) .")
_STANDS_FOR = {
    r"(?<!\w)(FLAGS OF THE JOB|OTHER FLAGS|<flags>|ARGS\.\.\.|(?<=-- )JOB)(?!\w)": "FLAGS",
    r"(?<= )[A-Z](?![\w./-])": "8",
    r"(?<=--data )FILE(?!\w)": "FILE.jsonl",
    r"\bSIZE\b": "60GiB",
}
"""Placeholders of pages, and what tests/docs/understood.py knows."""


def named_commands(text: str) -> list[str]:
    """Commands in a page's sentences; of alternatives, ``a|b``, the first."""
    spans = [re.sub(r"\s+", " ", span) for _, span in _SPAN.findall(_FENCE.sub("", text))]
    return [re.sub(r"(\w[\w-]*)(\|[\w-]+)+", r"\1", one) for one in spans if _PROGRAM.match(one)]


def commands_of(text: str, directory: str) -> tuple[list[CommandLine], list[CommandLine]]:
    """Commands of a page's blocks, and those in its sentences.

    A later block uses the variables of earlier ones.
    """
    found = []
    for script in ("\n".join(_BLOCK.findall(text)), "\n".join(named_commands(text))):
        for placeholder, value in _STANDS_FOR.items():
            script = re.sub(placeholder, value, script)
        found.append(list(command_lines(script, Path(directory), **SLURM)))
    return found[0], found[1]


def problems(text: str, directory: str, whole: bool = False) -> list[str]:
    """What is wrong with the commands of a page, each with the reason.

    Args:
        text: the page.
        directory: an empty one.
        whole: sentences have whole commands, too; elsewhere they may name one by its first words.
    """
    try:
        blocks, named = commands_of(text, directory)
    except NotUnderstood as error:
        return [f"bash: {error}"]
    make_files([*blocks, *named], Path(directory))
    found = [(line, problem(line, Path(directory))) for line in blocks]
    found += [(line, problem(line, Path(directory), part=not whole)) for line in named]
    return [f"{' '.join(line.words)}: {wrong}" for line, wrong in found if wrong]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_command_of_a_page_starts(page: Path, ranks, tmp_path: Path) -> None:
    text = page.read_text("utf-8")
    if not (_BLOCK.search(text) or _SPAN.search(text)):
        return
    arguments = (text, str(tmp_path), page.name.startswith("README"))
    [found] = ranks(1, problems, *arguments, setup=understood.SETUP, backend=None)
    assert not found, "\n".join(found)


def runs(line: CommandLine) -> bool:
    """Whether the command is executed as it stands."""
    program, *words = line.words
    return program == "mindspeed" and words[0] in RUN and not {*words} & {*NEEDS}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_commands_that_need_no_data_run(ranks, tmp_path: Path) -> None:
    lines = {
        tuple(line.words): None
        for page in PAGES
        for line in commands_of(page.read_text("utf-8"), str(tmp_path))[0]
        if runs(line)
    }
    assert {words[1] for words in lines} == set(RUN)
    wrong = []
    for words in lines:
        arguments = (words[1:], str(tmp_path))
        [result] = ranks(1, run, *arguments, setup=understood.SETUP, backend=None, timeout=240)
        if result[0]:
            wrong.append(f"{' '.join(words)}: {result[2]}")
    assert not wrong, "\n".join(wrong)


WRONG = {
    "mindspeed pretrain FLAGS --tensor-model-paralel-size 2": "--tensor-model-paralel-size",
    "mindspeed pretrain FLAGS --lr much": "--lr",
    "mindspeed pretrain FLAGS --nproc 3 --tensor-model-parallel-size 2": "3 ranks",
    "mindspeed finetune --load hf:model --data chat.jsonl --lora-rank 8": "--lora-rank",
    "mindspeed pipeline plan --pp 4 --microbathces 8": "--microbathces",
    "mindspeed plan --cluster h100 -- FLAGS --sequence-paralel": "--sequence-paralel",
    "mindspeed plan qwen3-9b --on 16xh100": "qwen3-9b",
    "mindspeed compare --bisect d -- mindspeed pretrain FLAGS -- mindspeed pretrain --x 1": "--x",
    "mindspeed comparre a b": "comparre",
    "torchrun --nproc-per-nodes 8 -m mindspeed pretrain FLAGS": "--nproc-per-nodes",
    "torchrun --nproc-per-node 2 -m mindspeed pretrain FLAGS --types2": "--types2",
    "python benchmarks/memory.py --devise cpu": "devise",
    "python benchmarks/no_such.py": "no_such",
    "bash examples/llama/no_such.sh": "no_such",
    "make tests": "tests",
    "make test WORKER=1": "WORKER",
    "pip install 'mindspeed[plots]'": "plots",
    "pip install -r tools/frameworks/no_such.txt": "no_such",
    "MINDSPEED_DEVISE=cpu mindspeed doctor": "MINDSPEED_DEVISE",
    "export COC_PARALLEL_NUMBER=4": "COC_PARALLEL_NUMBER",
    "--swap-atention": "--swap-atention",
    "sorcery --now": "sorcery",
    "mindspeed recipes show llama2-70b > no/such/mine.yaml": "no/such",
    "mindspeed plan -- $JOB": "JOB",
    "srun --nodes 1 bash -c 'mindspeed pretrain FLAGS --typpes'": "--typpes",
    "curl http://127.0.0.1:8000/v1/completion -d '{}'": "/v1/completion",
}


@pytest.mark.parametrize("block", WRONG)
def test_a_wrong_command_is_found(block: str, ranks, tmp_path: Path) -> None:
    text = f"```bash\n{block}\n```\n"
    [found] = ranks(1, problems, text, str(tmp_path), setup=understood.SETUP, backend=None)
    assert len(found) == 1 and WRONG[block] in found[0]


def test_a_wrong_flag_in_a_sentence_is_found(ranks, tmp_path: Path) -> None:
    text = "`mindspeed plan --check` counts, `mindspeed plan --chekc` does not; `mindspeed plan`.\n"
    [found] = ranks(1, problems, text, str(tmp_path), setup=understood.SETUP, backend=None)
    assert len(found) == 1 and "--chekc" in found[0]


def test_bash_reads_a_page_as_a_reader_does(tmp_path: Path) -> None:
    text = """```bash
JOB="--bf16 --nproc 2"    # a comment
for n in 1 2; do
    mindspeed pretrain $JOB \\
        --save "run $n" > log
done
```
and then
```bash
A=1 mindspeed plan -- $JOB
```
"""
    blocks, named = commands_of(text, str(tmp_path))
    job = ["--bf16", "--nproc", "2"]
    assert [line.words for line in [*blocks, *named]] == [
        *(["mindspeed", "pretrain", *job, "--save", f"run {n}"] for n in (1, 2)),
        ["mindspeed", "plan", "--", *job],
        *([":"], [":"]),
    ]
    assert blocks[2].variables == {"A": "1"}
