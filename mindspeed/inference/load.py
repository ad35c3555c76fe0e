"""Load a trained model for inference, from a checkpoint of any layout or a Hugging Face directory.

Architecture, precision and tokenizer come from the checkpoint; tensor- and pipeline-parallel sizes
are free, because weights are resharded while they are read. Only weights are loaded. Sequence
parallelism and virtual pipeline stages are not used in generation.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed import lora, session
from mindspeed.built_model import BuiltModel
from mindspeed.checkpoint.architecture import take_architecture
from mindspeed.checkpoint.find import model_path, saved_args
from mindspeed.checkpoint.load import load
from mindspeed.checkpoint.options import CheckpointOptions
from mindspeed.data.tokenizer import build_tokenizer, check_fits
from mindspeed.data.tokenizer_types import PlainTokenizer, TextTokenizer, TokenizerOptions
from mindspeed.errors import ConfigError, DataError
from mindspeed.flags import changed, read
from mindspeed.json_fields import Either, ListOf, Real, Whole, check, or_null, read_object
from mindspeed.lora.flags import unquantizable
from mindspeed.lora.load import config_of
from mindspeed.models.hf_load import folder_of, is_hf
from mindspeed.models.model_config import ModelConfig
from mindspeed.storage import directory
from mindspeed.training import setup
from mindspeed.training.arguments import parse
from mindspeed.training.configs import transformer_config
from mindspeed.training.model import ModelProvider, build_modules, gpt_model
from mindspeed.training.options import LoraOptions
from mindspeed.training.resolve import resolve

# Sampling options that the authors of a model recommend.
_SAMPLING_FIELDS = {
    "temperature": or_null(Real(0, 100)),
    "top_p": or_null(Real(1e-6, 1)),
    "top_k": or_null(Whole()),
    "min_p": or_null(Real(0, 1)),
    "repetition_penalty": or_null(Real(1e-6)),
}
_END_FIELDS = {"eos_token_id": or_null(Either(Whole(), ListOf(Whole())))}


@dataclass(frozen=True)
class LoadedModel:
    """This rank's stage and its tokenizer.

    Attributes:
        stage: A ``GPTModel`` without wrappers, in evaluation mode.
        tokenizer: The checkpoint's, unless another was requested.
        args: Resolved flags.
        eos: Ids that end a text.
        start: Ids that every text begins with (bos), if the model was trained with them.
    """

    stage: Any
    tokenizer: TextTokenizer
    args: argparse.Namespace
    eos: frozenset[int]
    start: tuple[int, ...] = ()


@dataclass(frozen=True)
class Source:
    """A checkpoint and the parallel layout to load it in.

    Attributes:
        root: Directory of checkpoints (``--save`` of the training), or ``hf:DIR``.
        step: Iteration; None for the latest.
        tp: Tensor-parallel size.
        pp: Pipeline-parallel size.
        tokenizer: Directory of a tokenizer that replaces the checkpoint's.
        lora: Directory of a LoRA adapter, mindspeed's or PEFT's.
        base_weights: Store weights of linear layers as ``nf4``, ``int8`` or ``fp8``; ``none``: as
            they are. None: as those that the adapter was trained on.
    """

    root: str
    step: int | None = None
    tp: int = 1
    pp: int = 1
    tokenizer: str | None = None
    lora: str | None = None
    base_weights: str | None = None


def resolve_source(source: Source, world_size: int) -> argparse.Namespace:
    """Resolved flags of a checkpoint's model; reads one small file, creates no process group.

    Raises:
        CheckpointError: There is no valid checkpoint.
        ConfigError: The model cannot be sharded as requested.
    """
    saved = saved_args(source.root, source.step)
    argv = ["--load", source.root, "--finetune", "--no-load-rng", "--exit-on-missing-checkpoint"]
    argv += ["--tensor-model-parallel-size", str(source.tp)]
    argv += ["--pipeline-model-parallel-size", str(source.pp)]
    argv += ["--ckpt-step", str(source.step)] if source.step is not None else []
    args = parse(argv)
    take_architecture(args, saved)
    kept = vars(saved).keys() & {"bf16", "fp16", "transformer_impl", "padded_vocab_size"}
    args = changed(args, **{name: getattr(saved, name) for name in kept})
    if source.tokenizer is not None:
        kind = "HuggingFaceTokenizer"
        args = changed(args, tokenizer_type=kind, tokenizer_model=source.tokenizer)
    model = read(ModelConfig, args)
    vocab: int | None = model.padded_vocab_size
    if is_hf(source.root):  # the vocabulary is padded while the files are read
        multiple = model.make_vocab_size_divisible_by * source.tp
        vocab = -(-model.vocab_size // multiple) * multiple
        args = changed(args, padded_vocab_size=vocab)
    if vocab is not None and vocab % source.tp:
        raise ConfigError(
            f"the checkpoint's vocabulary of {vocab} entries is not divisible by "
            f"--tensor-model-parallel-size {source.tp}"
        )
    return _with_base(resolve(args, world_size, training=False).args, source)


def _with_base(args: argparse.Namespace, source: Source) -> argparse.Namespace:
    """How the base model's weights are stored: as the user says, else as the adapter knew them.

    Raises:
        ConfigError: They cannot be stored in this way.
    """
    form, hint, doubled = source.base_weights, "", read(LoraOptions, args).double_quantization
    described = config_of(source.lora) if source.lora is not None else None
    if described is not None and described.base_weights:
        doubled = described.double_quantization
        if form is None:
            form = described.base_weights
            hint = f" (the adapter {source.lora} was trained on them; or give --base-weights none)"
    form = None if form == "none" else form
    args = changed(args, base_weights=form, double_quantization=doubled)
    if form and (problem := next(unquantizable(args), None)):
        raise ConfigError(problem + hint)
    return args


def load_model(source: Source, world_size: int, provider: ModelProvider = gpt_model) -> LoadedModel:
    """Create the process groups, build and load this rank's stage. Collective."""
    args = resolve_source(source, world_size)
    session.install().configure(args)
    setup.initialize(args)
    options = TokenizerOptions.from_args(args)
    if is_hf(source.root) and options.tokenizer_type == "NullTokenizer":  # the directory has none
        tokenizer = without_text(read(ModelConfig, args).vocab_size)
    else:
        tokenizer = build_tokenizer(options)
    return build_and_load(args, tokenizer, provider, source.lora)


