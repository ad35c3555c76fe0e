"""``--auto-tuning``, ``--auto-settings``, ``--auto-parallel``: what is started, what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from mindspeed.errors import ConfigError
from mindspeed.features import registry
from mindspeed.features.compatibility import auto_tuning as command
from mindspeed.features.compatibility.auto_tuning import AutoTuning
from mindspeed.processes import free_port

JOB = ["--num-layers", "4", "--bf16"]


def started(device_name="", job=JOB, **options):
    words = AutoTuning(**options).plan_command(job, device_name)
    assert words[:4] == [sys.executable, "-m", "mindspeed", "plan"]
    middle = words.index("--")
    return dict(zip(words[4:middle:2], words[5:middle:2], strict=True)), words[middle + 1 :]


def test_the_process_plans_for_the_devices_that_are_named():
    given, job = started(auto_tuning=True)
    assert given == {"--cluster": "generic", "--devices": "16", "--out": "auto_tuning_dir"}
    assert job == JOB
    given, _ = started("NVIDIA H100 80GB HBM3", auto_tuning=True, auto_tuning_ranks=64)
    assert (given["--cluster"], given["--devices"]) == ("h100", "64")
    given, _ = started("Ascend910_9392", auto_settings=True, target_nnodes=4, nproc_per_node=16)
    assert (given["--cluster"], given["--devices"], given["--out"]) == ("ascend-910-93", "64", ".")
    assert given["--launch"] == "--nnodes=4 --nproc-per-node=16"
    given, _ = started(
        auto_parallel=True, nnodes=2, nproc_per_node=8, master_addr="10.0.0.1", master_port=6000,
        prof_file="mine.json",
    )  # fmt: skip
    assert (given["--devices"], given["--cluster"]) == ("16", "mine.json")
    assert given["--search"] == "tp,cp,cp_algorithm,pp,mbs"
    launch = "--nnodes=2 --nproc-per-node=8 --master-addr=10.0.0.1 --master-port=6000"
    assert given["--launch"] == launch
    given, _ = started(auto_parallel=True, simulated_nnodes=8, simulated_nproc_per_node=4)
    assert given["--devices"] == "32"
    kind = "mixed"
    given, _ = started(auto_settings=True, auto_settings_type=kind, nproc_per_node=8)
    assert (given["--devices"], given["--measure"]) == ("8", "mixed")


def test_the_job_is_planned_without_the_flags_that_ask_for_a_plan():
    words = "train.py --bf16 --auto-tuning --auto-tuning-ranks 8 --nodes=2 --lr 1 --auto-parallel"
    assert command.without_options(words.split(), AutoTuning) == (
        ["train.py", "--bf16", "--lr", "1"]
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("auto_tuning_ranks=4", "--auto-tuning-ranks: has no effect alone; add --auto-tuning"),
        ("prof_file='x'", "--prof-file: has no effect alone; add --auto-tuning or --auto-settings"),
        ("nnodes=2", "--nnodes: has no effect alone; give it to torchrun, before the script"),
        ("auto_tuning=1, auto_settings=1", "--auto-tuning: is another name for --auto-settings"),
        ("auto_tuning=1, auto_settings_type='white'", "--auto-settings-type: has no effect alone"),
        ("auto_tuning=1, master_port=3", "--master-port: has no effect on one node"),
        ("auto_tuning=1, nnodes=2", "--nnodes: has no effect without --nproc-per-node"),
        ("auto_tuning=1, nnodes=2, nproc_per_node=1, node_rank=2", "nodes are 0 to 1"),
        ("auto_parallel=1", "--auto-parallel: has no devices; give --nnodes"),
        ("auto_parallel=1, nproc_per_node=1, simulated_nnodes=2", "needs --simulated-nproc-per"),
        ("auto_settings=1, target_nnodes=2", "--target-nnodes: counts nodes; give --nproc"),
        (
            "auto_settings=1, target_nnodes=2, nproc_per_node=2, auto_settings_ranks=4",
            "--target-nnodes: and --auto-settings-ranks both say how many",
        ),
        ("auto_settings=1, auto_settings_type='mixed'", "starts ranks here; give --nproc-per-node"),
        (
            "auto_settings=1, auto_settings_type='black', nproc_per_node=4, auto_settings_ranks=8",
            "plans for 8 devices and measures on 4; give --auto-settings-ranks 4",
        ),
        (
            "auto_settings=1, auto_settings_type='mixed', nproc_per_node=4, nnodes=2",
            "measures on one node; plan with white",
        ),
    ],
)
def test_a_flag_without_effect_is_refused(options, message):
    values = {k: bool(v) if v == 1 and k.startswith("auto") else v
              for k, v in eval(f"dict({options})").items()}  # fmt: skip
    with pytest.raises(ConfigError) as refused:
        registry.resolve(values, "cpu")
    assert message in str(refused.value)


def test_only_the_first_rank_plans(monkeypatch, capsys):
    """The others end well; the status of the plan is that of the job; a plan does not plan."""
    calls = []

    def run(words, env, quiet):
        calls.append((words, env, quiet))
        return 3, b"nothing fits\n"

    monkeypatch.setattr(command, "run_with_signals", run)
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--bf16", "--auto-tuning"])
    monkeypatch.setenv("MASTER_ADDR", "here")
    options = AutoTuning(auto_tuning=True, auto_tuning_log_level="warning")
    for rank, status in (("1", 0), ("0", 3)):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as end:
            options.plan_and_end({"save": "checkpoints"})
        assert end.value.code == status
    [(words, env, quiet)] = calls
    assert words[-2:] == [os.path.abspath("pretrain_gpt.py"), "--bf16"]
    assert "RANK" not in env and "MASTER_ADDR" not in env and quiet
    monkeypatch.setenv("MINDSPEED_PLANNING", env["MINDSPEED_PLANNING"])
    assert options.plan_and_end({}) is None
    assert "--save is ignored: nothing is trained" in capsys.readouterr().err
    monkeypatch.delenv("MINDSPEED_PLANNING")
    with pytest.raises(SystemExit):
        AutoTuning(auto_parallel=True).plan_and_end({"command_words": ("--x", "1")})
    assert calls[1][0][-2:] == ["--x", "1"] and not calls[1][2]
    assert registry.planned_as("no part", {"auto_parallel": True}) and not registry.planned_as(
        "no part", {}
    )


CHILD = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit("the best so far"))
open(sys.argv[1], "w").close()
time.sleep(60)
"""


