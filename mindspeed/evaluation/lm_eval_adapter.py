"""mindspeed models in lm-evaluation-harness: ``--engine lm-eval``, or its own command line.

    mindspeed evaluate --engine lm-eval --load DIR --tp 2 --tasks hellaswag,mmlu --data-dir data
    lm_eval --model mindspeed --model_args load=DIR --tasks ...    (after importing this module)

Every rank runs the harness' evaluator on the requests of its replica: tensor- and pipeline-parallel
ranks see the same texts in the same order, so their forward passes match. The harness divides the
documents by ``rank`` and ``world_size``, which are the data-parallel ones.

Responses can be cached on disk (``answers=DIR``; always with ``--output``), so that an interrupted
run repeats no request.

Tokenization follows the harness' Hugging Face backend (context and continuation jointly, spaces
between them belong to the continuation, truncation on the left), so scores are comparable with it.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lm_eval import simple_evaluate, utils
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from tqdm import tqdm

from mindspeed import __version__
from mindspeed.errors import ConfigError
from mindspeed.evaluation import code_execution
from mindspeed.evaluation.lm_eval_tasks import LocalTasks
from mindspeed.evaluation.model_adapter import last_tokens
from mindspeed.evaluation.samples import ResponseCache, request_key
from mindspeed.files import atomic_write_text
from mindspeed.inference.loglikelihood import Pair, Score, loglikelihood
from mindspeed.inference.sampling import SamplingOptions
from mindspeed.inference.text_generator import TextGenerator

Request = tuple[tuple[str, str], list[int], list[int]]

_DEFAULT_NEW_TOKENS = 256


@register_model("mindspeed")
class MindSpeedLM(TemplateLM):
    """A model under TP x PP as the harness' ``LM``.

    Args:
        load: Directory of checkpoints, or ``hf:DIR``.
        tp: Tensor-parallel size.
        pp: Pipeline-parallel size.
        ckpt_step: Iteration; None for the latest.
        lora_load: Directory of a LoRA adapter.
        tokenizer_model: Tokenizer that replaces the checkpoint's.
        max_length: Maximum tokens of context and continuation; None for the model's.
        batch_size: Prompts per generation batch.
        tokens_per_batch: Maximum tokens of a scoring pass.
        prompt_type: Chat template, for ``apply_chat_template``.
        answers: Directory of the response cache.
    """

    def __init__(
        self,
        load: str,
        tp: int = 1,
        pp: int = 1,
        ckpt_step: int | None = None,
        lora_load: str | None = None,
        tokenizer_model: str | None = None,
        answers: str | None = None,
        **options: Any,
    ) -> None:
        from mindspeed.evaluation.evaluate import fingerprint_of_weights
        from mindspeed.inference.load import Source, load_model

        if answers is not None:
            options["answers"] = Path(answers)
            options["weights"] = fingerprint_of_weights(load, ckpt_step, lora_load)
        source = Source(load, ckpt_step, int(tp), int(pp), tokenizer_model, lora_load)
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self._set_up(TextGenerator.of(load_model(source, world_size)), **options)

    @classmethod
    def of(cls, generator: TextGenerator, **options: Any) -> MindSpeedLM:
        """Adapt a model that is already loaded; options as for the class."""
        model = cls.__new__(cls)
        model._set_up(generator, **options)
        return model

    def _set_up(
        self,
        generator: TextGenerator,
        max_length: int | None = None,
        batch_size: int | str | None = None,
        tokens_per_batch: int = 4096,
        prompt_type: str | None = None,
        device: str | None = None,
        max_batch_size: int | None = None,
        answers: Path | None = None,
        weights: Mapping[str, str] | None = None,
    ) -> None:
        """``device`` and ``max_batch_size`` are passed by the harness and ignored."""
        super().__init__()
        self.generator = generator
        self.max_length = int(max_length or generator.context_length)
        self.batch_size = int(batch_size or 16)
        self._tokens_per_batch = int(tokens_per_batch)
        self._prompt_type = prompt_type
        replicas = generator.groups.dp
        if replicas is not None:
            self._rank, self._world_size = replicas.rank(), replicas.size()
        self._device = "cpu"  # for the tensors that the harness gathers
        self._cache = ResponseCache(
            answers,
            {"model": dict(weights or {}), "tokenizer": self.tokenizer_name},
            self._rank,
            generator.groups.mp.rank() == 0,
        )

    @property
    def eot_token_id(self) -> int:
        return self.generator.tokenizer.eod

    @property
    def prefix_token_id(self) -> int:
        """The context of a text without context: bos, or end-of-text."""
        return self.generator.start[0] if self.generator.start else self.eot_token_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **unused: Any
    ) -> list[int]:
        if not string:
            return list(self.generator.start) if add_special_tokens is not False else []
        return self.generator.encode(string, start=add_special_tokens is not False)

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, **unused: Any
    ) -> list[Score]:
        pairs = [last_tokens(context, more, self.max_length) for _, context, more in requests]
        scores = self._scores(pairs, disable_tqdm)
        for (texts, _, _), score in zip(requests, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, score)
        return scores

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        pairs: list[Pair] = []
        counts = []
        for request in requests:
            tokens, start = self.tok_encode(request.args[0]), len(self.generator.start)
            windows = utils.get_rolling_token_windows(
                token_list=tokens[start:],  # the prefix token is the only bos
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            new = list(map(utils.make_disjoint_window, windows))
            pairs += new
            counts.append(len(new))
        logprobs = iter([logprob for logprob, _ in self._scores(pairs, disable_tqdm)])
        sums = [sum(next(logprobs) for _ in range(count)) for count in counts]
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Requests with the same settings share batches; cached ones are not repeated."""
        groups: dict[str, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            groups[repr(sorted(request.args[1].items()))].append(index)
        texts: list[str] = [""] * len(requests)
        with self._bar(len(requests), disable_tqdm) as bar:
            for settings, members in groups.items():
                options = self._sampling(requests[members[0]].args[1])
                limit = self.max_length - options.max_new_tokens
                prompts = {i: self.tok_encode(requests[i].args[0])[-limit:] for i in members}
                keys = self._keys(settings, prompts)
                cached = self._cache.entries
                missing = [i for i in members if keys[i] not in cached]
                bar.update(len(members) - len(missing))
                for start in range(0, len(missing), self.batch_size):
                    batch = missing[start : start + self.batch_size]
                    completions = self.generator.generate([prompts[i] for i in batch], options)
                    self._cache.add(
                        {keys[i]: one.text for i, [one] in zip(batch, completions, strict=True)}
                    )
                    bar.update(len(batch))
                for index in members:
                    texts[index] = cached[keys[index]]
                    self.cache_hook.add_partial(
                        "generate_until", requests[index].args, texts[index]
                    )
        return texts

    @staticmethod
    def _keys(settings: str, prompts: Mapping[int, list[int]]) -> dict[int, str]:
        """A key per request; equal requests get different keys, as samples may differ."""
        seen: Counter[str] = Counter()
        keys = {}
        for index, prompt in prompts.items():
            plain = request_key("generate", settings, prompt)
            keys[index] = request_key("generate", settings, prompt, seen[plain])
            seen[plain] += 1
        return keys

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return self._template().render(chat_history, add_generation_prompt).text

    def chat_template(self, chat_template: bool | str = False) -> str:
        return self._prompt_type or ""

    @property
    def tokenizer_name(self) -> str:
        identifiers = self.generator.tokenizer.unique_identifiers
        name = "_".join([*map(str, identifiers.values()), self._prompt_type or ""])
        return name.replace("/", "__")

    def all_gather(self, tensor: Any) -> Any:
        return (
            torch.tensor(self._all_gather_object(tensor.tolist()))
            if self._world_size > 1
            else tensor
        )

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        gathered = self._all_gather_object(obj) if self._world_size > 1 else [obj]
        return gathered if self._rank == dst else None

    def barrier(self) -> None:
        if self._world_size > 1:
            dist.barrier(group=self.generator.groups.dp)

    def _all_gather_object(self, value: Any) -> list[Any]:
        parts: list[Any] = [None] * self._world_size
        dist.all_gather_object(parts, value, group=self.generator.groups.dp)
        return parts

    def _scores(self, pairs: Sequence[Pair], disable_tqdm: bool) -> list[Score]:
        """Scores of pairs; only pairs that are not cached are computed."""
        cache = self._cache
        keys = [request_key("score", list(context), list(more)) for context, more in pairs]
        by_key = dict(zip(keys, pairs, strict=True))
        missing = {key: pair for key, pair in by_key.items() if key not in cache.entries}
        missing_keys = list(missing)

        def store(scores: dict[int, Score]) -> None:
            cache.add({missing_keys[index]: list(score) for index, score in scores.items()})
            bar.update(len(scores))

        with self._bar(len(missing), disable_tqdm) as bar:
            if missing:
                loglikelihood(
                    self.generator.stage,
                    list(missing.values()),
                    groups=self.generator.groups,
                    vocab_size=self.generator.vocab_size,
                    tokens_per_batch=self._tokens_per_batch,
                    progress=store,
                )
        return [(float(v), bool(g)) for v, g in (cache.entries[key] for key in keys)]

    def _sampling(self, kwargs: dict[str, Any]) -> SamplingOptions:
        """The harness' generation settings as sampling options.

        Raises:
            ConfigError: They leave no room for a prompt.
        """
        known = normalize_gen_kwargs(kwargs, _DEFAULT_NEW_TOKENS)
        until = known.get("until") or []
        stop = tuple(text for text in until if text)
        if known["max_gen_toks"] >= self.max_length:
            raise ConfigError(
                f"a task generates {known['max_gen_toks']} tokens, the model has "
                f"{self.max_length} positions; give --max-new-tokens"
            )
        options = SamplingOptions(max_new_tokens=known["max_gen_toks"], greedy=True, stop=stop)
        if not known.get("do_sample"):
            return options
        return replace(
            options,
            greedy=False,
            temperature=known.get("temperature", 1.0),
            top_k=known.get("top_k", 0),
            top_p=known.get("top_p", 1.0),
        )

    def _template(self) -> Any:
        from mindspeed.data import templates

        if self._prompt_type is None:
            raise ConfigError("chat templates need --prompt-type NAME")
        return templates.load(self._prompt_type, self.generator.tokenizer)

    def _bar(self, total: int, disable: bool) -> tqdm:
        silent = disable or (dist.is_initialized() and dist.get_rank() != 0)
        return tqdm(total=total, unit="request", disable=silent)


def evaluate(
    model: MindSpeedLM,
    names: Sequence[str],
    tasks: LocalTasks,
    *,
    shots: int | None = None,
    limit: int | None = None,
    chat: bool = False,
    allow_code: bool = False,
) -> dict[str, Any] | None:
    """The harness' results on rank 0, None on the others. Collective.

    Args:
        model: This rank's part of the model.
        names: Tasks, groups or tags of the harness.
        tasks: Provides them with local data.
        shots: Few-shot examples per prompt; None for each task's default.
        limit: Documents per task.
        chat: Whether to apply the chat template.
        allow_code: Whether tasks may run programs that the model writes.
    """
    results = simple_evaluate(
        model=model,
        tasks=list(names),
        num_fewshot=shots,
        limit=limit,
        apply_chat_template=chat,
        confirm_run_unsafe_code=allow_code,
        task_manager=tasks,
        bootstrap_iters=1000,
    )
    if results is None or dist.get_rank() != 0:
        return None
    if allow_code:
        results["config"]["code_execution"] = code_execution.isolation_record()
    return results


def report(results: dict[str, Any], weights: Mapping[str, str], output: Path | None) -> None:
    """Print the harness' tables; write ``results.json`` and ``samples.jsonl``.

    Args:
        results: From :func:`evaluate`.
        weights: Identity of the model's weights.
        output: Directory of the files; None to write none.
    """
    print(utils.make_table(results), flush=True)
    if results.get("groups"):
        print(utils.make_table(results, "groups"), flush=True)
    if output is None:
        return
    dump = partial(json.dumps, default=str, ensure_ascii=False)
    samples = results.pop("samples", {})
    results["config"].update(model_files=dict(weights), mindspeed=__version__)
    lines = [dump({"task": name, **sample}) for name, found in samples.items() for sample in found]
    atomic_write_text(output / "samples.jsonl", "".join(f"{line}\n" for line in lines))
    atomic_write_text(output / "results.json", dump(results, indent=2) + "\n")
