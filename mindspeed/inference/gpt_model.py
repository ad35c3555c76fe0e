"""``GPTModel``: a GPT that loads any checkpoint and generates, with Hugging Face's interface.

    initialize_megatron(args_defaults={"no_load_rng": True, "no_load_optim": True})
    model = GPTModel.from_pretrained(model_provider, "hf:models/llama2-7b")
    print(model.generate("Write quick sort code in python", max_new_tokens=512))

Without ``initialize_megatron`` the flags come from the checkpoint:

    model = GPTModel.from_pretrained(pretrained_model_name_or_path="runs/a/checkpoints")

All methods are collective: every rank calls them with the same arguments.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel as MegatronGPTModel

from mindspeed.data.tokenizer import build_tokenizer
from mindspeed.data.tokenizer_types import TextTokenizer, TokenizerOptions
from mindspeed.errors import ConfigError
from mindspeed.inference.hf_generate import OutputFormat, Prompts, new_token_limit
from mindspeed.inference.load import (
    LoadedModel,
    Source,
    adapt_tokenizer,
    build_and_load,
    load_model,
    without_text,
)
from mindspeed.inference.sampling import SamplingOptions
from mindspeed.inference.text_generator import TextGenerator
from mindspeed.models import model_extras
from mindspeed.training import initialize
from mindspeed.training.model import gpt_options

Provider = Callable[..., Any]


class GPTModel(MegatronGPTModel):
    """One pipeline stage of the model that this run's flags describe.

    Args:
        config: Megatron Core's configuration.
        num_tokentypes: 0; accepted for old scripts.
        parallel_output: Leave logits sharded over the tensor-parallel ranks.
        return_moe_loss: No effect; Megatron computes the load-balancing loss.
        pre_process: The stage has the embedding.
        post_process: The stage has the output layer.
        vp_stage: Index of the virtual pipeline stage.
        args: Resolved flags; default those of ``initialize_megatron``.
    """

    generator: TextGenerator

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
            raise ConfigError("the vocabulary size is unknown: give --tokenizer-model")
        options = gpt_options(args, config, pre_process, post_process, vp_stage)
        super().__init__(**{**options, "parallel_output": parallel_output})
        model_extras.change_model(args, self)

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
            model_provider: ``model_provider(pre_process=, post_process=)`` builds a stage;
                default this class.
            pretrained_model_name_or_path: Megatron checkpoints of any parallel layout, or
                ``hf:DIR``; None keeps the random initial weights.
            tensor_model_parallel_size: Only without ``initialize_megatron``; otherwise its flags
                decide.
            pipeline_model_parallel_size: Likewise.
            ckpt_step: Iteration; default the latest.
            tokenizer: A directory, a mindspeed tokenizer, or a transformers tokenizer; default the
                checkpoint's, or the one of ``initialize_megatron``.
            lora: Directory of a LoRA adapter, mindspeed's or PEFT's.

        Returns:
            The stage, with :meth:`generate`.

        Raises:
            ConfigError: Neither flags nor a checkpoint describe the model.
            CheckpointError: There is no checkpoint, or it holds a different model.
        """
        path = pretrained_model_name_or_path
        args = _initialized_args()
        if args is not None:
            _set_inference_flags(args, path, ckpt_step)
            chosen = _tokenizer_of(args, tokenizer)
            loaded = build_and_load(args, chosen, _provider(model_provider), lora)
        elif path is None:
            raise ConfigError(
                "from_pretrained(): call initialize_megatron() first, or give "
                "pretrained_model_name_or_path, whose checkpoint describes the model"
            )
        else:
            folder = tokenizer if isinstance(tokenizer, str) else None
            tp, pp = tensor_model_parallel_size, pipeline_model_parallel_size
            source = Source(path, ckpt_step, tp, pp, folder, lora)
            world_size = int(os.environ.get("WORLD_SIZE", "1"))
            loaded = load_model(source, world_size, _provider(model_provider))
            if tokenizer is not None and folder is None:
                loaded = _with_tokenizer(loaded, adapt_tokenizer(tokenizer))
        stage = loaded.stage
        stage.generator = TextGenerator.of(loaded)
        if not isinstance(stage, GPTModel):  # built by the caller's provider
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
        min_p: float = 0.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
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
        """Continue one or several prompts.

        Args:
            input_ids: A text, a list of texts, token ids, lists of them, or an integer
                tensor ``[s]`` or ``[b, s]``.
            attention_mask: bool or integer ``[b, s]``, 0 at left padding; only with a tensor
                ``[b, s]``.
            do_sample: Sample tokens; otherwise greedy decoding or beam search.
            top_k: Sample from the ``top_k`` most likely tokens; 0 keeps all.
            top_p: Sample from the smallest set of tokens whose probabilities sum to this.
            temperature: Divides the logits before sampling.
            num_beams: Width of a beam search; 1 disables it.
            length_penalty: A beam scores its log-probability / length ** penalty.
            early_stopping: End a beam search when ``num_beams`` sequences have finished.
            num_return_sequences: Continuations per prompt.
            max_length: Maximum length of prompt and new tokens; default 128.
            max_new_tokens: Maximum number of new tokens, instead of ``max_length``.
            min_new_tokens: No end token before this many new tokens.
            repetition_penalty: Above 1 makes tokens that occurred less likely.
            min_p: Drop tokens less likely than this fraction of the most likely one.
            presence_penalty: Subtracted from logits of tokens that have been generated.
            frequency_penalty: The same, for each time that they have been.
            logit_bias: Token ids, and what is added to their logits.
            eos_token_id: Ids that end a text; default the checkpoint's.
            bos_token_id: Start of an empty prompt; default the end-of-text token.
            pad_token_id: Padding id at the start of a tensor ``[b, s]``, if no mask is given.
            tokenizer: Replaces the model's tokenizer.
            stop: Strings that end a text; they are not part of it.
            recompute: Run the whole sequence for every token instead of keeping a KV cache.
            detokenize: Return texts; otherwise lists of ids.
            include_input: Return the prompt with its continuation.
            stream: Return an iterator over new output (one prompt, one continuation).
            return_output_log_probs: Also return the log-probability of every new token.
            seed: Random seed; default a new one per call, from torch's generator.

        Returns:
            A string (or ids) for one continuation of one prompt, otherwise a list, prompt by
            prompt. With log-probabilities a pair of that and of lists of numbers.

        Raises:
            ConfigError: An argument is invalid or contradicts another one.
            DataError: A prompt is empty, too long, or has ids outside the vocabulary.
        """
        generator = _with_overrides(self.generator, tokenizer, eos_token_id)
        prompts = Prompts.of(input_ids, attention_mask, pad_token_id)
        empty = [] if bos_token_id is None else [bos_token_id]
        tokens = [generator.encode(entry if len(entry) else empty) for entry in prompts.entries]
        options = SamplingOptions(
            max_new_tokens=new_token_limit(tokens, max_length, max_new_tokens),
            greedy=not do_sample,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=int(torch.randint(2**62, ())) if seed is None else seed,
            min_new_tokens=min_new_tokens,
            repetition_penalty=repetition_penalty,
            min_p=min_p,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=tuple((logit_bias or {}).items()),
            num_beams=num_beams,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            num_return_sequences=num_return_sequences,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            logprobs=0 if return_output_log_probs else None,
            recompute=recompute,
        )
        output = OutputFormat(detokenize, include_input, return_output_log_probs)
        run = output.stream if stream else output.results
        return run(generator, prompts, tokens, options)