def build_and_load(
    args: argparse.Namespace,
    tokenizer: TextTokenizer,
    provider: ModelProvider = gpt_model,
    adapter: str | None = None,
) -> LoadedModel:
    """Build this rank's stage and read its weights from ``--load``, if given. Collective.

    Args:
        args: Resolved flags; the process groups exist.
        tokenizer: Text to ids and back.
        provider: Builds one pipeline stage.
        adapter: Directory of a LoRA adapter to attach.
    """
    sizes, options = read(ModelConfig, args), TokenizerOptions.from_args(args)
    masked = sizes.mask_padded_vocab and sizes.vocab_size
    check_fits(tokenizer, sizes.vocab_size if masked else sizes.padded_vocab_size)
    config = transformer_config(args)
    model = BuiltModel(config, build_modules(args, config, provider))
    files = read(CheckpointOptions, args)
    if files.load is not None:
        load(args, model)
    if adapter is not None:
        lora.load(model.modules, adapter)
    special = options.include_special_tokens or _from_hugging_face(files)
    start = _start(tokenizer) if special else ()
    folder = folder_of(files.load) if files.load and is_hf(files.load) else options.tokenizer_model
    ends = frozenset(_end_tokens(tokenizer, folder, sizes.vocab_size))
    return LoadedModel(model.modules[0].eval(), tokenizer, args, ends, start)


