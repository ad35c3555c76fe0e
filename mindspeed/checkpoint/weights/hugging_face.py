"""Hugging Face directories: ``config.json``, safetensors or ``.bin``, and the tokenizer."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from mindspeed.data.hf_tokenizer import GENERIC_CLASSES
from mindspeed.data.hf_tokenizer import read_config as read_config_of_tokenizer
from mindspeed.errors import CheckpointError
from mindspeed.files import atomic_write_text
from mindspeed.flags import read
from mindspeed.json_fields import read_object
from mindspeed.models.families import (
    Family,
    family_of_args,
    family_of_config,
    family_or_gpt,
)
from mindspeed.models.hf_files import CONFIG, check_mtp, read_config
from mindspeed.models.hf_reader import HFReader
from mindspeed.models.hf_writer import TensorSpec, write_weights
from mindspeed.models.model_config import ModelConfig
from mindspeed.models.naming import Scheme
from mindspeed.models.stored_weights import pack
from mindspeed.models.table import SCORE, Parameter
from mindspeed.models.weight_shards import joined
from mindspeed.models.weight_source import WeightSource

# Files copied unchanged with a model.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def model_config(
    folder: str | Path,
    transformer_impl: Scheme = "transformer_engine",
    mtp_num_layers: int | None = None,
) -> ModelConfig:
    """The model that a directory describes, with its vocabulary unpadded.

    Args:
        folder: The directory.
        transformer_impl: Layer spec of the Megatron model that it becomes.
        mtp_num_layers: Number of its multi-token prediction layers to take.

    Raises:
        ConfigError: ``config.json`` is missing, or the model has no counterpart in Megatron.
        CheckpointError: It has fewer multi-token prediction layers.
    """
    folder = Path(folder)
    config = read_config(folder)
    family = family_of_config(config, where := str(folder / CONFIG))
    flags = family.read(config, where)
    check_mtp(family.mtp_layers(config), mtp_num_layers, folder)
    return ModelConfig.from_flags(
        flags,
        transformer_impl=transformer_impl,
        mtp_num_layers=mtp_num_layers or None,
        **tokenizer_flags(folder),
    )


def tokenizer_flags(folder: str | Path) -> dict[str, str]:
    """Flags of the tokenizer in a directory; none if it has none."""
    folder = Path(folder)
    if not any((folder / name).is_file() for name in COMPANIONS[:3]):
        return {}
    return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder.resolve())}


class HFWeights(WeightSource):
    """The model of a directory; its files are checked when it is opened.

    Args:
        folder: The directory.
        transformer_impl: Layer spec of the Megatron model that it becomes.
        mtp_num_layers: Number of its multi-token prediction layers to take.

    Raises:
        CheckpointError: A tensor is missing or has another shape than ``config.json`` says.
        ConfigError: Megatron does not have this model.
    """

    def __init__(
        self,
        folder: str | Path,
        transformer_impl: Scheme = "transformer_engine",
        mtp_num_layers: int | None = None,
    ) -> None:
        config = read_config(folder)
        family = family_of_config(config, str(Path(folder) / CONFIG))
        model = model_config(folder, transformer_impl, mtp_num_layers)
        super().__init__(str(folder), model.namespace(), family)
        self._reader = HFReader(folder, family)
        for parameter in self.table:
            self._reader.check(parameter)
        self.unused = self._reader.unused_tensors(self.table, family.mtp_layers(config))

    def dtype(self, parameter: Parameter) -> torch.dtype:
        """Type of its first source."""
        return self._reader.dtype(parameter)

    def read(self, parameter: Parameter) -> torch.Tensor:
        """The whole parameter, ``[*parameter.shape]`` in :meth:`dtype`, joined from tensors."""
        return self._reader.read(parameter)


def write_hf(
    weights: WeightSource, folder: Path, *, like: str | None = None, max_shard_bytes: int
) -> Family:
    """Write a directory that transformers can load.

    Args:
        weights: The model.
        folder: An existing directory.
        like: Directory whose ``config.json`` (keys that are not about the shape), tokenizer and
            generation settings go with the model.
        max_shard_bytes: Largest size of a file with more than one tensor.

    Returns:
        The family it was written as.

    Raises:
        ConfigError: No family is like this model.
    """
    base = read_config(like) if like else {}
    if not weights.family.codecs:
        family_of_args(weights.args)  # says that no family is like this model
    stacks, experts = weights.family.stacks, weights.shape["experts"]

    def plain(make: Callable[[Parameter], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        copies = {p.sources[0]: p.copies for p in weights.table if p.copies}
        for name, tensor in joined((make(p), p.segments) for p in weights.table):
            yield name, tensor
            yield from ((copy, tensor) for copy in copies.get(name, ()))

    def empty(parameter: Parameter) -> torch.Tensor:
        return torch.empty(parameter.shape, dtype=weights.dtype(parameter), device="meta")

    specs = [
        TensorSpec(name, tensor.dtype, tuple(tensor.shape))
        for name, tensor in pack(plain(empty), stacks, experts)
    ]
    contents = pack(plain(weights.read), stacks, experts)

    companions = like or read(ModelConfig, weights.args).tokenizer_model
    config = _config(weights, base, companions)
    config["torch_dtype"] = _DTYPES[specs[0].dtype]
    write_weights(folder, specs, contents, max_shard_bytes)
    atomic_write_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")
    _copy_companions(companions, folder)
    return weights.family


def _config(weights: WeightSource, base: dict[str, Any], companions: str | None) -> dict[str, Any]:
    """``config.json``: the model by its flags, its special tokens, and what ``base`` says beyond.

    Keys of ``base`` that a codec reads are left out, also where no codec writes them: a size in
    another spelling would win over the one that is written.
    """
    read = {key for key, field in weights.family.fields.items() if field.role != "no effect"}
    ours = {"dtype", "quantization_config"}  # of the weights that are written
    config = {k: v for k, v in base.items() if k not in read | ours}
    config |= weights.family.write(weights.args)
    scored = SCORE.needs in weights.shape.has
    if base:
        named = ("model_type",) if scored else ("architectures", "model_type")
        config |= {k: base[k] for k in named if k in base}
    config |= _special_tokens(companions)
    if scored and config["pad_token_id"] == config["eos_token_id"]:
        # Such a class rewards the last token that is no padding, which is the end of an answer.
        config["pad_token_id"] = None
    return config


def _special_tokens(folder: str | None) -> dict[str, Any]:
    """Ids of the special tokens, null where there are none: a class's defaults fit no tokenizer.

    Those of ``config.json`` next to the tokenizer, otherwise those of ``generation_config.json``,
    so that the two agree, and last the tokenizer's own.
    """
    found: dict[str, Any] = dict.fromkeys(_SPECIAL)
    if folder is None:
        return found
    for name in (CONFIG, "generation_config.json"):
        path = Path(folder) / name
        if path.is_file():
            values = read_object(path, CheckpointError)
            return {key: values.get(key) for key in _SPECIAL}
    if not (Path(folder) / "tokenizer_config.json").is_file():
        return found
    from mindspeed.data.tokenizer import build_tokenizer
    from mindspeed.data.tokenizer_types import TokenizerOptions

    tokenizer = build_tokenizer(TokenizerOptions(tokenizer_model=str(folder)))
    special = read_config_of_tokenizer(Path(folder))
    for name in ("bos", "pad"):
        token = special.get(f"{name}_token")
        token = token.get("content") if isinstance(token, dict) else token
        found[f"{name}_token_id"] = None if token is None else tokenizer.token_id(token)
    return found | {"eos_token_id": tokenizer.eod}


def family_like(args: argparse.Namespace, like: str | None) -> Family:
    """The family of a Megatron model: that of ``like``, or the one its values describe."""
    return family_of_config(read_config(like)) if like else family_or_gpt(args)


def _copy_companions(source: str | None, target: Path) -> None:
    if source is None:
        return
    for name in COMPANIONS:
        path = Path(source) / name
        if path.is_file():
            shutil.copyfile(path, target / name)
    _keep_ids(target)


def _keep_ids(folder: Path) -> None:
    """Make transformers open a tokenizer that is complete in its ``tokenizer.json`` from that file.

    For some kinds of models (Qwen2) transformers takes the family's own class whatever the files
    name, and that class cuts texts its own way: other ids, without a word. The one thing that it
    puts before the kind of the model is an entry for code of the tokenizer's own; an empty one
    leads to the class that the files name. Opened with ``trust_remote_code`` it is an error there,
    not another tokenizer.
    """
    path = folder / "tokenizer_config.json"
    if not path.is_file() or not (folder / "tokenizer.json").is_file():
        return
    values = read_object(path, CheckpointError)
    kind = read_object(folder / CONFIG, CheckpointError)["model_type"]
    if values.get("tokenizer_class") not in GENERIC_CLASSES or "auto_map" in values:
        return
    from transformers.models.auto import tokenization_auto

    if kind in getattr(tokenization_auto, "MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS", ()):
        values["auto_map"] = {"AutoTokenizer": [None, None]}
        atomic_write_text(path, json.dumps(values, indent=2, ensure_ascii=False) + "\n")
