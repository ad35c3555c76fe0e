"""Every error of a command is one message; --debug adds the traceback; also in ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mindspeed.cli import main as cli
from mindspeed.errors import DEBUG, ConfigError
from mindspeed.training.fail_together import _describe


@pytest.fixture
def failing(monkeypatch, tmp_path):
    """``fail(error, *flags)``: run ``mindspeed recipes`` where it raises ``error``."""
    monkeypatch.delenv(DEBUG, raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)

    def fail(error: BaseException, *flags: str) -> int:
        def dispatch(command: str, rest: list[str]) -> int:
            assert "--debug" not in rest
            raise error

        monkeypatch.setattr(cli, "dispatch", dispatch)
        monkeypatch.setenv(DEBUG, "")  # what --debug sets is undone with the test
        return cli.main(["recipes", *flags])

    return fail


def test_an_unexpected_error_is_one_line_and_its_traceback_a_file(failing, capsys):
    assert failing(KeyError("x\ny")) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mindspeed recipes: unexpected KeyError: ")
    log = Path(re.search(r"traceback: (\S+\.log)", line)[1])
    assert "Traceback (most recent call last)" in log.read_text()
    assert log.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "error, text",
    [
        (ConfigError("--lr 0 is wrong"), "mindspeed recipes: --lr 0 is wrong\n"),
        (FileNotFoundError(2, "No such file", "/x"), "mindspeed recipes: /x: No such file\n"),
    ],
)
def test_errors_with_a_message_for_the_user_are_that_message(error, text, failing, capsys):
    assert failing(error) == 1
    assert capsys.readouterr().err == text


def test_debug_prints_the_traceback(failing, capsys):
    assert failing(ConfigError("--lr 0 is wrong"), "--debug") == 1
    text = capsys.readouterr().err
    assert "Traceback (most recent call last)" in text
    assert text.endswith("ConfigError: --lr 0 is wrong\n")


def test_debug_after_a_double_dash_is_not_ours():
    assert cli._without_debug(["a", "--", "--debug"]) == (["a", "--", "--debug"], False)
    assert cli._without_debug(["--debug", "a", "--", "b"]) == (["a", "--", "b"], True)


def test_an_interrupt_is_reported_in_one_word(failing, capsys):
    assert failing(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "mindspeed recipes: interrupted\n"


def test_errors_of_a_rank_are_one_line_too(monkeypatch, tmp_path):
    monkeypatch.delenv(DEBUG, raising=False)
    line = _describe("pretrain", 3, ValueError("odd"))
    assert line.startswith("mindspeed pretrain [rank 3]: unexpected ValueError: odd (")
    assert "\n" not in line
    Path(re.search(r"traceback: (\S+\.log)", line)[1]).unlink()
    monkeypatch.setenv(DEBUG, "1")
    assert "ValueError: odd" in _describe("pretrain", 3, ValueError("odd"))
