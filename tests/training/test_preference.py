"""``mindspeed dpo`` is TRL's trainer in every layout: loss, rewards and gradients of 3 steps."""

from __future__ import annotations

import json
import math
import shutil

import pytest

pytest.importorskip("trl")

from tests.support.trainer_job import SETUP
from tests.training import preference_job as job

NAMES = ("loss", *(f"rewards/{name}" for name in ("chosen", "rejected", "margins")))


@pytest.fixture(scope="module")
def files(rank_pool, tmp_path_factory):
    """Models, and pairs of answers."""
    folder = tmp_path_factory.mktemp("preference")
    rank_pool.run(1, job.write_models, str(folder), setup=SETUP, backend=None, timeout=60)
    pairs = job.records()
    job.write_pairs(folder / "pairs.jsonl", pairs)
    job.write_pairs(folder / "margins.jsonl", job.with_margins(pairs))
    job.write_pairs(folder / "judged.jsonl", job.judged(pairs))
    return folder


TRUTHS = {
    "dpo": ("DPO", "model", "pairs.jsonl", {}),
    "experts": ("DPO", "experts", "pairs.jsonl", {}),
    "plain": ("Reward", "scored", "pairs.jsonl", {}),
    "margins": ("Reward", "scored", "margins.jsonl", {"center_rewards_coefficient": 0.05}),
    "kto": ("KTO", "model", "judged.jsonl", {"undesirable_weight": 1.5}),
    "orpo": ("ORPO", "model", "pairs.jsonl", {"beta": 0.2}),
    "simpo": (
        "CPO",
        "model",
        "pairs.jsonl",
        {
            "loss_type": "simpo",
            "beta": 2.0,
            "simpo_gamma": 0.7,
            "label_smoothing": 0.1,
            "cpo_alpha": 0.5,
        },
    ),
}


@pytest.fixture(scope="module")
def truth(rank_pool, files) -> dict[str, list[dict]]:
    """What TRL logs of each training, all in one process: its import costs more than they do."""
    calls = [
        (kind, str(files / model), str(files / data), options)
        for kind, model, data, options in TRUTHS.values()
    ]
    (logs,) = rank_pool.run(1, job.trl, calls, setup=SETUP, backend=None, timeout=200)
    return dict(zip(TRUTHS, logs, strict=True))


@pytest.fixture
def train(rank_pool, files, tmp_path):
    def run(
        world: int,
        *flags: str,
        command: str = "dpo",
        model: str = "model",
        data: str = "pairs.jsonl",
    ) -> list[dict]:
        words = [command, "--load", f"hf:{files / model}", "--data", str(files / data)]
        words += ["--data-cache-path", str(files / "cache"), "--save", str(tmp_path / "out")]
        words += [word for text in flags for word in text.split()]
        call = job.run, words, str(tmp_path / "metrics.jsonl")
        for status, messages in rank_pool.run(world, *call, setup=SETUP, backend=None, timeout=240):
            assert status == 0, messages
        return job.logged(tmp_path / "metrics.jsonl")

    run.file = tmp_path / "metrics.jsonl"
    return run


def assert_same(found: list[dict], expected: list[dict]) -> None:
    assert len(found) == len(expected) == job.STEPS
    for ours, theirs in zip(found, expected, strict=True):
        for name in NAMES:
            assert ours[name] == pytest.approx(theirs[name], abs=1e-5), name
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    # Before the first step all rewards are 0 but for rounding.
    accuracies = [[one["rewards/accuracies"] for one in run[1:]] for run in (found, expected)]
    assert accuracies[0] == pytest.approx(accuracies[1])