def _with_overrides(
    generator: TextGenerator, tokenizer: Any, eos: int | Sequence[int] | None
) -> TextGenerator:
    if tokenizer is not None:
        adapted = adapt_tokenizer(tokenizer)
        generator = replace(generator, tokenizer=adapted, eos=frozenset({adapted.eod}))
    if eos is not None:
        generator = replace(generator, eos=frozenset([eos] if isinstance(eos, int) else eos))
    return generator


def _provider(model_provider: Provider | None) -> Any:
    def provide(args: Any, config: Any, pre: bool, post: bool, vp_stage: int | None) -> Any:
        if model_provider is not None:
            return model_provider(pre_process=pre, post_process=post)
        return GPTModel(config, 0, True, True, pre, post, vp_stage=vp_stage, args=args)

    return provide


def _initialized_args() -> argparse.Namespace | None:
    try:
        return initialize.get_args()
    except ConfigError:
        return None


def _set_inference_flags(args: argparse.Namespace, path: str | None, ckpt_step: int | None) -> None:
    """Change the flags of a training run to those of a forward-only model."""
    if args.virtual_pipeline_model_parallel_size:
        raise ConfigError(
            "generation does not support virtual pipeline stages: leave out "
            "--num-layers-per-virtual-pipeline-stage; checkpoints load into any layout"
        )
    args.load, args.ckpt_step = path, ckpt_step
    args.finetune = args.no_load_rng = args.exit_on_missing_checkpoint = True
    args.sequence_parallel = False  # decoding runs one token at a time
    args.mtp_num_layers = None  # multi-token prediction only adds a training loss


def _tokenizer_of(args: argparse.Namespace, tokenizer: Any) -> TextTokenizer:
    if isinstance(tokenizer, str):
        return build_tokenizer(TokenizerOptions(tokenizer_model=tokenizer))
    if tokenizer is not None:
        return adapt_tokenizer(tokenizer)
    try:
        return initialize.get_tokenizer()
    except ConfigError:
        return without_text(args.vocab_size or args.padded_vocab_size)


def _with_tokenizer(loaded: LoadedModel, tokenizer: TextTokenizer) -> LoadedModel:
    return replace(loaded, tokenizer=tokenizer, eos=frozenset({tokenizer.eod}), start=())
