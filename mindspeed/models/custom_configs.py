"""``config.json`` <-> flags: keys that only one family has.

Codecs as in :mod:`mindspeed.models.config_json`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mindspeed.errors import ConfigError
from mindspeed.models.config_json import Config, Flags, Rope


@dataclass(frozen=True)
class BloomSizes:
    """The MLP is always four times as wide, and there is no longest sequence."""

    def read(self, config: Config) -> Flags:
        heads = config["n_head"]
        if config["hidden_size"] % heads:
            raise ConfigError(
                f"config.json: hidden_size {config['hidden_size']} is not divisible by n_head "
                f"{heads}"
            )
        return {
            "ffn_hidden_size": 4 * config["hidden_size"],
            "max_position_embeddings": config["seq_length"],
            "kv_channels": config["hidden_size"] // heads,
            "group_query_attention": False,
        }

    def write(self, args: Any) -> Flags:
        return {"seq_length": args.max_position_embeddings}


@dataclass(frozen=True)
class BaichuanKind:
    """7B has rotary positions, 13B ALiBi; the second generation normalises its output layer.

    Their files say it only by the way: 13B has ``model_max_length`` alone, the second generation
    has ``z_loss_weight``.
    """

    def read(self, config: Config) -> Flags:
        rotary = "max_position_embeddings" in config
        key = "max_position_embeddings" if rotary else "model_max_length"
        if key not in config:
            raise ConfigError("config.json has no max_position_embeddings and no model_max_length")
        length = config[key]
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
