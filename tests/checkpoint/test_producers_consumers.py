"""Every producer of weights with every consumer: it runs, or is refused with what then runs."""

from __future__ import annotations

import json
import re
import shutil
from argparse import Namespace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from tests.support.lazy import needs

needs("megatron.core", "transformers")

from tests.checkpoint import commands_ranks
from tests.inference import tiny_chat

SETUP = "tests.support.warm"
TRAIN = (
    *("--train-iters=1", "--micro-batch-size=1", "--global-batch-size=1", "--seq-length=32"),
    *("--lr=1e-4", "--lr-decay-style=constant", "--eval-iters=0", "--split=100,0,0"),
)
TOOLS = Path(__file__).parents[2] / "tools/ckpt_convert/llama"
TASKS = Path(__file__).parents[2] / "tasks"
# Producers with the weights of the Hugging Face model, and others.
SAME = (
    "hf",
    "convert",
    "convert-safetensors",
    "convert-torch",
    "convert-deepspeed",
    "script",
    "script-deepspeed",
    "script-layout",
    "export",
    "megatron-legacy",
)
TRAINED = ("pretrain", "finetune", "merge-lora", "merge-lora-hf", "megatron-dist")
QUICK = ("hf", "convert", *SAME[2:5], "megatron-legacy", "megatron-dist")
ADAPTERS = ("adapter", "adapter-peft")
CONSUMERS = (
    "pretrain",
    "finetune",
    "generate",
    "chat",
    "serve",
    "evaluate",
    "convert",
    "export",
    "verify",
    "verify-files",
    "merge-lora",
)


class Runner(NamedTuple):
    """Directory of the module's files and its ranks."""

    root: Path
    pool: object

    def run(self, words, script=None):
        """Status, text and messages of a command on one rank."""
        words = [str(word) for word in words]
        job = commands_ranks.run if script is None else commands_ranks.script
        given = (words,) if script is None else (str(script), words)
        return self.pool.run(1, job, *given, setup=SETUP, backend=None, timeout=120)[0]

    def made(self, words, script=None):
        status, text, errors = self.run(words, script)
        assert status == 0, (words, errors)
        return text

    def folder(self, producer):
        """Its directory; of producers of weekly rows it is made when one asks for it."""
        root, path = self.root, self.root / producer
        if not path.exists():
            merge = [f"--load=hf:{root / 'hf'}", f"--lora-load={root / 'adapter'}"]
            convert = [f"--input={root / 'hf'}", "--format=safetensors", f"--output={path}"]
            self.made(
                {
                    "convert-safetensors": ["convert", *convert],
                    "export": ["export", "--hf", f"--load={root / 'convert'}", f"--output={path}"],
                    "merge-lora": ["merge-lora", *merge, f"--save={path}"],
                    "merge-lora-hf": ["merge-lora", *merge, f"--save={path}", "--format=hf"],
                }[producer]
            )
        return str(path)

    def consume(self, consumer, load, output):
        """The command line of a consumer; ``load`` as ``--load`` takes it."""
        root, folder = self.root, load.removeprefix("hf:")
        train = [f"--load={load}", "--use-checkpoint-args", "--finetune", *TRAIN]
        model = [f"--load={load}", f"--tokenizer-model={root / 'hf'}"]
        few = ["--max-new-tokens=4", "--greedy"]
        return {
            "pretrain": ["pretrain", *train, f"--data-path={root / 'text_text_document'}"],
            "finetune": ["finetune", *train, f"--data-path={root / 'chats'}"],
            "generate": ["generate", *model, "--prompt=the cat", *few],
            "chat": ["chat", *model, *few],
            "serve": ["serve", *model],
            "evaluate": ["evaluate", *model, "--task=boolq", f"--task-data-path={root / 'boolq'}"],
            "convert": ["convert", f"--input={folder}", f"--output={output}"],
            "export": ["export", "--hf", f"--load={folder}", f"--output={output}"],
            "verify": [
                *("verify", f"--load={load}", f"--hf={root / 'hf'}", "--tolerance=10"),
                f"--input={root / 'text.jsonl'}",
            ],
            "verify-files": ["verify", f"--checkpoint={folder}"],
            "merge-lora": [
                *("merge-lora", f"--load={load}", f"--lora-load={root / 'adapter-peft'}"),
                f"--save={output}",
            ],
        }[consumer]


