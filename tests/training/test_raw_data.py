"""``--data``: files are tokenized once, and a run follows from them as from flags that say so."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from pathlib import Path

import pytest

from tests.support.lazy import Lazy
from tests.support.trainer_job import SETUP, metrics
from tests.training import raw_data_job

InstructionFiles = Lazy("mindspeed.data.instruction_dataset", "InstructionFiles")
COUNT = 64


@pytest.fixture(scope="module")
def model(rank_pool, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    rank_pool.run(1, raw_data_job.write_model, str(folder), setup=SETUP, backend=None, timeout=60)
    return folder


@pytest.fixture
def chat(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    raw_data_job.write_conversations(tmp_path / "chat.jsonl", COUNT)
    return tmp_path / "chat.jsonl"


@pytest.fixture
def prepared(rank_pool, model, chat, tmp_path):
    """Final values and messages of a fine-tuning of the conversations."""

    def run(*words: str, world: int = 1, data: Path = chat):
        flags = ["--load", f"hf:{model}", "--data", str(data), "--save", str(tmp_path / "out")]
        flags += ["--data-cache-path", str(tmp_path / "cache"), *words]
        found = rank_pool.run(
            world, raw_data_job.prepared, flags, setup=SETUP, backend=None, timeout=120
        )
        return found[0] if world == 1 else found

    return run


@pytest.mark.slow
def test_flags_that_are_not_given_follow_from_the_data(prepared):
    args, messages = prepared("--lora-r", "4")
    lengths = InstructionFiles(args["data_path"][0]).lengths - 1
    assert len(lengths) == COUNT
    assert args["pack_sequences"] and args["calculate_per_token_loss"]
    assert args["seq_length"] % 64 == 0 and lengths.max() <= args["seq_length"] <= 256
    packed = -(-lengths.sum() // args["seq_length"])  # at best
    steps = args["train_iters"] * args["global_batch_size"] / 3  # of an epoch
    assert packed <= steps < 1.5 * packed + args["global_batch_size"]
    assert args["lora_target_modules"] == ("all-linear",) and args["lr"] == 1e-4
    assert args["tokenizer_model"] and args["recompute_granularity"] == "full"
    assert f"{COUNT} records have a column 'source' that is not used" in messages
    assert messages.count("\u27e6") == 3  # samples with what is trained of them
    assert "--lr 0.0001" in messages and "--lora-r" not in messages.split("assumed:")[1]
    assert "train_iters" not in args["recipe"] and "data_path" not in args["recipe"]


@pytest.mark.slow
def test_flags_that_are_given_stay(prepared):
    words = "--lr 1e-3 --seq-length 96 --train-iters 5 --global-batch-size 2 --split 90,10,0 "
    words += "--variable-seq-lengths --recompute-granularity selective"
    args, messages = prepared(*words.split())
    assert (args["lr"], args["seq_length"], args["train_iters"]) == (1e-3, 96, 5)
    assert args["global_batch_size"] == 2 and args["split"] == "90,10,0"
    assert not args["pack_sequences"] and args["recompute_granularity"] == "selective"
    assert args["train_iters"] == 5 and "--lr " not in messages.split("assumed:")[1]


@pytest.mark.slow
def test_flags_of_a_deepspeed_file_are_given(prepared, tmp_path):
    (tmp_path / "ds.json").write_text('{"train_batch_size": 6, "fp16": {"enabled": true}}')
    args, messages = prepared("--deepspeed_config", str(tmp_path / "ds.json"))
    assert args["global_batch_size"] == 6 and args["fp16"] and not args["bf16"]
    assert "--global-batch-size" not in messages.split("assumed:")[1]


@pytest.mark.slow
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_dtype_is_that_of_the_folder(prepared, model, tmp_path, key):
    folder = tmp_path / "half"
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("dtype", None)
    (folder / "config.json").write_text(json.dumps(config | {key: "bfloat16"}))
    assert prepared("--load", f"hf:{folder}")[0]["bf16"] is True
    assert prepared("--load", f"hf:{folder}", "--fp16")[0]["bf16"] is False
    assert prepared()[0]["bf16"] is False


@pytest.mark.slow
def test_a_file_is_tokenized_once_by_one_of_the_ranks(prepared, chat):
    (first, _), (second, quiet) = prepared(world=2)
    assert first["data_path"] == second["data_path"] and quiet == ""
    report = Path(first["data_path"][0]).with_name("report.json")
    made = report.stat().st_mtime_ns
    again, messages = prepared()
    assert again["data_path"] == first["data_path"] and report.stat().st_mtime_ns == made
    assert "tokenized before" in messages and "'source' that is not used" in messages
    others = [prepared("--train-on", "last")[0]["data_path"]]
    os.utime(chat, ns=(1, 1))
    others.append(prepared()[0]["data_path"])
    assert len({first["data_path"], *others}) == 3


@pytest.mark.slow
def test_files_with_weights_and_files_to_validate_on(prepared, chat, tmp_path):
    packed = tmp_path / "alpaca.jsonl.gz"
    record = {"instruction": "large", "input": "", "output": "small"}
    packed.write_bytes(gzip.compress(f"{json.dumps(record)}\n".encode() * 20))
    args, _ = prepared("--data", "0.75", str(chat), "0.25", str(packed), "--eval-data", str(packed))
    weights, files = args["train_data_path"][::2], args["train_data_path"][1::2]
    assert weights == ("0.75", "0.25") and args["data_path"] is None
    assert [len(InstructionFiles(one).lengths) for one in files] == [COUNT, 20]
    assert args["valid_data_path"] == files[1:] and args["eval_iters"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--data-path x", "give --data, or --data-path"),
        ("--epochs 1 --train-iters 5", "give one of --epochs and --train-iters"),
        ("--data nowhere.jsonl", "--data nowhere.jsonl: there is no such file"),
        ("--data words.jsonl", "the first record has 'words'; conversations have messages"),
        ("--data empty.jsonl", "there is no record in it"),
        ("--handler-name AlpacaPretrainHandler", "reads texts, not conversations"),
    ],
    ids=str,
)
def test_what_cannot_be_trained_is_refused(prepared, tmp_path, words, message):
    (tmp_path / "words.jsonl").write_text('{"words": "large"}\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    words = words.replace("words.jsonl", str(tmp_path / "words.jsonl"))
    words = words.replace("empty.jsonl", str(tmp_path / "empty.jsonl"))
    with pytest.raises(Exception, match=message):
        prepared(*words.split())


@pytest.mark.slow
def test_a_directory_that_has_a_model_is_taken_to_go_on_only(rank_pool, tmp_path):
    def assumed(resume: bool) -> str:
        call = raw_data_job.assumed_directory, str(tmp_path), resume
        return rank_pool.run(1, *call, setup=SETUP, backend=None, timeout=60)[0]

    assert assumed(False) == "tiny-1.5b-chat"
    (tmp_path / "tiny-1.5b-chat").mkdir()
    (tmp_path / "tiny-1.5b-chat" / "latest_checkpointed_iteration.txt").write_text("4")
    assert "tiny-1.5b-chat has a trained model already" in assumed(False)
    assert assumed(True) == "tiny-1.5b-chat"


@pytest.mark.slow
def test_one_command_trains_as_preprocess_and_flags_do(rank_pool, model, chat, tmp_path, capfd):
    """The data set and every assumed flag by hand: equal losses, bit for bit."""

    def command(*words: str) -> str:
        ((status, messages),) = rank_pool.run(
            1, raw_data_job.command, words, setup=SETUP, backend=None, timeout=120
        )
        assert status == 0, messages
        return messages

    cache = str(tmp_path / "cache")
    short = ["finetune", "--load", f"hf:{model}", "--lora-r", "4"]
    messages = command(
        *short, "--data", str(chat), "--data-cache-path", cache, "--save", str(tmp_path / "short")
    )
    log = capfd.readouterr().out
    assert "features reached in the first step: packed-documents" in log
    assert "never called" not in log  # no feature is on that has nothing to do
    flags = messages.split("assumed: ")[1].splitlines()[0].split()
    command(
        *("preprocess", "--input", str(chat), "--handler-name", "OpenAIInstructionHandler"),
        *("--prompt-type", "hf", "--tokenizer-model", str(model)),
        *("--output-prefix", str(tmp_path / "tokens")),
    )
    command(
        *short,
        "--lora-target-modules",
        "all-linear",
        "--data-path",
        str(tmp_path / "tokens"),
        *flags,
        "--save",
        str(tmp_path / "long"),
    )
    runs = [
        [(one["lm_loss"], one["grad_norm"]) for one in metrics(tmp_path / name / "metrics.jsonl")]
        for name in ("short", "long")
    ]
    assert runs[0] == runs[1] and len(runs[0]) > 1
    command(
        *("merge-lora", "--load", f"hf:{model}", "--lora-load", str(tmp_path / "short")),
        *("--save", str(tmp_path / "merged"), "--format", "hf"),
    )
    assert (tmp_path / "merged" / "model.safetensors").exists()


@pytest.mark.slow
def test_samples_and_lengths_of_a_file_and_of_its_data_set_are_shown(
    rank_pool, model, chat, tmp_path
):
    def shown(*words: str) -> str:
        flags = ("data", "show", *words, "--tokenizer-model", str(model), "--seq-length", "64")
        found = rank_pool.run(
            1, raw_data_job.printed, flags, setup=SETUP, backend=None, timeout=120
        )
        return found[0]

    text = shown(str(chat), "--first", "2", "--count", "2", "--data-cache-path", str(tmp_path))
    assert "sample 2:" in text and "sample 4:" not in text
    prefix = next(tmp_path.glob("*/report.json")).with_name("tokens")
    lengths = InstructionFiles(str(prefix)).lengths - 1
    lost = (lengths - 64).clip(0)
    figures = f"--seq-length 64: {(lost > 0).sum():,} samples are longer, by {lost.sum():,} tokens"
    assert figures in text
    again = shown(str(prefix), "--first", "2", "--count", "2")
    assert again == text[text.index("sample 2:") :]
