"""The ledger of upstream's defects: every row says what is wrong and what is done about it."""

from __future__ import annotations

import pytest

from mindspeed.adaptor.upstream import FILE, load_reports
from mindspeed.cli.main import main
from mindspeed.errors import ConfigError

ROW = "- {report: Megatron-LM PR 1, wrong: sums, state: open, why: not tried}"


def test_the_command_counts_and_filters(capsys):
    reports = load_reports(FILE)
    assert main(["patches", "--upstream"]) == 0
    assert f"{len(reports)} reports: " in capsys.readouterr().out
    assert main(["patches", "--upstream", "--state", "open"]) == 0
    out = capsys.readouterr().out
    still = [one for one in reports if one.state == "open"]
    assert all(one.report in out for one in still)
    assert f"{len(still)} reports: {len(still)} open" in out
    assert main(["patches", "--state", "open"]) != 0
    assert "--state is for --upstream" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ROW.replace("not tried", "''"), "row 1: open needs why"),
        (ROW.replace("open", "fixed"), "state must be one of repaired, refused, not applicable"),
        (ROW.replace("why", "reason"), "reason is none of report, wrong, state"),
        (ROW.replace("open", "repaired"), "row 1: repaired needs by"),
        (ROW.replace("sums", "7"), "row 1: fields with texts are needed"),
        (f"{ROW}\n{ROW}", "Megatron-LM PR 1: more than one row"),
        ("report: 1", "a list of reports is needed"),
    ],
)
def test_rows_that_say_too_little_are_refused(tmp_path, text, message):
    file = tmp_path / "upstream.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_reports(file)
