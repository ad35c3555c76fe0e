"""``GPTModel``: a GPT that loads any checkpoint and generates, in Hugging Face's manner.

    initialize_megatron(args_defaults={"no_load_rng": True, "no_load_optim": True})
    model = GPTModel.from_pretrained(model_provider, "hf:models/llama2-7b")
    print(model.generate("Write quick sort code in python", max_new_tokens=512))

Without ``initialize_megatron`` the flags come from the checkpoint:

    model = GPTModel.from_pretrained(pretrained_model_name_or_path="runs/a/checkpoints")

All methods are collective: every rank calls them alike.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel as MegatronGPTModel

from mindspeed.data.tokenizer import TextTokenizer, TokenizerOptions, build_tokenizer
from mindspeed.errors import ConfigError, DataError
from mindspeed.inference.foreign_tokenizer import adapt, without_text
from mindspeed.inference.generator import Completion, Generator
from mindspeed.inference.load import LoadedModel, Source, build_and_load, load_model
from mindspeed.inference.prompts import Prompts
from mindspeed.inference.sampling import SamplingOptions
from mindspeed.models import specials
from mindspeed.training import initialize
from mindspeed.training.model import gpt_options

_DEFAULT_LENGTH = 128

Provider = Callable[..., Any]


class GPTModel(MegatronGPTModel):
    """A pipeline stage of the model that the flags of this run describe.

    Args:
        config: Megatron Core's configuration.
        num_tokentypes: 0; kept for scripts of the seed's time.
        parallel_output: Leave logits split over the tensor-parallel ranks.
        return_moe_loss: Without effect; the loss of the experts' balance is Megatron's own.
        pre_process: The stage has the embedding.
        post_process: The stage has the output layer.
        vp_stage: Number of the virtual stage.
        args: Final values; default those of ``initialize_megatron``.
    """

    generator: Generator

    def __init__(
        self,
        config: Any,
        num_tokentypes: int = 0,
        parallel_output: bool = True,
        return_moe_loss: bool = True,
        pre_process: bool = True,
        post_process: bool = True,
        *,
        vp_stage: int | None = None,
        args: argparse.Namespace | None = None,
    ) -> None:
        if num_tokentypes:
            raise ConfigError(f"num_tokentypes={num_tokentypes}: a GPT has none, use 0")
        args = initialize.get_args() if args is None else args
        if args.padded_vocab_size is None:
            raise ConfigError("the size of the vocabulary is not known: give --tokenizer-model")
        options = gpt_options(args, config, pre_process, post_process, vp_stage)
        super().__init__(**{**options, "parallel_output": parallel_output})
        specials.change_model(args, self)

    @classmethod
    def from_pretrained(
        cls,
        model_provider: Provider | None = None,
        pretrained_model_name_or_path: str | None = None,
        *,
        tensor_model_parallel_size: int = 1,
        pipeline_model_parallel_size: int = 1,
        ckpt_step: int | None = None,
        tokenizer: Any = None,
        lora: str | None = None,
    ) -> Any:
        """Build this rank's stage and load its weights. Collective.

        Args:
            model_provider: ``model_provider(pre_process=, post_process=)`` builds a stage; default
                this class.
            pretrained_model_name_or_path: Checkpoints of Megatron in any layout, or ``hf:DIR``;
                None leaves the weights as they were drawn.
            tensor_model_parallel_size: Only without ``initialize_megatron``, whose flags count.
            pipeline_model_parallel_size: Likewise.
            ckpt_step: Iteration; default the latest.
            tokenizer: A directory, one of ours, or one of transformers; default the checkpoint's,
                or the one of ``initialize_megatron``.
            lora: Directory of an adapter, ours or PEFT's.

        Returns:
            The stage, with :meth:`generate`.

        Raises:
            ConfigError: Neither flags nor a checkpoint say what the model is.
            CheckpointError: There is no checkpoint, or it holds another model.
        """
        path = pretrained_model_name_or_path
        args = _flags_of_this_run()
        if args is not None:
            _prepare(args, path, ckpt_step)
            own = _tokenizer_of(args, tokenizer)
            loaded = build_and_load(args, own, _provider(model_provider), lora)
        elif path is None:
            raise ConfigError(
                "from_pretrained(): call initialize_megatron() first, or give "
                "pretrained_model_name_or_path, which says what the model is"
            )
        else:
            folder = tokenizer if isinstance(tokenizer, str) else None
            tp, pp = tensor_model_parallel_size, pipeline_model_parallel_size
            source = Source(path, ckpt_step, tp, pp, folder, lora)
            world_size = int(os.environ.get("WORLD_SIZE", "1"))
            loaded = load_model(source, world_size, _provider(model_provider))
            if tokenizer is not None and folder is None:
                loaded = _with_tokenizer(loaded, adapt(tokenizer))
        stage = loaded.stage
        stage.generator = Generator.of(loaded)
        if not isinstance(stage, GPTModel):  # built by a provider of the caller
            stage.generate = partial(GPTModel.generate, stage)
        return stage

    def generate(
        self,
        input_ids: Any,
        *,
        attention_mask: torch.Tensor | None = None,
        do_sample: bool = False,
        top_k: int = 50,
        top_p: float = 1.0,
        temperature: float = 1.0,
        num_beams: int = 1,
        length_penalty: float = 1.0,
        early_stopping: bool = False,
        num_return_sequences: int = 1,
        max_length: int | None = None,
        max_new_tokens: int = 0,
        min_new_tokens: int = 0,
        repetition_penalty: float = 1.0,
        eos_token_id: int | Sequence[int] | None = None,
        bos_token_id: int | None = None,
        pad_token_id: int | None = None,
        tokenizer: Any = None,
        stop: str | Sequence[str] = (),
        recompute: bool = False,
        detokenize: bool = True,
        include_input: bool = False,
        stream: bool = False,
        return_output_log_probs: bool = False,
        seed: int | None = None,
    ) -> Any:
        """Continue one text or several.

        Args:
            input_ids: A text, a list of texts, token ids, lists of them, or a tensor ``[s]`` or
                ``[b, s]``.
            attention_mask: Of a tensor ``[b, s]``: 0 where it is padding, on the left.
            do_sample: Draw tokens; otherwise the most likely token or beam is taken.
            top_k: Keep this many tokens; 0 keeps all.
            top_p: Of these the fewest that have this probability together.
            temperature: Divides the logits before sampling.
            num_beams: Sequences that a beam search follows.
            length_penalty: A beam scores its log-probability / length ** penalty.
            early_stopping: A beam search ends when ``num_beams`` have finished.
            num_return_sequences: Continuations of each prompt.
            max_length: Limit of prompt and new tokens; default 128.
            max_new_tokens: Limit of new tokens, instead of ``max_length``; 0: not given.
            min_new_tokens: No end token before.
            repetition_penalty: Above 1 makes tokens that occurred less likely.
            eos_token_id: Ids that end a text; default the checkpoint's.
            bos_token_id: Begins an empty prompt; default the end of text.
            pad_token_id: Leading ids of a tensor ``[b, s]`` that are padding, where no mask is
                given.
            tokenizer: Instead of the model's.
            stop: Strings that end a text; they are no part of it.
            recompute: Run the whole sequence for every token instead of keeping keys and values.
            detokenize: Return texts; otherwise lists of ids.
            include_input: Return the prompt with its continuation.
            stream: Return an iterator over what is new (one prompt, one continuation).
            return_output_log_probs: Return also the log-probability of every new token.
            seed: Of the draws; default new ones every time, from torch's generator.

        Returns:
            A string (or ids) for one continuation of one prompt, otherwise a list, prompt by
            prompt. With log-probabilities a pair of that and of lists of numbers.

        Raises:
            ConfigError: A keyword has a value that is not allowed, or two contradict each other.
            DataError: A prompt is empty, too long, or has ids outside the vocabulary.
        """
        generator = _adjusted(self.generator, tokenizer, eos_token_id)
        prompts = Prompts.of(input_ids, attention_mask, pad_token_id)
        nothing = [] if bos_token_id is None else [bos_token_id]
        rows = [generator.encode(prompt if len(prompt) else nothing) for prompt in prompts.rows]
        options = SamplingOptions(
            max_new_tokens=_new_tokens(rows, max_length, max_new_tokens),
            greedy=not do_sample,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=int(torch.randint(2**62, ())) if seed is None else seed,
            min_new_tokens=min_new_tokens,
            repetition_penalty=repetition_penalty,
            num_beams=num_beams,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            num_return_sequences=num_return_sequences,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            logprobs=0 if return_output_log_probs else None,
            recompute=recompute,
        )
        if stream:
            return _stream(generator, prompts, rows, options, detokenize, include_input)
        found = [
            (_result(generator, prompts.rows[i], rows[i], one, detokenize, include_input), one)
            for i, row in enumerate(generator.generate(rows, options, share=True))
            for one in row
        ]
        results = [result for result, _ in found]
        scores = [[score.chosen for score in one.scores or ()] for _, one in found]
        if prompts.single and num_return_sequences == 1:
            return (results[0], scores[0]) if return_output_log_probs else results[0]
        return (results, scores) if return_output_log_probs else results


def _stream(
    generator: Generator,
    prompts: Prompts,
    rows: list[list[int]],
    options: SamplingOptions,
    detokenize: bool,
    include_input: bool,
) -> Iterator[Any]:
    if len(rows) != 1 or options.num_return_sequences != 1 or options.num_beams != 1:
        raise ConfigError(
            "stream=True continues one prompt once and without beams; call generate() for each "
            "prompt, or without stream"
        )
    return _streamed(generator, prompts, rows, options, detokenize, include_input)


def _streamed(
    generator: Generator,
    prompts: Prompts,
    rows: list[list[int]],
    options: SamplingOptions,
    detokenize: bool,
    include_input: bool,
) -> Iterator[Any]:
    if include_input:
        nothing = Completion([], "", "")
        first = _result(generator, prompts.rows[0], rows[0], nothing, detokenize, True)
        yield (first, []) if options.logprobs is not None else first
    for piece in generator.pieces(rows, options):
        new = piece.text if detokenize else [] if piece.token is None else [piece.token]
        scores = [] if piece.scores is None else [piece.scores.chosen]
        if options.logprobs is not None:
            yield new, scores
        elif new:
            yield new


def _result(
    generator: Generator,
    prompt: Any,
    row: list[int],
    completion: Completion,
    detokenize: bool,
    include_input: bool,
) -> Any:
    if not detokenize:
        return [*row, *completion.tokens] if include_input else completion.tokens
    if not include_input:
        return completion.text
    text = prompt if isinstance(prompt, str) else generator.detokenize(row)
    return text + completion.text


def _new_tokens(rows: list[list[int]], max_length: int | None, max_new_tokens: int) -> int:
    if max_length is not None and max_new_tokens:
        raise ConfigError(
            f"max_length={max_length} and max_new_tokens={max_new_tokens}: give one of them; "
            "max_length counts the prompt, too"
        )
    if max_new_tokens:
        return max_new_tokens
    limit = _DEFAULT_LENGTH if max_length is None else max_length
    longest = max(map(len, rows), default=0)
    if longest >= limit:
        raise DataError(
            f"a prompt of {longest:,} tokens leaves no room in max_length={limit:,}; raise it, or "
            "give max_new_tokens"
        )
    return limit - longest


def _adjusted(generator: Generator, tokenizer: Any, eos: int | Sequence[int] | None) -> Generator:
    if tokenizer is not None:
        own = adapt(tokenizer)
        generator = replace(generator, tokenizer=own, eos=frozenset({own.eod}))
    if eos is not None:
        generator = replace(generator, eos=frozenset([eos] if isinstance(eos, int) else eos))
    return generator


def _provider(model_provider: Provider | None) -> Any:
    def provide(args: Any, config: Any, pre: bool, post: bool, vp_stage: int | None) -> Any:
        if model_provider is not None:
            return model_provider(pre_process=pre, post_process=post)
        return GPTModel(config, 0, True, True, pre, post, vp_stage=vp_stage, args=args)

    return provide


def _flags_of_this_run() -> argparse.Namespace | None:
    try:
        return initialize.get_args()
    except ConfigError:
        return None


def _prepare(args: argparse.Namespace, path: str | None, ckpt_step: int | None) -> None:
    """Turn the flags of this run into those of a model that only runs forward."""
    if args.virtual_pipeline_model_parallel_size:
        raise ConfigError(
            "generation has no use for virtual pipeline stages: leave out "
            "--num-layers-per-virtual-pipeline-stage; checkpoints load into any layout"
        )
    args.load, args.ckpt_step = path, ckpt_step
    args.finetune = args.no_load_rng = args.exit_on_missing_checkpoint = True
    args.sequence_parallel = False  # a single token cannot be split
    args.mtp_num_layers = None  # they predict further tokens, for the training's loss


def _tokenizer_of(args: argparse.Namespace, tokenizer: Any) -> TextTokenizer:
    if isinstance(tokenizer, str):
        return build_tokenizer(TokenizerOptions(tokenizer_model=tokenizer))
    if tokenizer is not None:
        return adapt(tokenizer)
    try:
        return initialize.get_tokenizer()
    except ConfigError:
        return without_text(args.vocab_size or args.padded_vocab_size)


def _with_tokenizer(loaded: LoadedModel, tokenizer: TextTokenizer) -> LoadedModel:
    return replace(loaded, tokenizer=tokenizer, eos=frozenset({tokenizer.eod}), start=())
