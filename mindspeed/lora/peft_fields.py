"""Every key of ``adapter_config.json`` that peft's ``LoraConfig`` knows, and its role here.

============= =====================================================================================
used          :mod:`mindspeed.lora.peft` reads it
no effect     the adapter computes the same whatever it is (names, how it was drawn and trained)
fixed         it changes what the adapter computes, and there is one value only; others are refused
============= =====================================================================================

``tests/lora/test_peft_fields.py`` compares the table with the fields of the installed class. A key
that is not in it is refused, unless it says nothing (null, false, 0, empty): later versions of peft
add kinds of adapters by new keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspeed.errors import CheckpointError
from mindspeed.json_fields import (
    ANYTHING,
    BOOL,
    TEXT,
    Either,
    ListOf,
    MapOf,
    Real,
    Whole,
    check,
)
from mindspeed.models.config_fields import Field, KnownFields, fixed, used

_NO_EFFECT = Field(ANYTHING, "no effect")
_NAMES = Either(TEXT, ListOf(TEXT))
_LAYERS = Whole(0, 10_000)
_RANK, _ALPHA = Whole(1, 2**20), Real(1e-12, 1e12)
# Ways to draw A and B that leave the base model's weights as they are.
_DRAWN = (True, False, "gaussian", "eva", "orthogonal", "mica")

FIELDS: KnownFields = {
    **dict.fromkeys(
        (
            "task_type",
            "auto_mapping",
            "peft_version",
            "base_model_name_or_path",
            "revision",
            "inference_mode",
            "runtime_config",
            "megatron_core",
            # Options of what another key switches on.
            "loftq_config",
            "eva_config",
            "corda_config",
            "lora_ga_config",
            "qalora_group_size",
            "velora_config",  # stores activations in fewer bits; the function is the same
        ),
        _NO_EFFECT,
    ),
    "peft_type": fixed("LORA"),
    "r": Field(_RANK, "used"),
    "lora_alpha": Field(_ALPHA, "used"),
    "lora_dropout": used(Real(0, 1)),
    "use_rslora": used(BOOL),
    "rank_pattern": used(MapOf(_RANK)),
    "alpha_pattern": used(MapOf(_ALPHA)),
    "use_dora": used(BOOL),
    "target_modules": used(_NAMES),
    "exclude_modules": used(_NAMES),
    "target_parameters": used(ListOf(TEXT)),
    "layers_to_transform": used(Either(_LAYERS, ListOf(_LAYERS))),
    "layers_pattern": used(_NAMES),
    "modules_to_save": used(ListOf(TEXT)),
    "ensure_weight_tying": used(BOOL),
    "init_lora_weights": fixed(*_DRAWN),
    "bias": fixed("none"),
    "fan_in_fan_out": fixed(False),
    "lora_bias": used(BOOL),
    "use_qalora": fixed(False),
    **dict.fromkeys(
        (
            "layer_replication",
            "trainable_token_indices",
            "megatron_config",
            "alora_invocation_tokens",
            "monteclora_config",
            "use_bdlora",
            "arrow_config",
            "kasa_config",
        ),
        fixed(),
    ),
}
_INSTEAD = {
    "init_lora_weights": "peft changes the base model's weights before such an adapter is trained; "
    "write a plain one with save_pretrained(DIR, path_initial_model_for_weight_conversion=INITIAL)",
}


def check_fields(values: Mapping[str, Any], path: Path) -> None:
    """See that an ``adapter_config.json`` describes an adapter that can be read.

    Args:
        values: What it holds.
        path: The file, for messages.

    Raises:
        CheckpointError: Names the first key that is damaged, not supported or not known.
    """
    for name, value in values.items():
        field = FIELDS.get(name)
        if field is None and value:
            raise CheckpointError(
                f"{path}: {name} = {value!r:.60} is not known; merge it with peft"
            )
        if field is None or field.role != "fixed" or field.allowed.problem(value) is None:
            continue
        instead = _INSTEAD.get(name, "merge it with peft (merge_and_unload)")
        raise CheckpointError(f"{path}: {name} = {value!r:.60} is not supported; {instead}")
    missing = [name for name in ("r", "lora_alpha") if name not in values]
    if missing:
        raise CheckpointError(f"{path}: {missing[0]} is missing")
    check(values, {n: f.allowed for n, f in FIELDS.items()}, str(path), CheckpointError)
