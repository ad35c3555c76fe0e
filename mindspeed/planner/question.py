"""A job to plan from a model alone: the flags that a question does not say.

    name, flags = named_model("models/my-model")
    assumed, words = job_words(PURPOSES["lora"], name, flags, ["--seq-length", "8192"], devices=16)

``mindspeed plan qwen3-8b --on 16xh100`` asks for each purpose whether the model fits, how fast it
trains and with which flags. What the user has not said is assumed here and printed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mindspeed.megatron_adaptor  # noqa: F401  (before anything of Megatron)
from mindspeed.errors import ConfigError
from mindspeed.models.hf_load import PREFIX, folder_of
from mindspeed.models.presets import model_flags, presets
from mindspeed.training import recipe
from mindspeed.training.arguments import build_parser

Flags = Mapping[str, Any]

LONGEST = 4096
"""Tokens of a sample at most, where the user does not say it."""
_FIRST_GUESS: Flags = {
    "bf16": True,
    "use_flash_attn": True,
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
}
_EXPERTS: Flags = {
    "moe_grouped_gemm": True,
    "moe_permute_fusion": True,
    "moe_token_dispatcher_type": "alltoall",
}


@dataclass(frozen=True)
class Purpose:
    """What a model is trained for.

    Attributes:
        name: as in ``--for``.
        title: of its row.
        command: sub-command that trains.
        tokens: of a step, about; None: of :attr:`samples`.
        samples: of a step, at least.
        flags: that belong to it.
    """

    name: str
    title: str
    command: str
    tokens: int | None
    samples: int
    flags: Flags

    def assumed(self, model: Flags, given: Collection[str]) -> dict[str, Any]:
        """Flags of a job that the user has not said, but for its batch.

        Args:
            given: names that the user has set.
        """
        found = {**_FIRST_GUESS, **_kernels(model), **self.flags}
        if model.get("num_experts"):
            found |= _EXPERTS
        if "fp16" in given:
            del found["bf16"]
        found = {name: value for name, value in found.items() if name not in model}
        longest = min(LONGEST, model.get("max_position_embeddings") or LONGEST)
        found["seq_length"] = longest
        return {name: value for name, value in found.items() if name not in given}

    def batch(self, seq_length: int, devices: int) -> int:
        """Samples of a step, a multiple of the devices."""
        wanted = self.samples if self.tokens is None else self.tokens // seq_length
        return -(-max(wanted, 1) // devices) * devices

    def to_type(self, model: str, flags: Sequence[str]) -> list[str]:
        """The words after the sub-command, with what a run needs besides a plan's flags.

        Args:
            model: value of ``--model`` in the flags.
            flags: of a candidate.
        """
        words = list(flags)
        if self.command != "pretrain":
            at = words.index("--model")
            folder = "FOLDER" if model in presets() else model
            words[at : at + 2] = ["--load", f"{PREFIX}{folder}"]
            return [*words, "--data", "FILE.jsonl"]
        return [*words, "--data", "FILE", "--lr", "3e-4", "--train-iters", "N"]


PURPOSES: Mapping[str, Purpose] = {
    one.name: one
    for one in (
        Purpose("pretrain", "pretraining", "pretrain", 4 << 20, 1, {}),
        Purpose("finetune", "full fine-tuning", "finetune", None, 16, {}),
        Purpose("lora", "LoRA, rank 16", "finetune", None, 16,
                {"lora_r": 16, "lora_target_modules": ("all-linear",)}),
    )
}  # fmt: skip
"""What can be asked for, by name."""


def _kernels(model: Flags) -> dict[str, Any]:
    """Fused kernels for what the model has."""
    latent = model.get("multi_latent_attention")
    found = {
        "use_fused_rmsnorm": model.get("normalization") == "RMSNorm",
        "use_fused_swiglu": bool(model.get("swiglu")),
        "use_fused_rotary_pos_emb": model.get("position_embedding_type") == "rope" and not latent,
    }
    return {name: True for name, wanted in found.items() if wanted}


def named_model(text: str) -> tuple[str, Flags]:
    """The value of ``--model`` for a preset, a folder or ``hf:`` and a folder; and its flags.

    Raises:
        ConfigError: there is none, or its architecture is not known; names those that are.
    """
    name = folder_of(text)
    if name.endswith(".py"):
        raise ConfigError(f"{name}: a script and its flags stand behind --, after --cluster")
    if text.startswith(PREFIX) and not Path(name).is_dir():
        raise ConfigError(f"{text}: there is no such folder")
    return name, model_flags(name)


def job_words(
    purpose: Purpose, model: str, flags: Flags, said: Sequence[str], devices: int
) -> tuple[list[str], list[str]]:
    """The words that are assumed, and all words of a job.

    Args:
        model: value of ``--model``.
        said: words of the user.

    Raises:
        ConfigError: the user names another model.
    """
    parser = build_parser(with_help=False)
    given = recipe.given(said, parser)
    if "model" in given:
        raise ConfigError(f"--model: the model is {model} already; remove one")
    assumed = purpose.assumed(flags, given)
    words = ["--model", model, *recipe.flag_words(assumed, parser), *said]
    if "global_batch_size" not in given:
        length = assumed.get("seq_length") or recipe.parse_with_recipe(words, parser).seq_length
        assumed["global_batch_size"] = purpose.batch(length, devices)
    shown = recipe.flag_words(assumed, parser)
    return shown, ["--model", model, *shown, *said]