LAYOUTS = {
    "alone": (1, f"{job.PADDED} --micro-batch-size 24"),
    "micro-batches of a pair": (1, f"{job.PADDED} --micro-batch-size 2"),
    "variable lengths": (1, f"{job.PADDED} --variable-seq-lengths"),
    "packed": (1, job.PACKED),
    "packed micro-batches": (1, f"{job.PACKED} --micro-batch-size 2"),
    "dp": (2, f"{job.PADDED} --use-distributed-optimizer"),
    "packed dp": (
        2,
        f"{job.PACKED} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ),
    "packed zero 3": (2, f"{job.PACKED} --zero-stage 3"),
    "recomputed": (
        1,
        f"{job.PADDED} --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
    ),
    "tp sp": (2, f"{job.PADDED} --tensor-model-parallel-size 2 --sequence-parallel"),
    "packed tp sp": (2, f"{job.PACKED} --tensor-model-parallel-size 2 --sequence-parallel"),
    "pp": (2, f"{job.PADDED} --pipeline-model-parallel-size 2"),
    "variable lengths pp": (
        2,
        f"{job.PADDED} --variable-seq-lengths --pipeline-model-parallel-size 2",
    ),
    "packed pp": (2, f"{job.PACKED} --pipeline-model-parallel-size 2"),
    "vpp": (
        2,
        f"{job.PADDED} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    ),
    "cp": (2, f"{job.PADDED} --context-parallel-size 2"),
    "packed cp": (2, f"{job.PACKED} --context-parallel-size 2"),
    "packed tp pp cp": (
        8,
        f"{job.PACKED} --tensor-model-parallel-size 2 --sequence-parallel "
        "--pipeline-model-parallel-size 2 --context-parallel-size 2",
    ),
}


@pytest.mark.slow
@pytest.mark.weekly_cases(
    "micro-batches*",
    "packed micro*",
    "variable lengths*",
    "packed tp sp",
    "packed pp",
    "packed cp",
    "cp",
    "dp",
    "pp",
    "tp sp",
    "recomputed",
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_is_that_of_trl(train, truth, layout):
    world, flags = LAYOUTS[layout]
    assert_same(train(world, flags), truth["dpo"])


@pytest.mark.slow
@pytest.mark.weekly_cases("alone", "packed pp")
@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (1, job.PADDED),
        (2, f"{job.PACKED} --use-distributed-optimizer"),
        (2, f"{job.PACKED} --pipeline-model-parallel-size 2"),
    ],
    ids=["alone", "packed dp", "packed pp"],
)
def test_a_reference_computed_before_is_that_of_each_step(train, truth, files, world, flags):
    assert_same(train(world, flags, "--precompute-reference"), truth["dpo"])
    stored = {path: path.stat().st_mtime_ns for path in files.glob("cache/*/*_reference_*.npy")}
    assert_same(train(world, flags, "--precompute-reference"), truth["dpo"])
    assert stored and {path: path.stat().st_mtime_ns for path in stored} == stored


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", "--precompute-reference"])
def test_validation_has_the_loss_of_training(train, files, flags):
    """With a learning rate of zero, on the same pairs."""
    evaluated = f"--eval-data {files / 'pairs.jsonl'} --eval-interval 1 --eval-iters 1 --lr 0"
    train(1, job.PADDED, evaluated, "--lora-r 4 --train-iters 2", flags)
    records = [json.loads(line) for line in train.file.read_text().splitlines()]
    held_out = [one["loss validation"] for one in records if "loss validation" in one]
    trained = [one["loss"] for one in records if "loss" in one]
    assert held_out == trained == [pytest.approx(math.log(2))] * 2


@pytest.mark.slow
def test_adapters_switched_off_are_a_frozen_copy(train, files):
    adapters = f"{job.PADDED} --lora-r 4"
    off = train(1, adapters)
    assert off[-1]["rewards/margins"] > 0.1
    for flags in (f"--reference-load hf:{files / 'model'}", "--precompute-reference"):
        assert_same(train(1, adapters, flags), off)
    tp = "--tensor-model-parallel-size 2 --sequence-parallel"
    assert_same(train(2, adapters, tp), off)


@pytest.mark.slow
@pytest.mark.weekly_cases("alone", "margins", "tp", "packed dp", "packed cp")
@pytest.mark.parametrize(
    ("kind", "world", "flags"),
    [
        ("plain", 1, job.PADDED),
        ("margins", 1, job.PADDED),
        ("margins", 2, f"{job.PACKED} --use-distributed-optimizer"),
        ("margins", 2, f"{job.PADDED} --tensor-model-parallel-size 2 --sequence-parallel"),
        ("margins", 2, f"{job.PADDED} --tensor-model-parallel-size 2"),
        ("margins", 2, f"{job.PACKED} --pipeline-model-parallel-size 2"),
        ("margins", 2, f"{job.PACKED} --context-parallel-size 2"),
    ],
    ids=["alone", "margins", "packed dp", "tp sp", "tp", "packed pp", "packed cp"],
)
def test_rewards_are_those_of_trl(train, truth, kind, world, flags):
    _, model, data, _ = TRUTHS[kind]
    center = "--center-rewards-coefficient 0.05" * (kind == "margins")
    found = train(world, flags, center, command="reward", model=model, data=data)
    expected = truth[kind]
    assert len(found) == len(expected) == job.STEPS
    for ours, theirs in zip(found, expected, strict=True):
        for name in ("loss", "margin", "mean_reward", "accuracy"):
            assert ours[name] == pytest.approx(theirs[name], abs=1e-5), name
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


LOSSES = {
    "kto": "--loss-type kto --undesirable-weight 1.5",
    "orpo": "--loss-type orpo --beta 0.2",
    "simpo": "--loss-type simpo --beta 2 --simpo-gamma 0.7 --label-smoothing 0.1 --sft-weight 0.5",
}


@pytest.mark.slow
@pytest.mark.weekly_cases("orpo-p*", "simpo-alone", "simpo-packed cp", "kto-alone", "kto-pp")
@pytest.mark.parametrize("layout", ["alone", "packed cp", "pp"])
@pytest.mark.parametrize("name", LOSSES)
def test_other_losses_are_those_of_trl(train, truth, name, layout):
    world, flags = {
        "alone": (1, job.PADDED),
        "packed cp": (2, f"{job.PACKED} --context-parallel-size 2"),
        "pp": (2, f"{job.PADDED} --pipeline-model-parallel-size 2"),
    }[layout]
    # The reference point of KTO is that of a micro-batch: here of all answers.
    whole = f"--micro-batch-size {4 if 'packed' in layout else 2 * job.PAIRS}" * (name == "kto")
    _, _, data, _ = TRUTHS[name]
    found, expected = train(world, flags, whole, LOSSES[name], data=data), truth[name]
    assert len(found) == len(expected) == job.STEPS
    shared = found[0].keys() & expected[0].keys() & {*NAMES, "kl", "nll_loss", "logps/chosen"}
    assert {"loss", "rewards/chosen", "rewards/rejected"} <= shared
    for ours, theirs in zip(found, expected, strict=True):
        for one in shared:
            assert ours[one] == pytest.approx(theirs[one], abs=1e-5, rel=2e-6), one
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.weekly_cases("alone", "packed ep")
@pytest.mark.parametrize("layout", ["alone", "packed ep", "tp sp ep"])
def test_experts_train_as_those_of_trl(train, truth, layout):
    world, flags = {
        "alone": (1, job.PADDED),
        "packed ep": (2, f"{job.PACKED} --expert-model-parallel-size 2"),
        "tp sp ep": (
            2,
            f"{job.PADDED} --tensor-model-parallel-size 2 --sequence-parallel "
            "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1",
        ),
    }[layout]
    assert_same(train(world, flags, model="experts"), truth["experts"])


@pytest.mark.slow
@pytest.mark.weekly_cases("packed pp", "precomputed", "adapters")
@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (1, job.PADDED),
        (2, f"{job.PACKED} --pipeline-model-parallel-size 2"),
        (1, f"{job.PADDED} --lora-r 4"),
        (1, f"{job.PADDED} --precompute-reference"),
    ],
    ids=["alone", "packed pp", "adapters", "precomputed"],
)
def test_an_interrupted_run_continues_as_if_it_had_not_been(train, tmp_path, world, flags):
    """Its reference is the model that it began with, not what it has saved."""
    whole = train(world, flags)
    shutil.rmtree(tmp_path / "out")
    assert len(train(world, flags, "--exit-interval 2")) == 2
    both = train(world, flags, "--auto-resume")  # its metrics follow those of the first run
    names = (*NAMES, "grad_norm", "learning_rate")
    assert len(whole) == job.STEPS
    assert [[one[n] for n in names] for one in both] == [[one[n] for n in names] for one in whole]