@pytest.fixture(scope="module")
def runner(tmp_path_factory, rank_pool):
    """The directories of the producers that daily rows need, by name."""
    root = tmp_path_factory.mktemp("producers")
    new = Runner(root, rank_pool)
    hf = root / "hf"
    hf.mkdir()
    tiny_chat.write(hf)
    texts = tiny_chat.TEXTS
    lines = {
        "text": [{"text": text} for text in texts],
        "chats": [{"instruction": "a", "input": "", "output": text} for text in texts],
    }
    for name, rows in lines.items():
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "boolq").mkdir()
    question = {"question": "is the cat here", "passage": "the cat sat.", "answer": True}
    (root / "boolq/dev.jsonl").write_text(json.dumps(question) + "\n")
    data = ["preprocess", f"--tokenizer-model={hf}"]
    new.made([*data, f"--input={root / 'text.jsonl'}", f"--output-prefix={root / 'text'}"])
    chats = ["--handler-name=AlpacaStyleInstructionHandler", "--prompt-type=hf"]
    new.made(
        [*data, f"--input={root / 'chats.jsonl'}", f"--output-prefix={root / 'chats'}", *chats]
    )

    convert = ["convert", f"--input={hf}"]
    new.made([*convert, f"--output={root / 'convert'}"])
    for form in ("torch", "deepspeed"):
        new.made([*convert, f"--output={root / f'convert-{form}'}", f"--format={form}", "--tp=2"])
    script = TOOLS / "convert_weights_from_huggingface.py"
    words = [f"--input-model-dir={hf}", "--tensor-model-parallel-size=2"]
    new.made([*words, f"--output-model-dir={root / 'script'}"], script)
    new.made([*words, f"--output-model-dir={root / 'script-deepspeed'}", "--deepspeed"], script)
    words = [f"--input-model-dir={root / 'script'}", "--tgt-pipeline-model-parallel-size=2"]
    layout = TOOLS / "convert_weights_when_tp_pp_change.py"
    new.made([*words, f"--output-model-dir={root / 'script-layout'}"], layout)
    text, chat = (f"--data-path={root / name}" for name in ("text_text_document", "chats"))
    new.made(["pretrain", f"--load=hf:{hf}", text, *TRAIN, f"--save={root / 'pretrain'}"])
    new.made(["finetune", f"--load=hf:{hf}", chat, *TRAIN, f"--save={root / 'finetune'}"])
    adapters = ["--lora-target-modules=q_proj", "--lora-export=peft", f"--save={root / 'adapter'}"]
    new.made(["finetune", f"--load=hf:{hf}", chat, *TRAIN, *adapters])
    shutil.move(root / "adapter/peft", root / "adapter-peft")
    new.made([*convert, f"--output={root / 'one-rank'}", "--format=torch"])
    as_megatron_writes(root / "one-rank/release", root / "megatron-legacy")
    as_megatron_writes(root / "pretrain/iter_0000001", root / "megatron-dist")
    return new


def as_megatron_writes(checkpoint, folder):
    """A copy with a tracker, without our files and without values that Megatron-LM lacks."""
    target = folder / "iter_0000002"
    ours = shutil.ignore_patterns("mindspeed.json", "digests.jsonl", "config.yaml", "recipe.yaml")
    shutil.copytree(checkpoint, target, ignore=ours)
    (folder / "latest_checkpointed_iteration.txt").write_text("2")
    foreign = ("model_family", "mask_padded_vocab", "vocab_size")
    for path in (target / "mp_rank_00/model_optim_rng.pt", target / "common.pt"):
        if path.is_file():
            state = torch.load(path, weights_only=False)
            kept = {name: v for name, v in vars(state["args"]).items() if name not in foreign}
            state["args"] = Namespace(**kept)
            torch.save(state, path)


