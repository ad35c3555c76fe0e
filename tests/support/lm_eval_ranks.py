"""A tiny model scored through the harness, by our ranks and by the harness' own backend."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

QUESTIONS = 20
TASKS = ["boolq", "mmlu_anatomy", "gsm8k", "wiki"]
LIMIT = {"max_length": 256}


def make_model(folder: Path) -> None:
    """A random llama with a byte-level tokenizer that puts a bos in front."""
    import torch
    import transformers
    from tokenizers.processors import TemplateProcessing

    from mindspeed.data.tokenizer import save_tokenizer, train_bpe
    from mindspeed.data.tokenizer_types import END_OF_TEXT

    texts = [f"It is {i}. Question: is it {i} even? Answer: yes no A B C D" for i in range(300)]
    tokenizer = train_bpe(texts, 420)
    tokenizer.post_processor = TemplateProcessing(
        single=f"{END_OF_TEXT} $A",
        special_tokens=[(END_OF_TEXT, tokenizer.token_to_id(END_OF_TEXT))],
    )
    save_tokenizer(tokenizer, folder)
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=420,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LIMIT["max_length"],
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=0,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def make_data(folder: Path) -> None:
    """Twenty questions of each kind: our published formats, and the Hub's layout.

    Beside the harness' tasks there is one of our own for whole documents, which are scored
    window by window (``loglikelihood_rolling``).
    """
    from tests.support.fabricated import write_csv, write_json_lines

    rows = [
        {"question": f"is {i} even", "passage": f"It is {i}. " * (1 + i % 3), "answer": i % 2 == 0}
        for i in range(QUESTIONS)
    ]
    write_json_lines(folder / "boolq" / "dev.jsonl", rows)
    for split, number in (("test", QUESTIONS), ("dev", 5)):
        table = [
            [f"Where is {i}?", "here", "there", f"{i}", "no", "ABCD"[i % 4]] for i in range(number)
        ]
        write_csv(folder / "mmlu" / split / f"anatomy_{split}.csv", table)
    for split, number in (("test", QUESTIONS), ("train", 5)):
        sums = [{"question": f"{i} + 1?", "answer": f"#### {i + 1}"} for i in range(number)]
        write_json_lines(folder / "gsm8k" / f"{split}.jsonl", sums)
    documents = [{"page": "It is even, yes. " * (5 + 10 * i)} for i in range(4)]
    write_json_lines(folder / "documents" / "test.jsonl", documents)
    own = folder / "own"
    own.mkdir()
    text = {
        "task": "wiki",
        "dataset_path": "someone/documents",
        "output_type": "loglikelihood_rolling",
        "test_split": "test",
        "doc_to_text": "",
        "doc_to_target": "{{page}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    }
    (own / "wiki.yaml").write_text(json.dumps(text))


def tasks_of(folder: Path) -> Any:
    """The harness' tasks and our own."""
    import lm_eval.tasks

    from mindspeed.evaluation.lm_eval_tasks import LocalTasks

    own = folder / "own"
    theirs = Path(lm_eval.tasks.__file__).parent
    used = [theirs / "super_glue", theirs / "mmlu" / "default", theirs / "gsm8k"]
    return LocalTasks(folder, [own, *used], defaults=False)  # all of them take long to read


def values_of(results: dict[str, Any]) -> dict[str, Any]:
    """Metrics, and what the model said to every question."""
    scores = {
        name: {key: value for key, value in part.items() if isinstance(value, float)}
        for name, part in results["results"].items()
    }
    answers = {}
    for name, samples in results["samples"].items():
        by_document = {sample["doc_id"]: sample["resps"] for sample in samples}
        answers[name] = [by_document[index] for index in sorted(by_document)]
    return {"scores": scores, "answers": answers}


def by_the_harness(model: str, data: str) -> dict[str, Any]:
    """The harness' own Hugging Face backend.

    Of a whole text it scores the tokenizer's bos after a bos of its own, so rolling tasks are run
    without the former.
    """
    rolling = [name for name in TASKS if name == "wiki"]
    found = _harness(model, data, [name for name in TASKS if name not in rolling])
    for key, values in _harness(model, data, rolling, add_bos_token=False).items():
        found[key] |= values
    return found


def _harness(model: str, data: str, tasks: list[str], **options: Any) -> dict[str, Any]:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    given = {"device": "cpu", "batch_size": 4, "dtype": "float32", **LIMIT, **options}
    backend = HFLM(pretrained=model, **given)
    backend._max_length = LIMIT["max_length"]
    results = simple_evaluate(
        model=backend,
        tasks=tasks,
        task_manager=tasks_of(Path(data)),
        gen_kwargs={"max_gen_toks": 24},
        bootstrap_iters=0,
    )
    return values_of(results)


