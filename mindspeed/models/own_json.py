"""``config.json`` <-> flags: keys that only one family has.

Codecs as in :mod:`mindspeed.models.config_json`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mindspeed.models.config_json import Config, Flags, Rope


@dataclass(frozen=True)
class BloomSizes:
    """The MLP is always four times as wide, and there is no longest sequence."""

    def read(self, config: Config) -> Flags:
        return {
            "ffn_hidden_size": 4 * config["hidden_size"],
            "max_position_embeddings": config.get("seq_length", 2048),
            "kv_channels": config["hidden_size"] // _heads(config),
            "group_query_attention": False,
        }

    def write(self, args: Any) -> Flags:
        return {"seq_length": args.max_position_embeddings}


def _heads(config: Config) -> int:
    return config["n_head"] if "n_head" in config else config["num_attention_heads"]


@dataclass(frozen=True)
class BaichuanKind:
    """7B has rotary positions, 13B ALiBi; the second generation normalises its output layer.

    Their files say it only by the way: 13B has ``model_max_length`` alone, the second generation
    has ``z_loss_weight``.
    """

    def read(self, config: Config) -> Flags:
        rotary = "max_position_embeddings" in config
        length = config["max_position_embeddings" if rotary else "model_max_length"]
        flags: Flags = {
            "max_position_embeddings": length,
            "lm_norm_weight": "z_loss_weight" in config,
            "z_loss_weight": float(config.get("z_loss_weight", 0)),
        }
        return flags | (Rope().read(config) if rotary else {"position_embedding_type": "alibi"})

    def write(self, args: Any) -> Flags:
        rotary = args.position_embedding_type == "rope"
        length = args.max_position_embeddings
        keys: Flags = {"model_max_length": length}
        if rotary:
            keys |= {"max_position_embeddings": length, **Rope().write(args)}
        weight = getattr(args, "z_loss_weight", 0.0)
        return keys | ({"z_loss_weight": weight} if args.lm_norm_weight else {})
