"""Completion scripts: what a shell offers is what the parsers take."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from mindspeed.cli import completion
from mindspeed.cli.completion import SCRIPTS, Words, words_of_command

WORDS = {
    "attention": words_of_command("attention"),
    "data": Words(("--debug", "--load"), ("show", "lengths")),
    "merge-lora": Words(("--format", "--load"), (), {"--format": ("hf", "megatron")}),
}
ASK = """
ask() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _mindspeed; echo "${COMPREPLY[*]}"; }
ask mindspeed m
ask mindspeed attention ""
ask mindspeed attention --cp
ask mindspeed attention plan --dtype f
ask mindspeed merge-lora --format ""
ask mindspeed merge-lora --load ""
"""


def test_words_are_those_of_the_parser():
    words = WORDS["attention"]
    assert {"--cp", "--mask", "--debug", "--help"} <= set(words.flags)
    assert words.places == ("plan",)
    assert words.values["--dtype"] == ("bf16", "fp16", "fp32")


def test_commands_that_take_flags_of_training_have_them(monkeypatch):
    monkeypatch.setattr(completion, "_training", lambda: Words(("--lr",)))
    assert {"--lr", "--types", "--devices"} <= set(words_of_command("check").flags)
    assert "--lr" in words_of_command("pretrain").flags
    assert "--lr" not in WORDS["attention"].flags


def test_bash_offers_commands_places_flags_and_values():
    text = SCRIPTS["bash"](WORDS) + ASK
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "merge-lora", "plan", "--cp --cp-window-size", "fp16 fp32", "hf megatron", "",
    ]  # fmt: skip


@pytest.mark.parametrize("shell", SCRIPTS)
def test_every_word_is_in_the_script_and_the_shell_reads_it(shell):
    text = SCRIPTS[shell](WORDS)
    for one in WORDS.values():
        assert all(flag[2:] in text for flag in one.flags)
        assert all(" ".join(choices) in text for choices in one.values.values())
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=text, text=True, check=True)
