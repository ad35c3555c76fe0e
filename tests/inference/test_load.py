"""A checkpoint of four ranks generates in one process, and in every other layout, the same text."""

from __future__ import annotations

import json

import pytest
import torch

from tests.support import commands_job
from tests.support.lazy import Lazy, needs

needs("megatron.core")

from mindspeed import recipes
from mindspeed.cli.inference_flags import command_line
from mindspeed.data.preprocess import PreprocessOptions, preprocess
from mindspeed.data.tokenizer import save_tokenizer, train_bpe
from mindspeed.data.tokenizer_types import TokenizerOptions
from mindspeed.errors import CheckpointError, ConfigError, DataError

Source = Lazy("mindspeed.inference.load", "Source")
resolve_source = Lazy("mindspeed.inference.load", "resolve_source")


PROMPT = "the cat"


SETUP = "tests.support.warm"


def run_all_ranks(pool, size, words):
    """Run our command on ranks that have imported everything; what rank 0 prints."""
    words = [str(word) for word in words]
    answers = pool.run(size, commands_job.run, words, setup=SETUP, backend=None, timeout=280)
    assert [status for status, *_ in answers] == [0] * size, answers
    return answers[0][1]


@pytest.fixture(scope="module")
def checkpoints(rank_pool, tmp_path_factory):
    """A tiny model trained for a few steps on TP 2 x DP 2, its optimizer split (ZeRO)."""
    folder = tmp_path_factory.mktemp("trained")
    texts = [f"the cat number {i} sat on the mat and looked at {i * i} birds\n" for i in range(300)]
    (folder / "c.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    save_tokenizer(train_bpe(texts, 300), folder / "tok")
    tokenizer = TokenizerOptions(tokenizer_model=str(folder / "tok"))
    data = preprocess(PreprocessOptions((folder / "c.jsonl",), folder / "c", tokenizer, ("text",)))
    words = [
        "pretrain",
        f"--config={recipes.path('quickstart')}",
        f"--data-path={data.outputs[0]}",
        f"--tokenizer-model={folder / 'tok'}",
        f"--save={folder / 'ck'}",
        "--pipeline-model-parallel-size=1",
        "--zero-stage=1",
        "--train-iters=12",
        "--lr-warmup-iters=2",
        "--eval-iters=0",
        "--seq-length=32",
    ]
    run_all_ranks(rank_pool, 4, words)
    return folder / "ck"


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_greedy_text_is_the_same_in_every_layout(checkpoints, rank_pool):
    words = ("generate", "--load", checkpoints, "--prompt", PROMPT, "--greedy")
    words = (*words, "--max-new-tokens", 16)
    alone = run_all_ranks(rank_pool, 1, words)
    assert alone.startswith(PROMPT) and len(alone) > len(PROMPT) + 5
    cut = run_all_ranks(rank_pool, 4, [*words, "--tp", 2, "--pp", 2])
    assert cut == alone  # the layouts between: test_families


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_model_is_described_by_its_checkpoint(checkpoints):
    args = resolve_source(Source(str(checkpoints)), world_size=1)
    assert (args.num_layers, args.hidden_size, args.num_query_groups) == (4, 128, 2)
    assert args.seq_length == 32 and not args.sequence_parallel
    with pytest.raises(ConfigError, match="--tensor-model-parallel-size 3"):
        resolve_source(Source(str(checkpoints), tp=3), world_size=3)


def test_without_a_checkpoint_the_directory_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        resolve_source(Source(str(tmp_path)), world_size=1)


def test_prompts_are_checked_before_anything_is_loaded(tmp_path):
    from mindspeed.cli.main import main

    assert main(["generate", "--load", str(tmp_path)]) == 1
    import argparse

    from mindspeed.cli import generate

    parser = argparse.ArgumentParser()
    generate.add_arguments(parser)
    both = parser.parse_args(["--load", "x", "--prompt", "a", "--prompt-file", "b"])
    with pytest.raises(ConfigError, match="--prompt TEXT"):
        generate.run(both)
    missing = parser.parse_args(["--load", "x", "--prompt-file", str(tmp_path / "none")])
    with pytest.raises(DataError, match="there is no such file"):
        generate.run(missing)


def test_the_command_for_the_ranks_repeats_every_flag():
    import argparse

    from mindspeed.cli import generate

    parser = argparse.ArgumentParser()
    generate.add_arguments(parser)
    words = ["--load=d", "--prompt=-a b", "--prompt=c", "--greedy", "--tp=2", "--top-p=0.5"]
    args = parser.parse_args(words)
    command = command_line("generate", args)
    assert command[1:4] == ["-m", "mindspeed", "generate"]
    assert parser.parse_args(command[4:]) == args


def beginnings_and_ends(folder):
    from mindspeed.inference.load import load_model
    from mindspeed.inference.text_generator import TextGenerator

    generator = TextGenerator.of(load_model(Source(f"hf:{folder}"), 1))
    texts = ("cat", "", "<|padding|>cat")
    return generator.start, generator.eos, [generator.encode(text) for text in texts]


def test_bos_and_eos_follow_the_model_files(ranks, tmp_path):
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    from tests.inference import tiny_chat

    tiny_chat.write(tmp_path)
    path = str(tmp_path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    plain = tokenizer.encode("cat").ids
    tokenizer.post_processor = TemplateProcessing(  # the padding token plays bos
        single="<|padding|> $A", special_tokens=[("<|padding|>", 1)]
    )
    tokenizer.save(path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 9, 10**6]}))
    run = beginnings_and_ends
    ((start, eos, encoded),) = ranks(1, run, str(tmp_path), setup="tests.support.warm")
    assert start == (1,) and eos == {0, 9}
    assert encoded == [[1, *plain], [1], [1, *plain]]  # a text that says it gets no second one