def _start(tokenizer: TextTokenizer) -> tuple[int, ...]:
    """Ids that the tokenizer itself prepends to a text, such as bos."""
    plain, special = (tokenizer.tokenize_with_offsets(["a"], add) for add in (False, True))
    if plain is None or special is None:
        return ()
    body, whole = list(plain[0].ids), list(special[0].ids)
    at = next((i for i in range(len(whole)) if whole[i : i + len(body)] == body), 0)
    return tuple(whole[:at])


def _from_hugging_face(files: CheckpointOptions) -> bool:
    """Such models expect the tokens that their tokenizer adds; ours see preprocessed data."""
    if files.load is None or is_hf(files.load):
        return files.load is not None
    return model_path(files.load, files.ckpt_step).name == directory.RELEASE


def _end_tokens(tokenizer: TextTokenizer, folder: str | None, vocab: int | None) -> Iterator[int]:
    """The tokenizer's end of text, and the end tokens that the model's configuration lists.

    As in transformers, ``config.json`` is read if there is no ``generation_config.json``.
    """
    if tokenizer.eod >= 0:
        yield tokenizer.eod
    for name in ("generation_config.json", "config.json"):
        path = Path(folder or "") / name
        if folder is None or not path.is_file():
            continue
        values = read_object(path, DataError)
        check(values, _END_FIELDS, str(path), DataError)
        found = values.get("eos_token_id")
        listed = found if isinstance(found, list) else [] if found is None else [found]
        limit = vocab or tokenizer.vocab_size
        yield from (token for token in listed if token < limit)
        return


def sampling_defaults(folder: Path | None) -> dict[str, Any]:
    """Sampling options in the ``generation_config.json`` of a folder, empty if there is none.

    Raises:
        DataError: A value is not allowed.
    """
    path = Path(folder or "") / "generation_config.json"
    if folder is None or not path.is_file():
        return {}
    values = read_object(path, DataError)
    check(values, _SAMPLING_FIELDS, str(path), DataError)
    return {name: values[name] for name in _SAMPLING_FIELDS if values.get(name) is not None}


def adapt_tokenizer(tokenizer: Any) -> TextTokenizer:
    """``tokenizer`` itself if it is a :class:`TextTokenizer`, else a wrapped transformers one.

    Raises:
        ConfigError: It is neither.
    """
    if hasattr(tokenizer, "detokenize"):
        return tokenizer
    if callable(tokenizer) and hasattr(tokenizer, "decode"):
        return _HFTokenizer(tokenizer)
    raise ConfigError(
        f"tokenizer is a {type(tokenizer).__name__}; a tokenizer of mindspeed.data.tokenizer or "
        "of transformers is expected"
    )


def without_text(vocab_size: int) -> TextTokenizer:
    """A generator of a model without a tokenizer: token ids in, token ids out."""
    return _IdsOnly(vocab_size)


class _HFTokenizer(PlainTokenizer):
    """A transformers ``PreTrainedTokenizer`` behind the :class:`TextTokenizer` protocol."""

    def __init__(self, tokenizer: Any) -> None:
        if tokenizer.eos_token_id is None:
            raise ConfigError("the tokenizer has no end-of-text token; set its eos_token")
        self._tokenizer = tokenizer
        self.vocab_size: int = len(tokenizer)
        self.eod: int = tokenizer.eos_token_id
        self.pad: int = self.eod if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.unique_identifiers: Mapping[str, Any] = {"class": type(tokenizer).__qualname__}

    def tokenize(self, text: str) -> list[int]:
        return list(self._tokenizer(text)["input_ids"])

    def token_id(self, text: str) -> int | None:
        return self._tokenizer.get_vocab().get(text)

    def piece(self, token: int) -> str | None:
        return self._tokenizer.convert_ids_to_tokens(token)

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


class _IdsOnly(PlainTokenizer):
    """A vocabulary without text."""

    eod = pad = -1
    unique_identifiers: Mapping[str, Any] = {}

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def tokenize(self, text: str) -> list[int]:
        raise ConfigError("a text needs a tokenizer: give --tokenizer-model, or token ids")

    def detokenize(self, ids: Sequence[int]) -> str:
        return ""