@pytest.mark.slow
def test_forward_passes_and_bytes_of_the_reference(rank_pool, files, tmp_path):
    """A frozen copy costs its weights, and nothing beside them, and a forward pass a step; adapters
    switched off no weights; log-probabilities that are known neither."""

    def counted(*flags: str) -> tuple[int, int]:
        words = ["dpo", "--load", f"hf:{files / 'model'}", "--data", str(files / "pairs.jsonl")]
        words += ["--data-cache-path", str(files / "cache"), "--save", str(tmp_path / "out")]
        words += [word for text in flags for word in f"--train-iters 3 {text}".split()]
        call = job.counted, words, str(tmp_path / "metrics.jsonl")
        (found,) = rank_pool.run(1, *call, setup=SETUP, backend=None, timeout=120)
        assert found["more"] == []
        shutil.rmtree(tmp_path / "out")
        return found["forwards"], found["bytes"]

    micro_batches = 2 * job.PAIRS // 6 * 3  # in three steps
    vocabulary, hidden, ffn, layers = 384, 32, 48, 4  # of 320 ids, padded
    layer = 2 * hidden + hidden * (hidden + 2 * 16 + hidden + 3 * ffn)
    weights = 2 * vocabulary * hidden + hidden + layers * layer
    assert counted(job.PADDED) == (2 * micro_batches, 4 * weights)
    assert counted(job.PADDED, "--lora-r 4") == (2 * micro_batches, 0)
    for adapters in ("", "--lora-r 4"):
        counted(job.PADDED, adapters, "--precompute-reference")  # the file, unless it is there
        assert counted(job.PADDED, adapters, "--precompute-reference") == (micro_batches, 0)


