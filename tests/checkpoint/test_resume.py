"""A resumed run equals an uninterrupted one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from tests.support import fault
from tests.support.megatron_lm_reference import assert_losses
from tests.support.trainer_job import SETUP, metrics, train, whole_mock_data

DROPOUT = ["--hidden-dropout", "0.1", "--attention-dropout", "0.1"]
TP2 = ["--tensor-model-parallel-size", "2"]
PP2 = ["--pipeline-model-parallel-size", "2"]


def run(ranks, world_size: int, flags: list[str], *fault_and_args):
    results = ranks(
        world_size, train, flags, *fault_and_args, setup=SETUP, backend=None, timeout=240
    )
    assert {result["error"] for result in results} == {None}, results[0]["error"]
    return results


def only(source: Path, iteration: int, target: Path) -> Path:
    """A checkpoint directory with one iteration of another."""
    target.mkdir()
    name = f"iter_{iteration:07d}"
    shutil.copytree(source / name, target / name)
    (target / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return target


@pytest.mark.weekly_cases("tensor-2")
@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [[*TP2, *DROPOUT], ["--use-distributed-optimizer", *DROPOUT, "--dataloader-type", "cyclic"]],
    ids=["tensor-2", "data-2-distributed-optimizer-cyclic-data"],
)
def test_resumed_training_is_bit_equal_to_uninterrupted_training(flags, ranks, tmp_path):
    whole, part = tmp_path / "whole", tmp_path / "part"
    flags = [*flags, "--train-iters", "4"]
    straight = run(ranks, 2, [*flags, "--save", str(whole), "--save-interval", "2"])
    only(whole, 2, part)
    resumed = run(ranks, 2, [*flags, "--save", str(part), "--auto-resume"])
    assert [r["digest"] for r in resumed] == [r["digest"] for r in straight]
    exact = [(r["lm_loss"], r["grad_norm"]) for r in metrics(whole / "metrics.jsonl")]
    assert [(r["lm_loss"], r["grad_norm"]) for r in metrics(part / "metrics.jsonl")] == exact[2:]
    assert (part / "latest_checkpointed_iteration.txt").read_text() == "4"


@pytest.mark.weekly_cases("plain")
@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer", [[], ["--use-distributed-optimizer"]], ids=["plain", "distributed"]
)
def test_a_checkpoint_continues_at_other_parallel_sizes(optimizer, ranks, tmp_path):
    """Iterations 4 to 6 lose what Megatron-LM loses in a run that began with tensor parallelism."""
    file = tmp_path / "metrics.jsonl"
    save = ["--save", str(tmp_path / "c"), "--exit-interval", "3"]
    load = ["--load", str(tmp_path / "c"), "--metrics-file", str(file)]
    run(ranks, 2, [*TP2, *optimizer, *save], whole_mock_data)
    run(ranks, 2, [*PP2, *optimizer, *load], whole_mock_data)
    assert_losses([record["lm_loss"] for record in metrics(file)], "tensor-2", first=4)


@pytest.mark.slow
def test_background_saves_and_a_full_disk_lose_nothing(ranks, tmp_path):
    """The second of three saves fails on one rank; the third succeeds; old ones are deleted."""
    save = tmp_path / "c"
    flags = ["--save", str(save), "--save-interval", "1", "--async-save", "--keep-last", "2"]
    run(ranks, 2, [*TP2, *flags, "--train-iters", "3"], fault.disk_full_at, (2,), 1)
    kept = sorted(path.name for path in save.glob("iter_*"))
    assert kept == ["iter_0000001", "iter_0000003"]
    assert (save / "latest_checkpointed_iteration.txt").read_text() == "3"
    results = run(ranks, 2, [*TP2, "--load", str(save), "--train-iters", "3", *OVERRIDE])
    assert results[0]["iteration"] == 3


OVERRIDE = ["--override-opt-param-scheduler"]


@pytest.mark.slow
def test_a_full_disk_at_the_last_save_is_an_error_that_names_what_is_intact(ranks, tmp_path):
    flags = ["--save", str(tmp_path), "--save-interval", "1", "--train-iters", "2", *TP2]
    results = ranks(
        2, train, flags, fault.disk_full_at, (2, 3), 1, setup=SETUP, backend=None, timeout=240
    )
    for result in results:
        assert "iteration 2 was not saved" in result["error"]
        assert "the checkpoint of iteration 1 is intact" in result["error"]
    assert "No space left on device" in results[1]["error"]
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000001"]


STRATEGIES = "megatron.core.dist_checkpointing.strategies"


@pytest.mark.weekly_cases("description", "digests", "tracker", "index")
@pytest.mark.slow
@pytest.mark.parametrize(
    "module, name",
    [
        (f"{STRATEGIES}.common", "TorchCommonSaveStrategy.save_common"),
        (f"{STRATEGIES}.filesystem_async", "FileSystemWriterAsync.finish"),
        ("megatron.core.dist_checkpointing.serialization", "save_config"),
        ("mindspeed.storage.directory", "harden_tree"),
        ("mindspeed.storage.directory", "atomic_write_text"),
    ],
    ids=["common part", "index", "description", "digests", "tracker"],
)
def test_a_full_disk_for_rank_0_files_does_not_stop_training(module, name, ranks, tmp_path):
    """The other ranks are in a collective meanwhile: nobody may hang or leave."""
    flags = [*TP2, "--save", str(tmp_path), "--save-interval", "1", "--train-iters", "3"]
    run(ranks, 2, flags, fault.disk_full_in, module, name, 2)
    kept = {path.name for path in tmp_path.glob("iter_*")}
    assert kept >= {"iter_0000001", "iter_0000003"} and not any(".tmp" in name for name in kept)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3"


@pytest.mark.slow
def test_a_damaged_checkpoint_falls_back_to_the_previous_one(ranks, tmp_path):
    save = tmp_path / "c"
    flags, whole = [*TP2, "--save", str(save), "--save-interval", "1"], tmp_path / "whole.jsonl"
    run(ranks, 2, [*flags, "--exit-interval", "2", "--metrics-file", str(whole)])
    shard = next((save / "iter_0000002").glob("__*.distcp"))
    content = bytearray(shard.read_bytes())
    content[: len(content) // 2] = bytes(len(content) // 2)  # right size, wrong content
    shard.write_bytes(content)
    file = tmp_path / "metrics.jsonl"
    run(ranks, 2, [*TP2, "--load", str(save), "--exit-interval", "2", "--metrics-file", str(file)])
    assert [record["iteration"] for record in metrics(file)] == [2]
    assert metrics(file)[0]["lm_loss"] == metrics(whole)[1]["lm_loss"]


@pytest.mark.slow
def test_weights_that_are_not_finite_are_refused_by_name_on_every_rank(ranks, tmp_path):
    save = ["--save", str(tmp_path), "--exit-interval", "1"]
    run(ranks, 2, [*TP2, *save], fault.weight_not_finite_after, 1, 1)
    for flags in (["--load", str(tmp_path)], ["--load", str(tmp_path), "--finetune"]):
        results = ranks(2, train, [*TP2, *flags], setup=SETUP, backend=None, timeout=240)
        for result in results:
            assert "embedding.word_embeddings.weight has 1 of" in result["error"]
            assert "the first is nan at [3, 5]" in result["error"]
        assert "rank 1: " in results[0]["error"]


def test_another_model_is_refused_with_the_fields_that_differ(ranks, tmp_path):
    save = ["--save", str(tmp_path), "--exit-interval", "1"]
    run(ranks, 1, save)
    other = ["--load", str(tmp_path), "--num-layers", "2", "--normalization", "LayerNorm"]
    (result,) = ranks(1, train, other, setup=SETUP, backend=None, timeout=240)
    assert "--num-layers: 4 in the checkpoint, now 2" in result["error"]
    assert "--normalization: RMSNorm in the checkpoint, now LayerNorm" in result["error"]
    (result,) = ranks(
        1, train, [*other, "--use-checkpoint-args"], setup=SETUP, backend=None, timeout=240
    )
    assert "--num-layers 2 contradicts the checkpoint, which has 4" in result["error"]
    assert "--normalization LayerNorm contradicts the checkpoint" in result["error"]


@pytest.mark.slow
def test_given_flags_win_over_the_checkpoint_architecture(ranks, tmp_path):
    """Without a flag for the shape it is the checkpoint's; the recipe says what is trained."""
    first, second = tmp_path / "first", tmp_path / "second"
    run(ranks, 1, ["--save", str(first), "--exit-interval", "1"])
    going_on = ["--load", str(first), "--save", str(second), "--use-checkpoint-args"]
    going_on += ["--seq-length", "32", "--rotary-base", "500"]
    (result,) = run(ranks, 1, going_on)
    assert result["iteration"] == 6
    recipe = yaml.safe_load((second / "iter_0000006" / "config.yaml").read_text())
    assert recipe["data"]["seq_length"] == 32
    assert recipe["model"]["rotary_base"] == 500
    assert recipe["model"]["num_layers"] == 4