def test_sigterm_reaches_the_plan(tmp_path):
    """A job that is ended waits for what its plan prints."""
    ready, handler = tmp_path / "ready", signal.getsignal(signal.SIGTERM)

    def end():
        while not ready.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=end)
    thread.start()
    words = [sys.executable, "-S", "-c", CHILD, str(ready)]
    assert command.run_with_signals(words, dict(os.environ), quiet=True) == (
        1,
        b"the best so far\n",
    )
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is handler
    words = [sys.executable, "-S", "-c", "import os; os.kill(os.getpid(), 9)"]
    assert command.run_with_signals(words, dict(os.environ)) == (137, b"")


def test_both_doors_know_the_flags(rank_pool):
    from tests.support.trainer_job import SETUP, TINY
    from tests.training.command_line import parse_all

    flags = ["--auto-settings", "--auto-settings-type", "mixed", "--nodes", "2"]
    (answers,) = rank_pool.run(1, parse_all, [([*TINY, *flags],)], setup=SETUP, backend=None)
    values = answers[0]["values"]
    assert (values["auto_settings"], values["auto_settings_type"]) == (True, "mixed")
    assert values["nnodes"] == 2 and json.dumps(values["auto_tuning"]) == "false"


TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --vocab-size 64 "
    "--max-position-embeddings 32 --tokenizer-type NullTokenizer --micro-batch-size 1 "
    "--global-batch-size 2 --mock-data --train-iters 3 --lr 1e-3"
)


@pytest.mark.weekly
@pytest.mark.slow
def test_a_job_of_two_ranks_ends_well_after_its_plan(tmp_path):
    """Rank 1 ends at once, rank 0 with the status of the plan, torchrun without an error."""
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    words += ["--master-addr=127.0.0.1", f"--master-port={free_port()}", "-m", "mindspeed"]
    words += ["pretrain", *TINY.split(), "--auto-parallel", "--nproc-per-node", "1"]
    done = subprocess.run(
        words,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MINDSPEED_DEVICE": "cpu"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ChildFailedError" not in done.stderr and "Traceback" not in done.stderr
    assert done.stdout.count("1 devices of generic") == 1
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["devices"] == 1 and plan["candidates"]
    start = "torchrun --nnodes=1 --nproc-per-node=1 -m mindspeed pretrain --num-layers 2 "
    assert (tmp_path / "candidate-1.sh").read_text().startswith(start)
    assert "auto_parallel" not in (tmp_path / "candidate-1.yaml").read_text()