@pytest.mark.weekly_cases(
    "convert-safetensors",
    "convert-torch",
    "script-deepspeed",
    "merge-lora",
    "finetune",
    "script-layout",
    "merge-lora-hf",
    "export",
    "convert",
    "megatron-dist",
)
@pytest.mark.slow
@pytest.mark.parametrize("producer", [*QUICK, *(n for n in (*SAME, *TRAINED) if n not in QUICK)])
def test_every_consumer_reads_what_every_producer_writes(producer, runner, tmp_path):
    folder = runner.folder(producer)
    hugging_face = (Path(folder) / "config.json").is_file()
    load = f"hf:{folder}" if hugging_face else folder
    for consumer in CONSUMERS:
        words = runner.consume(consumer, load, tmp_path / consumer)
        status, text, errors = runner.run(words)
        if consumer == "verify-files" and hugging_face:
            assert status == 1 and "Hugging Face" in errors
            status, _, errors = runner.run(helped(errors, words, runner, tmp_path))
        assert status == 0, (producer, consumer, errors)
        if consumer == "generate":
            generated = text
    if producer in SAME:
        words = runner.consume("generate", f"hf:{runner.root / 'hf'}", "")
        assert generated == runner.made(words)


def helped(message, words, runner, tmp_path):
    """The command line that a refusal asks for, after the adapter was merged where it says so."""
    if found := re.search(r"write --load (\S+)", message):
        return [f"--load={found[1]}" if w.startswith("--load=") else w for w in words]
    command = re.search(r"mindspeed ((merge-lora|verify) .*)", message)
    assert command is not None, message
    merged, text = tmp_path / "merged", runner.root / "text.jsonl"
    names = {"BASE": f"hf:{runner.root / 'hf'}", "MERGED": str(merged), "FILE": str(text)}
    given = [names.get(word, word) for word in command[1].split()]
    if given[0] == "verify":
        return given
    runner.made(given)
    if words[0] == "merge-lora":  # done
        return ["verify", f"--checkpoint={merged}"]
    flags = ("--input=",) if words[0] == "convert" else ("--load=", "--checkpoint=")
    return [f"{w.partition('=')[0]}={merged}" if w.startswith(flags) else w for w in words]


@pytest.mark.slow
@pytest.mark.weekly_cases("finetune", "chat", "verify")
@pytest.mark.parametrize("consumer", CONSUMERS)
def test_a_refusal_names_a_command_that_runs(consumer, runner, tmp_path):
    """A Hugging Face folder without its prefix, and adapters in the place of a model."""
    for number, producer in enumerate(("hf", *ADAPTERS)):
        output = tmp_path / str(number)
        folder = str(runner.root / producer)
        words = runner.consume(consumer, folder, output / "out")
        status, _, errors = runner.run(words)
        files = consumer == "verify-files" and producer == "adapter"  # digests are digests
        if files or (producer == "hf" and consumer in ("convert", "export", "merge-lora")):
            assert status == 0, errors
            continue
        assert status == 1 and folder in errors, (producer, errors)
        if producer == "hf" and consumer != "verify-files":
            assert f"--load hf:{folder}" in errors
        status, _, errors = runner.run(helped(errors, words, runner, output))
        assert status == 0, (producer, errors)


@pytest.mark.slow
@pytest.mark.parametrize("producer", ["script", "script-deepspeed", "script-layout"])
def test_the_original_suites_scripts_run_on_their_converters_output(producer, runner):
    model = [f"--load={runner.root / producer}", f"--tokenizer-model={runner.root / 'hf'}"]
    words = [*model, "--task=1", "--max-new-tokens=4", "--prompt=the cat"]
    text = runner.made(words, TASKS / "inference/inference_llama.py")
    assert "[task 1] the cat" in text
    words = [*model, "--task=boolq", f"--task-data-path={runner.root / 'boolq'}"]
    assert "boolq" in runner.made(words, TASKS / "evaluation/evaluation_llama.py")


