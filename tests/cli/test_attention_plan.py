"""``mindspeed attention plan``: masks, table, JSON, picture, errors."""

from __future__ import annotations

import json

import pytest

from mindspeed.attention import Mask, Region
from mindspeed.cli.attention import corners, mask_of
from mindspeed.cli.main import main


def plan(*words: object) -> int:
    return main(["attention", "plan", *map(str, words)])


def test_the_table_has_every_algorithm_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--mask", "causal", "--seq-length", "4K", "--cp", 4, "--heads", 8) == 0
    printed = capsys.readouterr().out
    for name in ("ring", "all gather", "needed", "ulysses", "hybrid 2 x 2", "adaptive", "mesh 2 x"):
        assert name in printed


def test_json_has_the_numbers_of_every_rank(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("1024\n512\n300, 212\n")
    picture = tmp_path / "plan.svg"
    algorithms = "ring,adaptive"
    assert plan("--mask", f"packed:{lengths}", "--cp", 2, "--algo", algorithms, "--heads", 4,
                "--kv-heads", 2, "--head-dim", 64, "--json", "--plot", picture) == 0  # fmt: skip
    data = json.loads(capsys.readouterr().out)
    assert data["tokens"] == 2048
    ring, adaptive = data["algorithms"]
    row = 2 * 2 * 64 * 2
    assert ring["bytes_forward"] == [1024 * row, 1024 * row]
    assert adaptive["balance"] >= 0.995
    assert sum(adaptive["work"]) == sum(ring["work"]) == 4 * data["pairs"]
    assert sum(b - a for a, b in adaptive["layout"][0]) == 1024
    assert max(adaptive["bytes_forward"]) < max(ring["bytes_forward"])
    assert picture.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mask", "causal"], "needs --seq-length"),
        (["--mask", "window", "--seq-length", "64"], "'window' is none of causal, full"),
        (["--mask", "lengths:3,5", "--seq-length", "9"], "8 tokens, --seq-length is 9"),
        (["--mask", "packed:/nowhere", "--cp", "2"], "cannot read the lengths"),
        (["--mask", "lengths:3,x"], "'x' is not a number of tokens"),
        (["--seq-length", "64", "--algo", "rings"], "--algo 'rings' is none of all, ring"),
        (["--seq-length", "64", "--cp", "65"], "--cp 65 is more than the 64 tokens"),
        (["--seq-length", "64", "--heads", "4", "--kv-heads", "3"], "must divide --heads"),
        (["--seq-length", "64", "--algo", "hybrid", "--ulysses-degree-in-cp", "3"], "degree 3"),
        (["--seq-length", "64", "--algo", "ring", "--plot", "plan.txt"], "must end in .png"),
    ],
)
def test_errors_say_what_to_change(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(*words) == 1
    assert message in capsys.readouterr().err


def test_masks() -> None:
    assert mask_of("window:4", 16) == Mask.causal(16, window=4)
    assert mask_of("prefix:4", 16) == Mask.documents((0, 16), prefix=4)
    assert mask_of("full", 16) == Mask.full(16)
    assert mask_of("lengths:4,12", None) == Mask.documents((0, 4, 16))


@pytest.mark.parametrize(
    "region",
    [Region(0, 8, 0, 8), Region(2, 9, 1, 9, hi=0), Region(0, 12, 0, 12, lo=-3, hi=0)],
)
def test_outlines_enclose_the_area_of_their_pairs(region: Region) -> None:
    region = region.crop(0, 100, 0, 100) or region
    points = corners(region)
    area = abs(
        sum(a[0] * b[1] - b[0] * a[1] for a, b in zip(points, points[1:] + points[:1], strict=True))
    ) / 2  # fmt: skip
    # A diagonal of the outline is a straight line through squares: half a pair a row at most.
    assert abs(area - region.area()) <= region.q1 - region.q0
