"""``mindspeed moe plan``: table, JSON, pictures, errors."""

from __future__ import annotations

import json
import re

import pytest

from mindspeed.cli.main import main
from mindspeed.moe.comparison import ENTRIES

SIZES = ("--hidden-size", 64, "--num-experts", 8, "--moe-router-topk", 2,
         "--moe-ffn-hidden-size", 128)  # fmt: skip


def plan(*words: object) -> int:
    return main(["moe", "plan", *map(str, words)])


def prices(*words: object, capsys: pytest.CaptureFixture[str]) -> dict[str, dict]:
    assert plan(*words, "--json") == 0
    return {one["name"]: one for one in json.loads(capsys.readouterr().out)["programs"]}


def test_the_table_has_every_program_in_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--model", "deepseek-v3", "--tp", 2, "--ep", 16, "--text") == 0
    printed = capsys.readouterr().out
    table, _, drawn = printed.partition("\nmegatron\n")
    for name in ENTRIES:
        assert re.search(rf"^ *{name}\b.* [MGkT]?B *$|^{name}: not here: ", table, re.MULTILINE), (
            name
        )
    assert "…" not in table and max(map(len, table.splitlines())) <= 80
    assert re.search(r"^compute .*experts", drawn, re.MULTILINE)


def test_bytes_and_exposed_collectives(capsys: pytest.CaptureFixture[str]) -> None:
    """N = 128, H = 64, k = 2, two ranks, four bytes: the figures of one layer."""
    words = (*SIZES, "--tokens", 128, "--ep", 2, "--dtype", "fp32")
    found = prices(*words, capsys=capsys)
    rows, probs, counts = 128 * 64 * 4, 128 * 4, 8 * 8
    assert found["megatron"]["sent"] == 4 * rows + 2 * probs + counts
    assert found["megatron"]["calls"] == {"forward": 4, "backward": 3}
    assert found["megatron"]["exposed"] == {"forward": 4, "backward": 3}
    assert found["async"]["exposed"] == {"forward": 2, "backward": 2}
    assert found["overlap"]["exposed"] == {"forward": 2, "backward": 1}
    assert sum(found["overlap"]["calls"].values()) == 5
    assert found["overlap"]["sent"] == 2 * rows + 2 * rows * (64 + 4) // 64 + counts
    assert found["overlap-level0"]["sent"] == found["overlap"]["sent"] + rows
    assert found["allgather"]["sent"] == 4 * rows + 128 * 8 * (1 + 4 + 4)
    assert found["allgather-async"]["sent"] == 4 * rows + 128 * 2 * (2 + 4 + 4)
    kept = [found[name]["kept"] for name in ("overlap", "overlap-level0", "overlap-level1")]
    assert kept == [256 * (64 + 3 * 128) * 4, 256 * 2 * 128 * 4, 0]
    shared = prices(*words, "--moe-shared-expert-intermediate-size", 32, capsys=capsys)
    assert shared["overlap"]["exposed"] == {"forward": 0, "backward": 0}
    assert shared["allgather-overlap"]["exposed"] == {"forward": 0, "backward": 0}