def rows_without_a_token(folder):
    """Ends of the model, log-probabilities of a text and of what is chosen behind it."""
    from mindspeed.inference.load import Source, load_model
    from mindspeed.inference.loglikelihood import loglikelihood
    from mindspeed.inference.sampling import SamplingOptions
    from mindspeed.inference.text_generator import TextGenerator

    generator = TextGenerator.of(load_model(Source(f"hf:{folder}"), 1))
    (score,) = loglikelihood(
        generator.stage,
        [([5, 6, 7], [8, 9])],
        groups=generator.groups,
        vocab_size=generator.vocab_size,
    )
    options = SamplingOptions(max_new_tokens=1, greedy=True, logprobs=3, min_new_tokens=1)
    ((chosen,),) = generator.generate([[5, 6, 7]], options)
    return generator.eos, score, chosen.scores[0], chosen.text


def test_vocabulary_padding_beyond_the_tokenizer_is_counted(ranks, tmp_path):
    """As transformers does; and it ends where ``config.json`` alone says so."""
    pytest.importorskip("transformers")
    from tests.inference import tiny_chat

    model = tiny_chat.write(tmp_path, extra_rows=40)
    with torch.no_grad():  # a row without a token is the most likely one
        model.lm_head.weight[-3] = 3 * model.lm_head.weight[:-40].abs().amax(0)
    model.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": [4, 11]}))
    with torch.no_grad():
        logprobs = model(torch.tensor([[5, 6, 7, 8, 9]])).logits[0].double().log_softmax(-1)
    run = rows_without_a_token
    ((eos, score, first, text),) = ranks(1, run, str(tmp_path), setup="tests.support.warm")
    assert eos == {0, 4, 11}
    assert score[0] == pytest.approx(float(logprobs[2, 8] + logprobs[3, 9]), abs=1e-4)
    best = logprobs[2].topk(3)
    assert [token for token, _ in first.top] == best.indices.tolist()
    assert first.sampled == pytest.approx(float(best.values[0]), abs=1e-4)
    assert isinstance(text, str)