def by_us(model: str, data: str, tp: int, pp: int) -> dict[str, Any] | None:
    """Our model through the adapter; None on ranks that have no results."""
    from lm_eval import simple_evaluate

    from mindspeed.evaluation.lm_eval_adapter import MindSpeedLM

    ours = MindSpeedLM(f"hf:{model}", tp=tp, pp=pp, batch_size=4, tokens_per_batch=600)
    results = simple_evaluate(
        model=ours,
        tasks=TASKS,
        task_manager=tasks_of(Path(data)),
        gen_kwargs={"max_gen_toks": 24},
        bootstrap_iters=0,
    )
    return None if results is None else values_of(results)


def the_rest(model: str) -> dict[str, Any]:
    """What the harness needs besides numbers: its registry, templates, replicas."""
    import torch
    import torch.distributed as dist
    from lm_eval.api.registry import get_model

    ours = get_model("mindspeed").create_from_arg_string(
        f"load=hf:{model},prompt_type=chatml,max_length=100", {"batch_size": "8", "device": "cpu"}
    )
    history = [{"role": "user", "content": "Hi"}]
    return {
        "class": type(ours).__name__,
        "place": (ours.rank, ours.world_size),
        "lengths": (ours.max_length, ours.batch_size),
        "chat": ours.apply_chat_template(history),
        "tokenizer": ours.tokenizer_name,
        "gathered": ours.all_gather(torch.tensor(dist.get_rank() + 5)).flatten().tolist(),
        "objects": ours.gather_object(f"rank {dist.get_rank()}"),
        "empty": ours.tok_encode("", add_special_tokens=False),
        "barrier": ours.barrier(),
    }