@pytest.mark.parametrize(("tp", "ep", "ratio"), [(2, 2, 2.0), (4, 2, 4.0), (8, 4, 8.0)])
def test_tp_extends_ep(tp, ep, ratio, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of tokens take 2, 4, 8 times fewer bytes."""
    found = prices("--hidden-size", 2**20, *SIZES[2:], "--num-experts", 32, "--tp", tp, "--ep", ep,
                   capsys=capsys)  # fmt: skip
    assert found["megatron"]["sent"] / found["extended"]["sent"] == pytest.approx(ratio, rel=1e-3)


def test_padded_rows_need_no_counts(capsys: pytest.CaptureFixture[str]) -> None:
    """128 tokens, two of 8 experts each: 32 rows for each expert, 64 with twice the room."""
    words = (*SIZES, "--tokens", 128, "--ep", 2, "--programs", "overlap,padded")
    found = prices(*words, capsys=capsys)
    assert found["padded"]["sent"] == found["overlap"]["sent"] - 8 * 8
    assert found["padded"]["calls"] == {"forward": 2, "backward": 2}
    twice = prices(*words, "--moe-train-capacity-factor", 2, capsys=capsys)
    assert twice["padded"]["sent"] == 2 * found["padded"]["sent"]
    assert twice["padded"]["kept"] == 2 * found["padded"]["kept"]
    four = prices(*words, "--moe-router-topk", 4, capsys=capsys)
    assert "top-1 and top-2" in four["padded"]["reason"]


def test_tokens_sent_once(capsys: pytest.CaptureFixture[str]) -> None:
    """34 % of the rows less for DeepSeek-V3 on 8 ranks; between 4 nodes 2.71 instead of 6.00."""
    words = ("--model", "deepseek-v3", "--node-size", 8, "--programs", "overlap,dedup,hierarchical")
    one = prices(*words, "--ep", 8, capsys=capsys)
    assert one["dedup"]["sent"] / one["overlap"]["sent"] == pytest.approx(0.66, abs=0.005)
    assert "several nodes" in one["hierarchical"]["reason"]
    four = prices(*words, "--ep", 32, capsys=capsys)
    rows = {
        name: found["sent_between_nodes"] / (4 * 4096 * 7168 * 2) for name, found in four.items()
    }
    assert rows["overlap"] == pytest.approx(6.00, abs=0.01)
    assert rows["hierarchical"] == pytest.approx(2.71, abs=0.01)


def test_a_network_between_nodes_is_slower(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", "qwen3-30b-a3b", "--ep", 16, "--programs", "megatron")
    one = prices(*words, "--node-size", 16, capsys=capsys)["megatron"]
    two = prices(*words, capsys=capsys)["megatron"]
    assert one["sent"] == two["sent"]
    assert (one["sent_between_nodes"], two["seconds"] > one["seconds"]) == (0, True)
    assert two["sent_between_nodes"] / two["sent"] == pytest.approx(8 / 15, rel=1e-3)


def test_attention_is_that_of_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    """Mixtral: 32 heads and 8 groups of 128, hidden 4096; the mask leaves half of the square."""
    words = ("--model", "mixtral-8x7b", "--tokens", "8K", "--tflops", 1e3, "--programs", "megatron")

    def attention(*more: object) -> float:
        found = prices(*words, *more, capsys=capsys)["megatron"]["intervals"]
        return sum(one["end"] - one["start"] for one in found if one["name"] == "attn")

    products = 8192 * 4096 * 128 * (32 + 2 * 8 + 32)
    for length, more in ((8192, ()), (2048, ("--seq-length", 2048))):
        pairs = 8192 * length / 2 * 32 * 128 * 2
        assert attention(*more) == pytest.approx(3 * 2 * (products + pairs) / 1e15)
    assert attention("--tp", 2) == pytest.approx(attention() / 2)


def test_forward_and_backward_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", "qwen3-30b-a3b", "--programs", "megatron,1f1b")
    found = prices(*words, capsys=capsys)
    assert found["1f1b"]["forward_seconds"] == found["1f1b"]["seconds"]
    computing = [one["seconds"] - one["exposed_seconds"] for one in found.values()]
    assert computing[0] == pytest.approx(computing[1])


def test_pictures(tmp_path) -> None:
    picture = tmp_path / "layer.svg"
    words = ("--model", "mixtral-8x7b", "--programs", "megatron,overlap")
    assert plan(*words, "--plot", picture) == 0
    drawn = picture.read_text()
    assert "weight gradients of experts" in drawn and "exposed" in drawn


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "--hidden-size is missing"),
        (("--model", "llama3-8b"), "--model llama3-8b has no experts"),
        (("--model", "mixtrl"), "closest: mixtral"),
        ((*SIZES, "--moe-router-topk", 9), "--moe-router-topk 9 is more than --num-experts 8"),
        ((*SIZES, "--ep", 3), "--ep 3 does not divide --num-experts 8"),
        ((*SIZES, "--etp", 3), "--etp 3 does not divide the width of an expert, 128"),
        ((*SIZES, "--tp", 2, "--tokens", 101), "--tp 2 does not divide --tokens 101"),
        ((*SIZES, "--etp", 16), "--node-size 8: slices of an expert"),
        ((*SIZES, "--tokens", 0), "'0' is not a number of tokens"),
        ((*SIZES, "--tokens", "9" * 13), "is not a number of tokens"),
        ((*SIZES, "--num-experts", 10**6), "--num-experts"),
        ((*SIZES, "--link-bandwidth", 0), "--link-bandwidth"),
        ((*SIZES, "--link-latency", "nan"), "--link-latency"),
        ((*SIZES, "--programs", "fast"), "'fast' is none of all"),
        ((*SIZES, "--programs", "extended"), "no program exists for these sizes"),
        ((*SIZES, "--plot", "x.gif"), "the file must end in"),
    ],
)
def test_bad_input_is_one_message(words, message, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert plan(*words) != 0
    except SystemExit as stopped:
        assert stopped.code == 2
    printed = capsys.readouterr().err
    assert message in " ".join(printed.split()), printed
    assert "Traceback" not in printed
