"""Targets of adapters: options of an adapter, names of modules, and which of them users mean.

A Megatron linear layer is often several layers of other libraries in one: ``linear_qkv`` holds
queries, keys and values, ``linear_fc1`` holds gate and up. Such a layer has *parts*, and a name
means the whole layer (one A for all parts) or one part (a separate A):

==================================  ================================================
``query_key_value, linear_qkv``     queries, keys and values with one A
``q_proj, k_proj, v_proj``          one of them, with its own A, as PEFT does it
``gate_proj, up_proj``              gate or up; ``dense_h_to_4h`` is the latter
``linear_fc1, gate_up_proj``        both with one A
``all-linear``                      every linear layer but those of experts and the ends of
                                    the model, by parts
``embed_tokens, word_embeddings``   the embedding; with ``--lora-ensure-weight-tying`` the
                                    output layer of a tied model, too
``experts.down_proj`` and so on     the same of all experts that tokens are routed to,
                                    each with its own matrices
==================================  ================================================

A list of targets names modules of the whole model. A pipeline stage counts its layers from 0; here
``decoder.layers.7.mlp.linear_fc1`` is layer 7 of the whole model on whichever rank it lives.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from mindspeed.errors import CheckpointError, ConfigError
from mindspeed.files import check_path
from mindspeed.parsing import decode_json

DESCRIPTION = "adapter.json"
ALL_LINEAR = "all-linear"
WHOLE = "all"
HEAD = "score"
"""The head of a reward model, which is trained whole."""
INITIAL = r"kaiming|gaussian|orthogonal|olora|pissa(_niter_[1-9][0-9]?)?"

# Name -> the Megatron modules it may mean, with the part of each.
MEANINGS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "query_key_value": (("linear_qkv", WHOLE),),
    "W_pack": (("linear_qkv", WHOLE),),
    "q_proj": (("linear_qkv", "q"), ("linear_q_proj", WHOLE)),
    "k_proj": (("linear_qkv", "k"),),
    "v_proj": (("linear_qkv", "v"),),
    "q_a_proj": (("linear_q_down_proj", WHOLE),),
    "q_b_proj": (("linear_q_up_proj", WHOLE),),
    "kv_a_proj_with_mqa": (("linear_kv_down_proj", WHOLE),),
    "kv_b_proj": (("linear_kv_up_proj", WHOLE),),
    "dense": (("linear_proj", WHOLE),),
    "o_proj": (("linear_proj", WHOLE),),
    "gate_up_proj": (("linear_fc1", WHOLE),),
    "gate_proj": (("linear_fc1", "gate"),),
    "up_proj": (("linear_fc1", "up"),),
    "dense_h_to_4h": (("linear_fc1", "up"),),
    "down_proj": (("linear_fc2", WHOLE),),
    "dense_4h_to_h": (("linear_fc2", WHOLE),),
    "lm_head": (("output_layer", WHOLE),),
    "embed_tokens": (("word_embeddings", WHOLE),),
}


@dataclass(frozen=True)
class LoraConfig:
    """Options of an adapter; ``--lora-*`` on the command line.

    Attributes:
        target_modules: Names of the modules that get an adapter, see the module's table.
        r: Rank.
        alpha: The correction is multiplied by alpha / r.
        dropout: Probability with which an input of A is dropped.
        modules_to_save: Names of modules that are trained whole and saved with the adapter.
        init: How A and B begin, see :mod:`mindspeed.lora.initial`.
        use_rslora: Multiply by alpha / sqrt(r) instead.
        use_dora: Every row of the sum has a trained length.
        use_bias: B has a bias, which is trained: the layer has one, too (PEFT's ``lora_bias``).
        ensure_weight_tying: The output layer of a tied model has the embedding's adapter.
        modules: Rank and alpha of each module with an adapter, by its name in the whole model and
            its part (``decoder.layers.7.mlp.linear_fc1.up``), where they are not ``r`` and
            ``alpha`` of all that ``target_modules`` name; what is not in it has no adapter.
        adapter_name: Name in PEFT directories.
        base_weights: How the base model's linear layers were stored; empty: as they are.
        double_quantization: The scales of ``nf4`` were quantised, too.
        forward_hooks: Modules whose output is to carry gradients, in addition to the embedding.
        seed: Of A; the values do not depend on how the model is sharded.
    """

    target_modules: tuple[str, ...]
    r: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    modules_to_save: tuple[str, ...] = ()
    init: str = "kaiming"
    use_rslora: bool = False
    use_dora: bool = False
    use_bias: bool = False
    ensure_weight_tying: bool = False
    modules: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    adapter_name: str = "default"
    base_weights: str = ""
    double_quantization: bool = True
    forward_hooks: tuple[str, ...] = ("word_embeddings", "input_layernorm")
    seed: int = 1234

    def __post_init__(self) -> None:
        if not self.target_modules and not self.modules_to_save:
            raise ConfigError("--lora-target-modules is empty: name the modules to adapt")
        if self.r < 1:
            raise ConfigError(f"--lora-r {self.r} must be at least 1")
        if self.alpha <= 0:
            raise ConfigError(f"--lora-alpha {self.alpha} must be positive")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"--lora-dropout {self.dropout} must be at least 0 and less than 1")
        if not re.fullmatch(INITIAL, self.init):
            raise ConfigError(
                f"--lora-init {self.init} is not one of kaiming, gaussian, orthogonal, pissa, "
                "pissa_niter_N, olora"
            )
        if self.init == "orthogonal" and self.r % 2:
            raise ConfigError(f"--lora-init orthogonal needs an even --lora-r, not {self.r}")
        if self.use_bias and (self.use_dora or self.init not in ("kaiming", "gaussian")):
            other = "--lora-use-dora" if self.use_dora else f"--lora-init {self.init}"
            raise ConfigError(f"--lora-use-bias cannot be combined with {other}: leave out one")
        if self.use_dora and self.dropout:
            raise ConfigError(
                f"--lora-dropout {self.dropout} with --lora-use-dora: what has a length is the "
                "sum of base and adapter, of one input; leave the dropout out"
            )
        known = {name: (int(r), float(alpha)) for name, (r, alpha) in self.modules.items()}
        object.__setattr__(self, "modules", known)

    @property
    def scale(self) -> float:
        """What the correction is multiplied by."""
        return self.scale_of(self.r, self.alpha)

    def scale_of(self, r: int, alpha: float) -> float:
        """What a correction of this rank and alpha is multiplied by."""
        return alpha / (r**0.5 if self.use_rslora else r)

    def of_module(self, name: str) -> tuple[int, float]:
        """Rank and alpha of a module.

        Args:
            name: In the whole model, with its part, as ``modules`` has it.
        """
        return self.modules.get(name, (self.r, self.alpha))

    @property
    def from_base(self) -> bool:
        """Whether A and B begin as factors of the base model's weights, taken out of these."""
        return self.init.startswith(("pissa", "olora"))

    @property
    def plain(self) -> LoraConfig:
        """The adapter that changes the base model as it is: of twice the rank if A and B began
        as factors of its weights, by the same scale."""
        if not self.from_base:
            return self
        grow = 2**0.5 if self.use_rslora else 2.0
        modules = {name: (2 * r, grow * alpha) for name, (r, alpha) in self.modules.items()}
        return replace(self, r=2 * self.r, alpha=grow * self.alpha, init="kaiming", modules=modules)

    def to_json(self) -> str:
        """The description next to an adapter's weights."""
        return json.dumps({"type": "lora", **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, path: Path) -> LoraConfig:
        """Read a description.

        Raises:
            CheckpointError: It is damaged.
        """
        try:
            values: dict[str, Any] = decode_json(check_path(path, "input").read_text("utf-8"))
            known = {one.name for one in fields(cls)}
            values = {
                name: tuple(value) if isinstance(value, list) else value
                for name, value in values.items()
                if name in known
            }
            return cls(**values)
        except (ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error


_LAYER = re.compile(r"decoder\.layers\.(\d+)(?=\.|$)")
_EXPERTS = ".experts."
_EXPERT = re.compile(r"\.local_experts\.(\d+)(?=\.)")
# Grouped experts are one module; their matrices have the names that those of single experts have.
_GROUPED = re.compile(r"\.experts\.(\w+)\.(lora_(?:initial_)?[AB])\.(\d+)\.")
_MATRIX = re.compile(r"\.lora_(A|B|bias|initial_A|initial_B|magnitude)\.")
# Ends of the model rather than layers of it.
EMBEDDING, OUTPUT = "embedding.word_embeddings", "output_layer"


def named_modules(chunk: Any) -> Iterator[tuple[str, Any]]:
    """All modules of a pipeline stage by their names in the whole model."""
    for local, module in chunk.named_modules():
        yield in_whole_model(chunk, local), module


def in_whole_model(chunk: Any, local: str) -> str:
    """A stage's name of a module or parameter -> its name in the whole model."""
    name = local
    if found := _LAYER.match(local):
        number = chunk.decoder.layers[int(found[1])].layer_number - 1
        name = f"decoder.layers.{number}{local[found.end() :]}"
    if _EXPERTS in name:
        first = first_expert(chunk.config)
        name = _EXPERT.sub(lambda m: f".local_experts.{first + int(m[1])}", name)
        name = _GROUPED.sub(lambda m: expert_layer("", first + int(m[3]), f"{m[1]}.{m[2]}."), name)
    return name


def expert_layer(mlp: str, expert: int, layer: str) -> str:
    """Name of a layer of an expert in the whole model, however experts are computed."""
    return f"{mlp}.experts.local_experts.{expert}.{layer}"


def first_expert(config: Any) -> int:
    """Number of this rank's first expert in the whole model."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return 0
    ranks = parallel_state.get_expert_model_parallel_world_size()
    rank: int = parallel_state.get_expert_model_parallel_rank()
    return rank * (config.num_moe_experts // ranks)


def is_expert(name: str) -> bool:
    """Whether a module or parameter belongs to experts that tokens are routed to."""
    return _EXPERTS in name


def is_adapter_weight(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return _MATRIX.search(name) is not None


def is_end(name: str) -> bool:
    """Whether a module or parameter has the vocabulary's rows, padding included."""
    return name.startswith((f"{EMBEDDING}.", f"{OUTPUT}."))


def short_name(name: str) -> str:
    """The name of a layer for users: ``linear_proj``, ``experts.linear_fc1``."""
    return ("experts." if is_expert(name) else "") + name.rpartition(".")[2]


def targeted(name: str, parts: dict[str, int], targets: tuple[str, ...]) -> set[str]:
    """The parts of a layer that a list of targets names; ``all`` for one A for all parts."""
    asked = set[str]()
    for target in targets:
        if is_expert(name) != (_EXPERTS in f".mlp.{target.removeprefix('mlp.')}"):
            continue
        target = target.removeprefix("mlp.").removeprefix("experts.")
        if target == ALL_LINEAR:
            asked |= set() if name in (EMBEDDING, OUTPUT) else set(parts)
        for module, part in MEANINGS.get(target, ((target, WHOLE),)):
            if name == module or name.endswith(f".{module}"):
                # An MLP without a gate is only the part that others call up.
                asked.add(WHOLE if part == "up" and WHOLE in parts else part)
    return asked & {*parts, WHOLE}
