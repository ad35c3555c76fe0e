"""``mindspeed plan``: what is printed, drawn and written of a search's result."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.support.lazy import needs

needs("megatron.core", "matplotlib")

from mindspeed.cli import plan as command
from mindspeed.cli import plan_run
from mindspeed.cli.main import main
from mindspeed.cli.plan import dimensions, fixed
from mindspeed.planner.layout import Recompute
from mindspeed.planner.search.result import Closest, Help
from tests.cli import plan_search_job
from tests.cli.plan_search_job import BEST, FLAGS, FOUND, GIB, SLOW, Priced, invented
from tests.support import commands_job


@pytest.fixture
def plan(monkeypatch, capsys):
    def run(*words, found=FOUND):
        module, calls = invented(found)
        monkeypatch.setitem(sys.modules, "mindspeed.planner.search.plan", module)
        monkeypatch.setattr(plan_run, "install_adaptor", lambda: None)
        status = main(["plan", *map(str, words), *FLAGS])
        return status, capsys.readouterr(), calls

    return run


def test_candidates_ties_and_flags(plan):
    status, printed, [(flags, cluster, options)] = plan(
        "--cluster", "h100", "--fix", "tp=2,recompute=full:3", "--search", "tp,pp", "--top", 3
    )
    assert status == 0, printed.err
    assert (flags, cluster, options["top"]) == (list(FLAGS), "h100", 3)
    assert options["fix"] == {"tp": 2, "recompute": Recompute(layers=3)}
    assert options["search"] == ("tp", "pp")
    rows = [line.split() for line in printed.out.splitlines()]
    best = next(row for row in rows if row[:2] == ["1", "="])
    assert best[2:4] == ["tp=2", "pp=2"]
    assert best[-7:] == ["1.500", "1,234", "43.2%", "12.5%", "30.000", "matrix", "products"]
    assert any("~31.000" in row for row in rows) and "~ estimated within 3 %" in printed.out
    assert ["2", "="] in [row[:2] for row in rows] and ["3", "="] not in [row[:2] for row in rows]
    assert "2 are within 5 % of the fastest" in printed.out
    assert "600  need more" in printed.out and "100  fit" in printed.out
    start = "torchrun --nnodes=2 --nproc-per-node=8 -m mindspeed pretrain"
    assert printed.out.endswith(f"\n{start} {' '.join(FLAGS)}\n")


def test_json_files_and_picture(ranks, tmp_path):
    words = "--json --out plan --plot plan.svg --cluster h100 --devices 16,32"
    [(status, text, errors)] = ranks(
        1, plan_search_job.run, words.split(), str(tmp_path), setup=commands_job.SETUP, backend=None
    )
    assert status == 0, errors
    assert [one["devices"] for one in json.loads(text)] == [16, 32]
    assert (tmp_path / "plan.svg").read_text().startswith("<?xml")
    assert "wrote plan" in errors
    for devices in (16, 32):
        where = tmp_path / f"plan/{devices}-devices"
        assert json.loads((where / "plan.json").read_text())["ties"] == 2
        assert (where / "candidate-1.sh").read_text() == (
            f"torchrun --nnodes={devices // 8} --nproc-per-node=8 -m mindspeed pretrain "
            f"{' '.join(FLAGS)}\n"
        )
        recipe = (where / "candidate-3.yaml").read_text()
        assert recipe.startswith("# tp=2 pp=4 ") and "tensor_model_parallel_size: 2" in recipe
    files = {path.name for path in (tmp_path / "plan").rglob("*") if path.is_file()}
    assert files == {
        "plan.json",
        *(f"candidate-{n}.{s}" for n in (1, 2, 3) for s in ("sh", "yaml")),
    }


def test_nothing_fits(plan, tmp_path):
    help_ = Help("full recomputation", SLOW, 70 * GIB, True)
    closest = Closest(BEST, Priced(1.5, 80 * GIB), 3 * GIB, (help_,))
    found = replace(FOUND, candidates=(), front=(), closest=closest, fitting=0)
    picture = tmp_path / "plan.svg"
    status, printed, _ = plan("--cluster", "h100", "--plot", picture, found=found)
    assert status == 3, printed.err
    assert "no layout fits" in picture.read_text()  # matplotlib writes texts as comments, too
    assert "nothing fits; closest: tp=2 pp=2 " in printed.out
    assert "it needs 80.000 GiB, 3.000 GiB too much" in printed.out
    row = next(line for line in printed.out.splitlines() if "full recomputation" in line)
    assert row.split() == ["full", "recomputation", "70.000", "yes"]


def test_interrupted(plan):
    status, printed, _ = plan("--cluster", "h100", found=replace(FOUND, interrupted=True))
    assert status == 130
    assert "interrupted: the best until then" in printed.out
    assert printed.out.endswith(f"mindspeed pretrain {' '.join(FLAGS)}\n")


def test_the_command_starts_all_ranks():
    """On one node by our launcher, on several by torchrun, with what the user has said."""
    flags, more = ["--bf16"], ["--lr", "1"]
    words = plan_run.launch_words
    assert words("--nnodes=3", "h100", 24) == "--nnodes=3" and words(None, "h100", 1) is None
    assert words(None, "h100", 12) is None  # no whole nodes
    one, two = words(None, "h100", 4), words(None, "h100", 16)
    assert plan_run.command(flags, more, one) == "mindspeed pretrain --lr 1 --nproc 4"
    assert plan_run.command(["x.py"], more, one).startswith("torchrun --nproc-per-node=4 /")
    start = "torchrun --nnodes=2 --nproc-per-node=8 -m mindspeed pretrain --lr 1"
    assert plan_run.command(flags, more, two) == start
    given = plan_run.command(flags, ["--nproc", "16"], two)
    assert given == "mindspeed pretrain --nproc 16"


def test_sigterm_is_ctrl_c_with_another_status(monkeypatch, capsys):
    """The plans of later numbers of devices are not begun."""
    begun = []

    def search(flags, cluster, **options):
        begun.append(options["devices"])
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # waits for what is printed
        return replace(FOUND, interrupted=True, devices=options["devices"])

    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setitem(sys.modules, "mindspeed.planner.search.plan", SimpleNamespace(plan=search))
    monkeypatch.setattr(plan_run, "install_adaptor", lambda: None)
    words = ["--cluster", "h100", "--devices", "8,16", "--json", "--", *FLAGS]
    assert main(["plan", *words]) == 143
    assert begun == [8] and signal.getsignal(signal.SIGTERM) is handler
    [found] = json.loads(capsys.readouterr().out)
    assert found["interrupted"] and found["devices"] == 8


def test_sigterm_before_a_result_has_its_status(monkeypatch, capsys):
    def search(flags, cluster, **options):
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setitem(sys.modules, "mindspeed.planner.search.plan", SimpleNamespace(plan=search))
    monkeypatch.setattr(plan_run, "install_adaptor", lambda: None)
    with pytest.raises(SystemExit) as end:
        main(["plan", "--cluster", "h100", "--devices", "8", "--", *FLAGS])
    assert end.value.code == 143
    assert "nothing was found" in capsys.readouterr().err


WRONG = {
    "no-cluster": ([], "--cluster is missing"),
    "unknown-dimension": (["--fix", "tpp=2"], "closest: tp"),
    "no-value": (["--fix", "tp"], "NAME=VALUE"),
    "no-number": (["--fix", "tp=many"], "number of at least 1"),
    "no-such-feature": (["--fix", "memory=swap"], "swap-attention"),
    "dimension": (["--search", "tp,layers"], "no dimension of the search"),
    "with-check": (["--check", "--top", "2"], "--top belongs to a search"),
    "devices": (["--check", "--devices", "2,4"], "one number of --devices"),
    "whole": (["--whole", "--cluster", "h100"], "--whole belongs to --check"),
    "features": (["--plan-pipeline", "--measure", "black"], "--measure has no effect with --plan"),
    "checked": (["--plan-pipeline", "--check"], "--check has no effect with --plan-pipeline"),
    "jobs": (["--plan-pipeline", "--jobs", "1"], "--jobs has no effect with --plan-pipeline"),
    "zero": (["--devices", "0"], "must be from 1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_flags_are_named(case, capsys):
    words, message = WRONG[case]
    try:
        status = main(["plan", *words])
    except SystemExit as stop:
        status = stop.code
    assert status in (1, 2)
    assert message in " ".join(capsys.readouterr().err.split())


def test_values():
    assert fixed("recompute=core_attn+mlp,memory=none,schedule=none") == {
        "recompute": Recompute(modules=("core_attn", "mlp")), "memory": (), "schedule": None,
    }  # fmt: skip
    assert fixed("split=2+1+1,cp_algorithm=hybrid:4") == {
        "split": (2, 1, 1), "cp_algorithm": "hybrid:4",
    }  # fmt: skip
    assert dimensions("tp, mbs") == ("tp", "mbs")
    assert command.memory_size("1.5GiB") == 3 * 2**29
    assert command.memory_size("2") == 2**31


def test_a_script_has_its_command_and_words_of_torchrun(plan):
    script = ["pretrain_gpt.py", "--num-layers", "2"]
    launch = "--nnodes=2 --nproc-per-node=8"
    words = plan_run.command(script, ["--lr", "1"], launch).split()
    assert words[:3] == ["torchrun", *launch.split()] and words[-2:] == ["--lr", "1"]
    assert words[3].endswith("/pretrain_gpt.py")
    words = plan_run.command(script, ["--lr", "1"], None).split()
    assert words[0] == "python" and words[-2:] == ["--lr", "1"]
    _, printed, _ = plan("--cluster", "h100", "--launch", launch)
    assert f"torchrun {launch} -m mindspeed pretrain --model" in printed.out
    status, printed, _ = plan("--cluster", "h100", "--measure", "mixed", "--devices", "8,16")
    assert status and "one number of --devices" in printed.err
