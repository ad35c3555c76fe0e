"""Records transformers' own model on the tokens of another recording, under Megatron's names.

    weights, gradients   through the name maps of the checkpoint conversion, as Megatron has them
    linear layers, norms outputs of the modules whose weights they are; those of linear_qkv and
                         linear_fc1 are put together by columns like their weights by rows
    attention            query, key, value and output at transformers' attention function
    others               embedding: the first layer's input; layers; logits and choices of a router

Which file name a parameter in memory has is found out by writing the model once with numbers for
weights. What has no counterpart (the inside of experts, the optimizer) is in one recording only.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from mindspeed.compare.digest import whole
from mindspeed.compare.names import NO_MICRO_BATCH, Name, parameter_name
from mindspeed.compare.recorder import RunRecorder, write_job
from mindspeed.compare.recording import Recording, data_of
from mindspeed.errors import ConfigError
from mindspeed.journal import Journal
from mindspeed.models.families import family_of_config
from mindspeed.models.hf_files import read_config
from mindspeed.models.hf_reader import HFReader
from mindspeed.models.model_config import ModelConfig
from mindspeed.models.shape import shape_of
from mindspeed.models.table import Parameter, parameters

_LAYER = re.compile(r"decoder\.layers\.(\d+)")
_WITHOUT_BIAS = ("linear_proj", "linear_fc1", "linear_fc2")
"""Megatron's layers that return their bias apart."""
_REFUSED = {
    "reset_attention_mask": "has no documents in a sample",
    "eod_mask_loss": "counts all tokens in its loss",
    "mtp_num_layers": "predicts no tokens ahead",
    "moe_aux_loss_coeff": "adds nothing for its router to the loss",
    "moe_z_loss_coeff": "adds nothing for its router to the loss",
    "hidden_dropout": "drops other values",
    "attention_dropout": "drops other values",
}
_PLACE = {"tp": 0, "cp": 0, "dp": 0, "pp": 0, "sequence": False} | {
    f"{name}_size": 1 for name in ("tp", "cp", "dp", "pp")
}


def record(a: Recording, folder: Path, directory: Path) -> None:
    """Record transformers' model of a directory.

    Args:
        a: A training that began with the weights of ``folder``, with its tokens.
        folder: ``config.json`` and weights.
        directory: Of the new recording.

    Raises:
        ConfigError: ``a`` has no tokens, or its loss is no mean over all of them; transformers
            cannot load the model.
    """
    step = a.steps[0]
    _check(a)
    batches = _batches(a, step)
    recorder = RunRecorder(directory, 0, 1)
    write_job(directory, {**a.job, "load": str(folder), "transformers": _version()})
    own = recorder.begin(step)
    own.place = dict(_PLACE)
    scalars = {"loss_scale": 1.0, "micro_batches": a.scalars[step]["micro_batches"], "cp": 1}
    own.scalars = {**scalars, "per_token": False, "tokens": {}}
    run = _Run(a, step, recorder, folder)
    run.weights("begin", "weight", HFReader(folder, run.family))
    for number, (tokens, labels) in batches.items():
        run.micro_batch(number, tokens, labels)
    run.gradients()
    recorder.end()


def _check(a: Recording) -> None:
    """Refuse a training that transformers cannot repeat."""
    for name, reason in _REFUSED.items():
        given = a.job.get(name)
        if any(given) if isinstance(given, list) else given:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"--against: transformers {reason}: record A without {flag}")


