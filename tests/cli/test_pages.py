"""The page that an error names: it exists, and is about the flag of the message."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed import errors
from mindspeed.cli import main as cli
from mindspeed.cli.main import OF_ERRORS, _pages_of_flags, page_of
from mindspeed.errors import ConfigError, DamagedCheckpoint, DataError, PatchTooLate, TrainingError
from tests.docs.test_docs import anchors

DOCS = Path(__file__).parents[2] / "docs"


def test_every_page_and_every_anchor_exists():
    pages = {*OF_ERRORS.values(), *_pages_of_flags().values()}
    assert len(pages) > 60
    for page in sorted(pages):
        file, _, anchor = page.partition("#")
        assert (DOCS / file).is_file(), page
        assert not anchor or anchor in anchors(DOCS / file), page


@pytest.mark.parametrize(
    ("error", "page"),
    [
        (ConfigError("--bf16 and --guard-interval 0"), "guards.md"),
        (ConfigError("--fp16 not with --use-nanopipe"), "features/nanopipe.md"),
        (ConfigError("--lr 0 is wrong"), None),
        (DataError("a.json is no data"), "data.md#what-it-reads"),
        (DataError("--moe-expert-placement f.json is damaged"), "features/moe-expert-placement.md"),
        (DamagedCheckpoint("x"), "training.md#checkpoints"),
        (PatchTooLate("x"), "adaptor.md"),
        (TrainingError("the loss is nan"), None),
        (ValueError("--use-nanopipe"), None),
    ],
)
def test_the_page_is_that_of_the_flag_or_of_the_kind_of_error(error, page):
    assert page_of(error) == page


def test_a_command_prints_it_after_the_message(monkeypatch, capsys):
    monkeypatch.delenv(errors.DEBUG, raising=False)

    def dispatch(command: str, rest: list[str]) -> int:
        raise DataError("a.json is no data")

    monkeypatch.setattr(cli, "dispatch", dispatch)
    assert cli.main(["recipes"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "mindspeed recipes: a.json is no data",
        "  read docs/data.md#what-it-reads",
    ]