def test_a_hugging_face_models_tokenizer_is_the_default_everywhere(runner):
    hf = runner.root / "hf"
    with_flag = runner.consume("generate", f"hf:{hf}", "")
    without = [word for word in with_flag if not word.startswith("--tokenizer-model")]
    assert runner.made(without) == runner.made(with_flag)
    for producer in ("pretrain", "finetune"):  # made without flags of a tokenizer
        common = runner.root / producer / "iter_0000001/common.pt"
        args = torch.load(common, weights_only=False)["args"]
        assert (args.tokenizer_type, args.tokenizer_model) == ("HuggingFaceTokenizer", str(hf))


@pytest.mark.slow
def test_a_tokenizer_larger_than_the_embedding_is_refused(runner, tmp_path):
    from mindspeed.data.tokenizer import save_tokenizer, train_bpe

    other = [f"{chr(0x4E00 + i)}{chr(0x4E00 + i * 7 % 900)} {i}\n" for i in range(900)]
    save_tokenizer(train_bpe(other, 900), tmp_path)
    for consumer in ("pretrain", "finetune", "generate", "chat", "serve", "evaluate"):
        for producer in ("hf", "convert-torch", "megatron-dist"):
            load = "hf:" * (producer == "hf") + str(runner.root / producer)
            words = runner.consume(consumer, load, "")
            words = [w for w in words if not w.startswith("--tokenizer-model")]
            status, _, errors = runner.run([*words, f"--tokenizer-model={tmp_path}"])
            assert status == 1 and re.search(r"embedding of .* own tokenizer", errors), errors


@pytest.mark.slow
def test_an_export_has_no_padding_of_the_vocabulary(runner, tmp_path):
    """A trained model's, and one of Megatron-LM that knows the padded size only."""
    hf, text = runner.root / "hf", f"--input={runner.root / 'text.jsonl'}"
    entries = json.loads((hf / "config.json").read_text())["vocab_size"]
    for producer in ("pretrain", "megatron-dist", "megatron-legacy"):
        load, output = f"--load={runner.root / producer}", tmp_path / producer
        named = [] if producer == "pretrain" else [f"--hf-config-dir={hf}"]
        runner.made(["export", "--hf", load, f"--output={output}", *named])
        assert json.loads((output / "config.json").read_text())["vocab_size"] == entries
        tensors = load_file(output / "model.safetensors")
        assert (
            len(tensors["model.embed_tokens.weight"]) == len(tensors["lm_head.weight"]) == entries
        )
        runner.made(["verify", load, f"--hf={output}", text])


@pytest.mark.slow
def test_llama3_rope_scaling_survives_every_format(runner, tmp_path):
    hf, text = tmp_path / "hf", f"--input={runner.root / 'text.jsonl'}"
    shutil.copytree(runner.root / "hf", hf)
    config = json.loads((hf / "config.json").read_text())
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 32.0}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 8192}
    config |= {"rope_parameters": rope, "max_position_embeddings": 131072}
    (hf / "config.json").write_text(json.dumps(config))
    source = hf
    for form in ("torch_dist", "torch", "safetensors", "deepspeed"):  # each from the one before
        output = tmp_path / form
        runner.made(["convert", f"--input={source}", f"--output={output}", f"--format={form}"])
        runner.made(["verify", f"--load={output}", f"--hf={hf}", text])
        source = output
    plain = f"--hf={runner.root / 'hf'}"
    assert runner.run(["verify", f"--load={source}", plain, text])[0] == 1  # it matters
    runner.made(["export", "--hf", f"--load={source}", f"--output={tmp_path / 'export'}"])
    written = json.loads((tmp_path / "export/config.json").read_text())
    found = {"rope_theta": written.get("rope_theta"), **(written.get("rope_scaling") or {})}
    assert found | (written.get("rope_parameters") or {}) == rope