def _batches(a: Recording, step: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and labels ``[b, s]`` of each micro-batch that A has recorded."""
    data, samples = data_of(a.directory, step), a.job.get("micro_batch_size", 1)
    found = {}
    for number, own in sorted(data.items()):
        if not {"tokens", "labels"} <= own.keys():
            raise ConfigError(
                f"--against: {a.directory} has no tokens: record --record-what inputs"
            )
        rows = [own[name].view(-1, samples).t().contiguous() for name in ("tokens", "labels")]
        found[number] = rows[0], rows[1]
    count = a.scalars[step]["micro_batches"] * max(1, a.sizes.get("dp_size", 1))
    if not found or len(found) < count:
        raise ConfigError(
            f"--against: {a.directory} has the tokens of {len(found)} of {count} micro-batches; "
            "record all of them"
        )
    return found


def _version() -> str:
    import transformers

    return str(transformers.__version__)


@dataclass
class _Kept:
    """A tensor of the model ``[b, s, ...]``, whose gradient is kept."""

    value: torch.Tensor
    gradient_of: torch.Tensor | None = None

    @property
    def gradient(self) -> torch.Tensor | None:
        return (self.value if self.gradient_of is None else self.gradient_of).grad


@dataclass
class _Part:
    """Columns of a module's output."""

    module: str
    start: int
    count: int


class _Run:
    """Transformers' model, recorded.

    Args:
        a: The recording whose names are wanted.
        step: Number of the step.
        recorder: Gets the tensors.
        folder: Of the model.
    """

    def __init__(self, a: Recording, step: int, recorder: RunRecorder, folder: Path) -> None:
        self._a, self._step, self._recorder = a, step, recorder
        self._count = a.scalars[step]["micro_batches"] * max(1, a.sizes.get("dp_size", 1))
        config = read_config(folder)
        self.family = family_of_config(config, str(folder))
        flags = self.family.read(config, str(folder))
        args = vars(ModelConfig.from_flags(flags, transformer_impl="local").namespace())
        vocabulary = Name(step, NO_MICRO_BATCH, "begin", "embedding.word_embeddings", "weight")
        if vocabulary in a.tensors:
            args = {**args, "padded_vocab_size": a.tensors[vocabulary].shape[0]}
        shape = shape_of(argparse.Namespace(**args))
        self._table = list(parameters(self.family.rules, shape))
        dtype = getattr(torch, str(a.job.get("params_dtype", "float32")).removeprefix("torch."))
        self._model = _loaded(folder, dtype)
        self._parts = self._parts_of_modules()
        self._kept: dict[str, _Kept] = {}

    def _parts_of_modules(self) -> dict[str, list[_Part]]:
        """Megatron module -> columns of transformers' modules, by the weights of both."""
        found: dict[str, list[_Part]] = {}
        names = list(dict(self._model.named_parameters()))
        marks = {
            name: torch.full(value.shape, float(number))
            for number, (name, value) in enumerate(self._model.named_parameters())
        }
        with self._written(marks) as reader:
            for parameter in self._table:
                module, _, kind = _recorded(parameter).rpartition(".")
                if kind != "weight" or parameter.expert is not None or not reader.has(parameter):
                    continue
                rows = reader.read(parameter)
                parts, position = list[_Part](), 0
                for segment in parameter.segments:
                    if segment.name is not None:
                        number = int(rows[position].reshape(-1)[0])
                        path = names[number].rpartition(".")[0]
                        parts.append(_Part(path, segment.start, segment.count))
                    position += segment.count
                found.setdefault(module, []).extend(parts)
        return found

    def _written(self, tensors: Mapping[str, torch.Tensor]) -> _Written:
        """The model's files with other values, by the names of its parameters."""
        values = {id(value): tensors[name] for name, value in self._model.named_parameters()}
        state = self._model.state_dict(keep_vars=True)  # has tied parameters twice
        filled = {name: values.get(id(value), value) for name, value in state.items()}
        return _Written(self._model, filled, self.family)

    def weights(self, when: str, what: str, reader: HFReader) -> None:
        """Record weights, or their gradients, as Megatron has them.

        Args:
            when: Pass.
            what: Kind.
            reader: Of the files that hold them.
        """
        values: dict[str, list[torch.Tensor]] = {}
        for parameter in self._table:
            if reader.has(parameter):
                values.setdefault(_recorded(parameter), []).append(reader.read(parameter))
        for path, parts in values.items():
            module, _, kind = path.rpartition(".")
            what_of = what if kind == "weight" else f"{kind}_{what}"
            name = Name(self._step, NO_MICRO_BATCH, when, module, what_of)
            if name in self._a.tensors:
                flat = torch.cat([part.reshape(len(part), -1) for part in parts])
                flat = flat.to(getattr(torch, self._a.tensors[name].dtype))
                exactly = when == "begin"
                self._recorder.add(*name[1:], flat, whole(*flat.shape), exactly=exactly)

    def gradients(self) -> None:
        """Record the gradients of all weights."""
        tensors = {
            name: torch.zeros_like(value) if value.grad is None else value.grad
            for name, value in self._model.named_parameters()
        }
        with self._written(tensors) as reader:
            self.weights("end", "main_grad", reader)

    def micro_batch(self, number: int, tokens: torch.Tensor, labels: torch.Tensor) -> None:
        """Record forward and backward.

        Args:
            number: Of the micro-batch.
            tokens: ``[b, s]`` int64.
            labels: ``[b, s]`` int64.
        """
        self._kept = {}
        journal = Journal()
        handles = list(self._hooks())
        self._watch_attention(journal)
        try:
            logits = self._model(input_ids=tokens, use_cache=False).logits
            self._kept["output_layer output"] = _retained(logits)  # scaled, as Megatron has them
            loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")
            loss = loss.view(labels.shape)
            loss.retain_grad()
            (loss.mean() / self._count).backward()
        finally:
            journal.undo()
            for handle in handles:
                handle.remove()
        self._kept["loss per_token"] = _Kept(loss)
        for what, value in (("tokens", tokens), ("labels", labels)):
            self._kept[f"data {what}"] = _Kept(value)
        for name in self._a.tensors:
            if name[:2] == (self._step, number) and name.when in ("forward", "backward"):
                self._record(name)

    def _record(self, name: Name) -> None:
        """Record what A has under a name, if this model has it."""
        what = name.what.removeprefix("grad_")
        kept = self._kept.get(f"{name.module} {what}")
        if kept is not None:
            x = kept.value if name.when == "forward" else kept.gradient
        else:
            x = self._joined(name.module, what, backward=name.when == "backward")
        own = self._a.tensors[name]
        if x is None:
            return
        x = x.detach()
        if x.dim() == 2:
            x = x[..., None]
        flat = x.transpose(0, 1).reshape(x.shape[0] * x.shape[1], -1)
        if name.module == "output_layer" and flat.shape[1] < own.shape[1]:
            if own.not_finite:  # Megatron's padding of the vocabulary is minus infinity
                return
            flat = F.pad(flat, (0, own.shape[1] - flat.shape[1]))
        if flat.shape == own.shape:
            exactly = name.module == "data"
            self._recorder.add(*name[1:], flat.contiguous(), whole(*flat.shape), exactly=exactly)

    def _joined(self, module: str, what: str, backward: bool) -> torch.Tensor | None:
        """The output of a Megatron module, of columns of transformers' modules: ``[b, s, h]``."""
        parts = self._parts.get(module)
        if not parts or what not in ("output", "input"):
            return None
        bare = module.endswith(_WITHOUT_BIAS) and what == "output" and not backward
        found = []
        for part in parts:
            kept = self._kept.get(f"{part.module}:{'bare' if bare else what}")
            x = None if kept is None else kept.gradient if backward else kept.value
            if x is None:
                return None
            found.append(x if what == "input" else x[..., part.start : part.start + part.count])
        return found[0] if what == "input" else torch.cat(found, -1)

    def _hooks(self) -> Iterator[Any]:
        """Hooks on the modules that have a counterpart."""
        layers: dict[int, str] = {}
        for name, parts in self._parts.items():
            number = _LAYER.match(name)
            path = re.match(r".*?\.\d+(?=\.)", parts[0].module)
            if number and path:
                layers[int(number[1])] = path[0]
            mixture = re.match(r".*?\.\d+\.\w+", parts[0].module)  # layer, its part
            if name.endswith("mlp.router") and mixture:
                keep = functools.partial(self._keep, name.removesuffix(".router"))
                yield self._model.get_submodule(mixture[0]).register_forward_hook(keep)
                keep = functools.partial(self._logits, name)
                yield self._model.get_submodule(parts[0].module).register_forward_hook(keep)
        for leaf in {part.module for parts in self._parts.values() for part in parts}:
            module = self._model.get_submodule(leaf)
            yield module.register_forward_hook(functools.partial(self._leaf, leaf))
        for at, layer in layers.items():
            keep = functools.partial(self._keep, f"decoder.layers.{at}")
            yield self._model.get_submodule(layer).register_forward_hook(keep)
        first = self._model.get_submodule(layers[0])
        yield first.register_forward_pre_hook(self._embedding, with_kwargs=True)

    def _keep(self, name: str, module: Any, args: Any, output: Any) -> None:
        x = output[0] if isinstance(output, tuple) else output
        self._kept[f"{name} output"] = _retained(x)

    def _leaf(self, path: str, module: Any, args: Any, output: Any) -> None:
        x = output[0] if isinstance(output, tuple) else output
        self._kept[f"{path}:output"] = kept = _retained(x)
        if args and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
            self._kept[f"{path}:input"] = _retained(args[0])
            if isinstance(module, torch.nn.Linear):
                with torch.no_grad():
                    bare = F.linear(args[0], module.weight)
                self._kept[f"{path}:bare"] = _Kept(bare, kept.value)

    def _logits(self, name: str, module: Any, args: Any, output: Any) -> None:
        with torch.no_grad():
            x = args[0].view(self._samples, -1, args[0].shape[-1])
            bias = getattr(module, "bias", None)
            self._kept[f"{name} logits"] = _Kept(F.linear(x, module.weight, bias))

    def _embedding(self, module: Any, args: Any, kwargs: Any) -> None:
        x = args[0] if args else kwargs["hidden_states"]
        self._kept["embedding output"] = _retained(x)
        self._samples = len(x)

    def _watch_attention(self, journal: Journal) -> None:
        """Keep what transformers' attention function gets and returns."""
        code = sys.modules[type(self._model).__module__]
        inner = getattr(code, "eager_attention_forward", None)
        if inner is None:
            return
        config = self._model.config
        apart = (
            any(parameter.latent for parameter in self._table)  # other orders of channels
            or getattr(config, "attn_temperature_tuning", False)  # a factor of the scores
            or config.model_type.startswith("hunyuan")  # normalized inside Megatron's attention
        )
        layers = {
            module: int(found[1])
            for path, module in self._model.named_modules()
            if (found := re.search(r"\.(\d+)\.", f"{path}."))
        }

        def attention(
            module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any
        ) -> Any:
            result = inner(module, query, key, value, *args, **kwargs)
            name = f"decoder.layers.{layers[module]}.self_attention.core_attention"
            pairs = [("query", query), ("key", key), ("value", value)]
            for what, x in pairs[2:] if apart else pairs:
                self._kept[f"{name} {what}"] = _of_heads(x)
            self._kept[f"{name} output"] = _retained(result[0])
            return result

        journal.set(code, "eager_attention_forward", attention, owner="compare")


def _of_heads(x: torch.Tensor) -> _Kept:
    """Keep ``[b, heads, s, d]`` as ``[b, s, heads, d]``."""
    x.retain_grad()
    return _Heads(x)


class _Heads(_Kept):
    """A tensor of heads ``[b, heads, s, d]``."""

    def __init__(self, x: torch.Tensor) -> None:
        super().__init__(x.detach().transpose(1, 2), x)

    @property
    def gradient(self) -> torch.Tensor | None:
        assert self.gradient_of is not None
        found = self.gradient_of.grad
        return None if found is None else found.transpose(1, 2)


def _retained(x: torch.Tensor) -> _Kept:
    if x.requires_grad and not x.is_leaf:
        x.retain_grad()
    return _Kept(x)


def _recorded(parameter: Parameter) -> str:
    """A parameter's name in a recording, of which it may be some rows."""
    name = parameter_name(parameter.name).replace(".local_experts.", ".")
    return re.sub(r"\.weight\.\w+$", ".weight", name)


def _loaded(folder: Path, dtype: torch.dtype) -> Any:
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError as error:
        raise ConfigError("this needs transformers: pip install 'mindspeed[suite]'") from error
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, attn_implementation="eager"
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"--against hf:{folder}: transformers cannot load it: {error}") from error
    model.get_input_embeddings().padding_idx = None  # whose token would get no gradient
    return model.eval()


class _Written:
    """A directory in which a model's tensors have other values, and its reader."""

    def __init__(self, model: Any, tensors: Mapping[str, torch.Tensor], family: Any) -> None:
        self._holder = tempfile.TemporaryDirectory(prefix="mindspeed-hf-")
        model.save_pretrained(self._holder.name, state_dict=dict(tensors))
        self._family = family

    def __enter__(self) -> HFReader:
        return HFReader(self._holder.name, self._family)

    def __exit__(self, *error: object) -> None:
        self._holder.cleanup()