FROZEN = ["--lr", "0", "--train-iters", "2"]  # steps change nothing, but copy fp32 to bf16
WEIGHTS_ONLY = {
    "no optimizer in the checkpoint": (["--no-save-optim", "--no-save-rng"], []),
    "--no-load-optim": ([], ["--no-load-optim"]),
    "--finetune": ([], ["--finetune"]),
}


@pytest.mark.weekly_cases(
    *(
        "plain---no-load-optim",
        "distributed---finetune",
        "distributed-no optimizer *",
        "plain---finetune",
        "plain-no optimizer*",
    )
)
@pytest.mark.slow
@pytest.mark.parametrize("case", WEIGHTS_ONLY)
@pytest.mark.parametrize(
    "optimizer", [[], ["--use-distributed-optimizer"]], ids=["plain", "distributed"]
)
def test_loading_weights_only_updates_the_optimizer_master_weights(
    case, optimizer, ranks, tmp_path
):
    saving, loading = WEIGHTS_ONLY[case]
    saving = [*saving, "--save", str(tmp_path), "--exit-interval", "1"]
    loading = [*loading, "--load", str(tmp_path), "--seed", "7", *FROZEN]
    saved = run(ranks, 2, ["--bf16", *optimizer, *saving])
    loaded = run(ranks, 2, ["--bf16", *optimizer, *loading])
    assert loaded[0]["iteration"] == 2
    assert [r["digest"] for r in loaded] == [r["digest"] for r in saved]