def rolling(model: str, texts: list[str]) -> tuple[list[float], list[float]]:
    """Log-likelihoods of whole texts: ours, and transformers' of bos and text."""
    import torch
    import transformers
    from lm_eval.api.instance import Instance

    from mindspeed.evaluation.lm_eval_adapter import MindSpeedLM

    requests = [Instance("loglikelihood_rolling", {}, (text,), i) for i, text in enumerate(texts)]
    ours = MindSpeedLM(f"hf:{model}").loglikelihood_rolling(requests, disable_tqdm=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    reference = transformers.AutoModelForCausalLM.from_pretrained(model).eval()
    expected = []
    for text in texts:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        assert ids[0].tolist().count(tokenizer.bos_token_id) == 1
        with torch.no_grad():
            logprobs = reference(ids).logits[0, :-1].log_softmax(-1)
        expected.append(logprobs.gather(1, ids[0, 1:, None]).sum().item())
    return ours, expected


def too_long(model: str) -> str:
    """What the harness' own settings lead to on a short model."""
    from lm_eval.api.instance import Instance

    from mindspeed.errors import ConfigError
    from mindspeed.evaluation.lm_eval_adapter import MindSpeedLM

    ours = MindSpeedLM(f"hf:{model}", max_length=100)
    settings = {"until": ["x"], "max_gen_toks": 100}
    request = Instance("generate_until", {}, ("Hi", settings), 0)
    try:
        ours.generate_until([request])
    except ConfigError as error:
        return str(error)
    return "accepted"


def builtin_scores(model: str, data: str, tp: int, pp: int) -> list[dict[str, Any]]:
    """Our own evaluation of MMLU with the harness' examples in front."""
    from mindspeed.evaluation import prepared_tasks, run
    from mindspeed.evaluation.model_adapter import ModelAdapter
    from mindspeed.evaluation.prompts import TaskOptions
    from mindspeed.inference.load import Source, load_model
    from mindspeed.inference.sampling import SamplingOptions
    from mindspeed.inference.text_generator import TextGenerator

    planned = prepared_tasks.prepare_tasks(
        ["mmlu"], [f"{data}/mmlu"], options=TaskOptions(), shots=0
    )
    generator = TextGenerator.of(load_model(Source(f"hf:{model}", tp=tp, pp=pp), tp * pp))
    respondent = ModelAdapter(generator, 256, SamplingOptions(greedy=True))
    return run.in_order(run.answer_all(planned[0].questions, respondent), planned[0].questions)


def command(words: list[str]) -> int:
    """``mindspeed evaluate`` in this process."""
    from mindspeed.cli import evaluate

    parser = argparse.ArgumentParser()
    evaluate.add_arguments(parser)
    return evaluate.run(parser.parse_args(words))


def refused(words: list[str]) -> str:
    """The message of a command that is started by hand and must not get as far as the model."""
    import os

    from mindspeed.cli import evaluate
    from mindspeed.errors import MindSpeedError

    del os.environ["RANK"]
    evaluate.run_model = None  # type: ignore[assignment]  (of this process only)
    try:
        command(words)
    except MindSpeedError as error:
        return str(error)
    return "accepted"


def without_the_harness(words: list[str]) -> str:
    """The message where the extra is not installed."""
    import sys

    from mindspeed.errors import ConfigError

    sys.modules["lm_eval"] = None  # type: ignore[assignment]
    try:
        command(words)
    except ConfigError as error:
        return str(error)
    return "accepted"


def over_http(model: str) -> dict[str, list[Any]]:
    """Scores of continuations by us, and by the harness from the answers of our server."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from starlette.testclient import TestClient

    from mindspeed.evaluation.lm_eval_adapter import MindSpeedLM
    from mindspeed.inference.load import Source, load_model
    from mindspeed.inference.parallel_groups import Rank0Broadcast
    from mindspeed.inference.sampling import SamplingOptions
    from mindspeed.inference.server.app import Service, create_app
    from mindspeed.inference.server.engine import Engine
    from mindspeed.inference.server.limits import RequestLimits
    from mindspeed.inference.text_generator import TextGenerator

    generator = TextGenerator.of(load_model(Source(f"hf:{model}"), 1))
    texts = ["It is 7. Question: is it", "Answer:", "yes no A B C D", "It is 1"]
    contexts = [generator.encode(text) for text in texts]
    greedy = SamplingOptions(max_new_tokens=3, greedy=True)
    likely = [row[0].tokens for row in generator.generate(contexts[:2], greedy)]
    more = [*likely, generator.encode(" even? yes", start=False), [5]]
    ours = MindSpeedLM.of(generator)._loglikelihood_tokens(
        [(("", ""), a, b) for a, b in zip(contexts, more, strict=True)], disable_tqdm=True
    )
    api = LocalCompletionsAPI.__new__(LocalCompletionsAPI)
    api.model, api._max_gen_toks, api._seed = "tiny", 1, 1234
    rows = [a + b for a, b in zip(contexts, more, strict=True)]
    app = create_app(Service(Engine(generator, Rank0Broadcast()), "tiny"), RequestLimits())
    with TestClient(app, base_url="http://localhost") as client:
        body = api._create_payload(rows, generate=False, seed=1234)
        answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    theirs = api.parse_logprobs(answer.json(), rows, [len(context) for context in contexts])
    return {"ours": ours, "theirs": theirs}


def interrupted(model: str, data: str, answers: str) -> dict[str, Any]:
    """A run that stops in the middle, one that continues, a third, and one that keeps nothing.

    Returns:
        Of every run the digests of what it asked; the results of all but the first.
    """
    from lm_eval import simple_evaluate

    from mindspeed.errors import ConfigError
    from mindspeed.evaluation import lm_eval_adapter
    from mindspeed.evaluation.samples import request_key
    from mindspeed.inference.load import Source, load_model
    from mindspeed.inference.text_generator import TextGenerator

    generator = TextGenerator.of(load_model(Source(f"hf:{model}"), 1))
    score, generate = lm_eval_adapter.loglikelihood, TextGenerator.generate
    asked: list[str] = []
    left = [0]

    def one_pass_less() -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt

    def scored(stage: Any, pairs: Any, progress: Any, **more: Any) -> Any:
        def kept(found: Any) -> None:
            asked.extend(request_key("s", list(pairs[i][0]), list(pairs[i][1])) for i in found)
            progress(found)
            one_pass_less()

        return score(stage, pairs, progress=kept, **more)

    def generated(self: Any, prompts: Any, options: Any) -> Any:
        one_pass_less()
        found = generate(self, prompts, options)
        asked.extend(request_key("g", prompt) for prompt in prompts)
        return found

    lm_eval_adapter.loglikelihood, TextGenerator.generate = scored, generated

    def run(stop_after: int, folder: str | None, weights: str = "tiny") -> Any:
        left[0] = stop_after
        asked.clear()
        ours = lm_eval_adapter.MindSpeedLM.of(
            generator,
            batch_size=4,
            tokens_per_batch=600,
            answers=None if folder is None else Path(folder),
            weights={"files": weights},
        )
        results = simple_evaluate(
            model=ours,
            tasks=["boolq", "gsm8k", "wiki"],
            task_manager=tasks_of(Path(data)),
            gen_kwargs={"max_gen_toks": 24},
            bootstrap_iters=0,
        )
        return values_of(results)

    seen: dict[str, Any] = {"asked": [], "results": []}
    for stop_after in (2, 3):  # in the first kind of requests, then in another one
        try:
            run(stop_after, answers)
        except KeyboardInterrupt:
            seen["asked"].append(list(asked))
        with (Path(answers) / "samples-0.jsonl").open("a") as file:
            file.write('{"key": "half a li')
    for folder in (answers, answers, None):
        seen["results"].append(run(0, folder))
        seen["asked"].append(list(asked))
    try:
        run(0, answers, "others")
    except ConfigError as error:
        seen["other model"] = str(error)
    return seen