@pytest.mark.slow
def test_what_cannot_be_trained_is_refused(rank_pool, files, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(files / "model", other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "b"}\n')
    good = json.loads((files / "pairs.jsonl").read_text().splitlines()[0])
    job.write_pairs(tmp_path / "one.jsonl", [{"prompt": "a"}, good])
    cases = {
        "--micro-batch-size 3 --no-pack-sequences": "a pair is two sequences",
        "--loss-type ipo --label-smoothing 0.1": "only with --loss-type sigmoid, robust, simpo",
        "--loss-type orpo --precompute-reference": "needs no reference: drop",
        f"--reference-load hf:{other}": "has another tokenizer: token",
        f"--data {tmp_path / 'bad.jsonl'}": "bad.jsonl:1: 'rejected' is equal to 'chosen'",
        f"--data {tmp_path / 'one.jsonl'}": "one.jsonl:1: no column 'chosen'",
        "--lora-r 4 --lora-modules-to-save embed_tokens": "name the reference with",
        "--lora-r 4 --lora-init pissa": "changes the weights under the adapters",
        "--handler-name OpenAIInstructionHandler": "reads no pairs of answers",
        "--mtp-num-layers 1": "--mtp-num-layers is not for pairs",
    }
    flags = f"--load hf:{files / 'model'} --data {files / 'pairs.jsonl'} --save {tmp_path / 'out'}"
    words = ["dpo", *flags.split(), "--data-cache-path", str(tmp_path), "--train-iters", "1"]
    call = job.refusals, words, [case.split() for case in cases]
    found = rank_pool.run(1, *call, setup=SETUP, backend=None, timeout=240)[0]
    for (case, message), text in zip(cases.items(), found, strict=True):
        assert message in text, (case, text)


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [False, True], ids=["whole", "adapters"])
def test_a_reward_model_is_written_for_transformers(rank_pool, train, files, tmp_path, adapters):
    """It gives the rewards there that training ends with, and a further one begins with."""
    load = ["--load", f"hf:{files / 'model'}"]
    words = ["reward", *load, "--data", str(files / "pairs.jsonl"), "--save", str(tmp_path / "one")]
    words += ["--data-cache-path", str(files / "cache"), "--metrics-file", str(train.file)]
    # The last step changes nothing.
    words += f"{job.PADDED} --micro-batch-size 24 --train-iters 3 --lr-decay-iters 2".split()
    words += ["--lr-decay-style", "linear"]
    write = ["export", "--hf", "--load", str(tmp_path / "one"), "--output", str(tmp_path / "hf")]
    if adapters:
        words += ["--lora-r", "4"]
        write = ["merge-lora", *load, "--lora-load", str(tmp_path / "one")]
        write += ["--save", str(tmp_path / "hf"), "--format", "hf"]
    call = job.written, words, write, str(tmp_path / "hf")
    (mean,) = rank_pool.run(1, *call, setup=SETUP, backend=None, timeout=120)
    if not adapters:
        call = job.generated, str(tmp_path / "one")
        (text,) = rank_pool.run(1, *call, setup=SETUP, backend=None, timeout=60)
        assert "the checkpoint holds a reward model" in text
    trained = job.logged(train.file)
    assert mean == pytest.approx(trained[-1]["mean_reward"], abs=1e-5)
    assert abs(mean - trained[0]["mean_reward"]) > 1e-3
    train.file.unlink()
    whole = "--micro-batch-size 24 --lr 0 --train-iters 1"
    again = train(1, job.PADDED, whole, f"--load hf:{tmp_path / 'hf'}", command="reward")
    assert again[0]["mean_reward"] == pytest.approx(mean, abs=1e-5)
