"""``config.json`` <-> flags: mixtures of experts and latent attention.

Codecs as in :mod:`mindspeed.models.config_json`, for the parts that only some families have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mindspeed.errors import ConfigError
from mindspeed.models.config_json import Config, Fields, Flags, rotary_base

_SOFTMAX_FIELDS = Fields(
    {
        "num_experts": ("num_local_experts", "num_experts"),
        "moe_router_topk": "num_experts_per_tok",
        "moe_aux_loss_coeff": "router_aux_loss_coef",
    }
)

# A router in fp32 without a loss that balances it.
_UNBALANCED: Flags = {
    "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": ["none"],
    "moe_token_dispatcher_type": "alltoall",
}


@dataclass(frozen=True)
class SoftmaxExperts:
    """Experts chosen by softmax (Mixtral, Qwen3-MoE).

    Attributes:
        count_key: Which spelling of the number of experts the family's files have.
        own_size: Experts have a separate feed-forward size.
        renormalize: The family always renormalises the chosen probabilities; None: a key says.
        dense_layers: Keys of a family with experts of their own size may leave layers dense.
    """

    count_key: str
    own_size: bool
    renormalize: bool | None
    dense_layers: bool = True

    def read(self, config: Config) -> Flags:
        """Flags of the experts and their router."""
        size_key = "moe_intermediate_size" if self.own_size else "intermediate_size"
        flags = _SOFTMAX_FIELDS.read(config)
        _check_choice(flags["moe_router_topk"], flags["num_experts"])
        flags["moe_ffn_hidden_size"] = config[size_key]
        renormalize = self.renormalize
        if renormalize is None:
            renormalize = config["norm_topk_prob"]
        flags["moe_router_pre_softmax"] = not renormalize
        flags["moe_router_load_balancing_type"] = ["aux_loss"]
        flags["moe_token_dispatcher_type"] = "alltoall"
        dense, step = set(config.get("mlp_only_layers", ())), config.get("decoder_sparse_step", 1)
        layers = range(config["num_hidden_layers"])
        pattern = [int(i not in dense and (i + 1) % step == 0) for i in layers]
        flags["moe_layer_freq"] = _frequency(pattern)
        return flags

    def write(self, args: Any) -> Flags:
        """Keys of the experts and their router."""
        keys = _SOFTMAX_FIELDS.write(args)
        keys[self.count_key] = keys.pop("num_local_experts")
        coefficient = keys["router_aux_loss_coef"]
        if isinstance(coefficient, list):
            keys["router_aux_loss_coef"] = coefficient[0]
        if self.own_size:
            keys["moe_intermediate_size"] = args.moe_ffn_hidden_size
        if self.own_size and self.dense_layers:
            keys["decoder_sparse_step"] = 1
            keys["mlp_only_layers"] = _dense_layers(args)
        if self.renormalize is None:
            keys["norm_topk_prob"] = not args.moe_router_pre_softmax
        return keys


@dataclass(frozen=True)
class GatedSharedExpert:
    """A shared expert whose output a gate scales (Qwen2-MoE)."""

    def read(self, config: Config) -> Flags:
        """Read the size; the gate is always there."""
        size = config["shared_expert_intermediate_size"]
        return {"moe_shared_expert_intermediate_size": size, "moe_shared_expert_gate": True}

    def write(self, args: Any) -> Flags:
        """The size."""
        return {"shared_expert_intermediate_size": args.moe_shared_expert_intermediate_size}


_GREEDY_FIELDS = Fields(
    {
        "num_experts": ("n_routed_experts", "num_experts"),
        "moe_router_topk": "num_experts_per_tok",
        "moe_router_topk_scaling_factor": "routed_scaling_factor",
        "moe_ffn_hidden_size": "moe_intermediate_size",
    }
)


@dataclass(frozen=True)
class GreedyExperts:
    """Experts of DeepSeek-V2: softmax over all, the chosen ones' probabilities times a factor."""

    def read(self, config: Config) -> Flags:
        """Flags; a group's score is that of its best expert."""
        flags = _GREEDY_FIELDS.read(config)
        topk, size = flags["moe_router_topk"], flags["moe_ffn_hidden_size"]
        _check_choice(topk, flags["num_experts"])
        flags |= {
            **_UNBALANCED,
            "moe_router_pre_softmax": True,
            "moe_shared_expert_intermediate_size": config["n_shared_experts"] * size or None,
            "moe_layer_freq": _dense_first(config),
        }
        if config["topk_method"] == "group_limited_greedy":
            flags |= _groups(config, topk, counted=1)
        return flags

    def write(self, args: Any) -> Flags:
        """Keys of the experts and their router."""
        size = args.moe_ffn_hidden_size
        keys = _GREEDY_FIELDS.write(args) | {
            "n_shared_experts": (args.moe_shared_expert_intermediate_size or 0) // size,
            "first_k_dense_replace": len(_dense_layers(args)),
            "topk_method": "greedy",
            "norm_topk_prob": False,
        }
        if args.moe_router_num_groups:
            keys |= {
                "topk_method": "group_limited_greedy",
                "n_group": args.moe_router_num_groups,
                "topk_group": args.moe_router_group_topk,
            }
        return keys


@dataclass(frozen=True)
class SigmoidExperts:
    """Experts of DeepSeek-V3: sigmoid scores, a bias that balances, groups, a shared expert."""

    def read(self, config: Config) -> Flags:
        """Flags; a group's score is that of its best two experts."""
        topk, chosen = config["num_experts_per_tok"], config["topk_group"]
        experts, groups = config["n_routed_experts"], config["n_group"]
        _check_choice(topk, experts)
        if experts % groups or experts // groups < 2 or chosen > groups:
            raise ConfigError(
                f"config.json: n_group is {groups}; allowed is a divisor of n_routed_experts "
                f"{experts} that leaves two experts or more, and is not below topk_group {chosen}"
            )
        size = config["moe_intermediate_size"]
        return {
            **_UNBALANCED,
            "num_experts": experts,
            "moe_router_topk": topk,
            **_groups(config, topk, counted=2),
            "moe_router_topk_scaling_factor": config["routed_scaling_factor"],
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_ffn_hidden_size": size,
            "moe_shared_expert_intermediate_size": config["n_shared_experts"] * size or None,
            "moe_layer_freq": _dense_first(config),
        }

    def write(self, args: Any) -> Flags:
        """Keys of the experts and their router."""
        shared = args.moe_shared_expert_intermediate_size or 0
        return {
            "n_routed_experts": args.num_experts,
            "num_experts_per_tok": args.moe_router_topk,
            "n_group": args.moe_router_num_groups,
            "topk_group": args.moe_router_group_topk,
            "routed_scaling_factor": args.moe_router_topk_scaling_factor,
            "norm_topk_prob": True,
            "moe_intermediate_size": args.moe_ffn_hidden_size,
            "n_shared_experts": shared // args.moe_ffn_hidden_size,
            "first_k_dense_replace": len(_dense_layers(args)),
        }


@dataclass(frozen=True)
class UngroupedSigmoidExperts:
    """Experts chosen by sigmoid scores and a bias that balances, nothing else (MiniMax-M2)."""

    _FIELDS = Fields(
        {
            "num_experts": ("num_local_experts", "num_experts"),
            "moe_router_topk": "num_experts_per_tok",
            "moe_ffn_hidden_size": "intermediate_size",
        }
    )

    def read(self, config: Config) -> Flags:
        """Flags of the experts and their router."""
        flags = self._FIELDS.read(config)
        _check_choice(flags["moe_router_topk"], flags["num_experts"])
        return {
            **flags,
            **_UNBALANCED,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
        }

    def write(self, args: Any) -> Flags:
        """The three keys."""
        return self._FIELDS.write(args)


@dataclass(frozen=True)
class HunyuanExperts:
    """Experts of one size with a shared one beside them, chosen by softmax (Hunyuan)."""

    def read(self, config: Config) -> Flags:
        """Flags; a list of experts per token, one number a layer, must hold one number."""
        topk = config["moe_topk"]
        if isinstance(topk, list) and len(set(topk)) != 1:
            raise ConfigError(f"config.json: moe_topk is {topk}; allowed is one number")
        topk = topk[0] if isinstance(topk, list) else topk
        _check_choice(topk, config["num_experts"])
        size = config["intermediate_size"]
        return {
            **_UNBALANCED,
            "num_experts": config["num_experts"],
            "moe_router_topk": topk,
            "moe_ffn_hidden_size": size,
            "moe_shared_expert_intermediate_size": size,
        }

    def write(self, args: Any) -> Flags:
        """Both numbers."""
        return {"num_experts": args.num_experts, "moe_topk": args.moe_router_topk}


@dataclass(frozen=True)
class ErnieExperts:
    """Experts chosen by softmax scores and a bias, in some layers (ERNIE 4.5)."""

    _FIELDS = Fields(
        {
            "num_experts": ("moe_num_experts", "num_experts"),
            "moe_router_topk": ("moe_k", "num_experts_per_tok"),
            "moe_ffn_hidden_size": "moe_intermediate_size",
        }
    )

    def read(self, config: Config) -> Flags:
        """Flags of the experts, their router and their layers."""
        flags = self._FIELDS.read(config)
        _check_choice(flags["moe_router_topk"], flags["num_experts"])
        layers, start = config["num_hidden_layers"], config["moe_layer_start_index"]
        end, interval = config["moe_layer_end_index"], config["moe_layer_interval"]
        last = layers - 1 if end == -1 else end
        pattern = [int(start <= i <= last and (i + 1) % interval == 0) for i in range(layers)]
        shared = config["moe_num_shared_experts"] * flags["moe_ffn_hidden_size"]
        return {
            **_UNBALANCED,
            **flags,
            "moe_softmax_choice_bias": True,
            "moe_shared_expert_intermediate_size": shared or None,
            "moe_layer_freq": _frequency(pattern),
        }

    def write(self, args: Any) -> Flags:
        """The same keys; layers with experts lie between two others, at one distance."""
        dense = _dense_layers(args)
        moe = [layer for layer in range(args.num_layers) if layer not in dense]
        shared = args.moe_shared_expert_intermediate_size or 0
        return self._FIELDS.write(args) | {
            "moe_num_shared_experts": shared // args.moe_ffn_hidden_size,
            "moe_layer_start_index": moe[0] if moe else args.num_layers,
            "moe_layer_end_index": moe[-1] if moe else args.num_layers - 1,
            "moe_layer_interval": moe[1] - moe[0] if len(moe) > 1 else 1,
        }


@dataclass(frozen=True)
class InputScaledExperts:
    """One expert a token, whose input its sigmoid score scales, and a shared one (Llama 4)."""

    def read(self, config: Config) -> Flags:
        """Flags of the experts, their router and their layers."""
        layers, size = set(config["moe_layers"]), config["intermediate_size"]
        pattern = [int(layer in layers) for layer in range(config["num_hidden_layers"])]
        return {
            "num_experts": config["num_local_experts"],
            "moe_router_topk": 1,
            "moe_router_score_function": "sigmoid",
            "moe_apply_probs_on_input": True,
            "moe_router_load_balancing_type": ["none"],
            "moe_token_dispatcher_type": "alltoall",
            "moe_ffn_hidden_size": size,
            "moe_shared_expert_intermediate_size": size,
            "moe_layer_freq": _frequency(pattern),
        }

    def write(self, args: Any) -> Flags:
        """The same keys."""
        dense = _dense_layers(args)
        return {
            "num_local_experts": args.num_experts,
            "num_experts_per_tok": 1,
            "intermediate_size": args.moe_ffn_hidden_size,
            "moe_layers": [layer for layer in range(args.num_layers) if layer not in dense],
        }


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention of DeepSeek-V3, with its rotary embedding (plain or YaRN)."""

    _FIELDS = Fields(
        {
            "q_lora_rank": "q_lora_rank",
            "kv_lora_rank": "kv_lora_rank",
            "qk_head_dim": "qk_nope_head_dim",
            "qk_pos_emb_head_dim": "qk_rope_head_dim",
            "v_head_dim": "v_head_dim",
        },
        ("q_lora_rank",),
    )

    def read(self, config: Config) -> Flags:
        """Ranks, head sizes and rotary settings."""
        heads = config["num_attention_heads"]
        if config.get("num_key_value_heads", heads) != heads:
            raise ConfigError(
                f"config.json: num_key_value_heads is {config['num_key_value_heads']}; allowed is "
                f"num_attention_heads, {heads}"
            )
        flags = {"multi_latent_attention": True, "qk_layernorm": True, **self._FIELDS.read(config)}
        if flags["qk_pos_emb_head_dim"] % 2:
            raise ConfigError(
                f"config.json: qk_rope_head_dim is {flags['qk_pos_emb_head_dim']}; allowed is an "
                "even number"
            )
        flags |= {"position_embedding_type": "rope", "rope_type": "rope"}
        flags["apply_rope_fusion"] = False  # Megatron has it for training with YaRN only
        flags["rotary_base"] = rotary_base(config)
        # Not the size of a head, but what Megatron wants to be told besides the latent sizes.
        flags["kv_channels"] = flags["v_head_dim"]
        flags["group_query_attention"] = False
        return flags | _read_yarn(config.get("rope_scaling", {}))

    def write(self, args: Any) -> Flags:
        """The same keys; a model without YaRN has no ``rope_scaling``."""
        keys = self._FIELDS.write(args)
        keys["rope_theta"] = float(args.rotary_base)
        keys["num_key_value_heads"] = args.num_attention_heads
        if args.rope_type == "yarn":
            keys["rope_scaling"] = _write_yarn(args)
        return keys


def _read_yarn(scaling: Config) -> Flags:
    """YaRN, whose two factors Hugging Face and Megatron write down in different ways.

    With g(m) = 1 + 0.1 m ln(factor), they multiply

    ============ =========================================================== =====================
    what         Hugging Face                                                Megatron
    ============ =========================================================== =====================
    scores       g(mscale_all_dim)^2, or 1 without it                        g(mscale_all_dim)^2
    sine, cosine attention_factor, or g(mscale) / g(mscale_all_dim) where    g(mscale) /
                 both are there and not zero, or g(1)                        g(mscale_all_dim)
    ============ =========================================================== =====================
    """
    kind = scaling.get("rope_type", "default")
    if kind == "default":
        return {}
    if kind != "yarn":
        raise ConfigError(f"config.json: rope_scaling.rope_type is {kind!r}; allowed is yarn")
    if scaling.get("truncate") is False:
        raise ConfigError(
            "config.json: rope_scaling.truncate is false; allowed is true with latent attention"
        )
    if not {"factor", "original_max_position_embeddings"} <= scaling.keys():
        raise ConfigError(
            "config.json: rope_scaling has no factor or no original_max_position_embeddings"
        )
    factor, all_dim = float(scaling["factor"]), float(scaling.get("mscale_all_dim", 0))
    mscale = float(scaling.get("mscale", 0))
    if (wanted := scaling.get("attention_factor")) is not None:
        mscale = _inverse_mscale(factor, wanted * _mscale(factor, all_dim))
    elif not (mscale and all_dim):
        wanted = _mscale(factor, 1.0) * _mscale(factor, all_dim)
        mscale = _inverse_mscale(factor, wanted) if all_dim else 1.0
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": factor,
        "original_max_position_embeddings": scaling["original_max_position_embeddings"],
        "beta_fast": scaling.get("beta_fast") or 32,
        "beta_slow": scaling.get("beta_slow") or 1,
        "mscale": mscale,
        "mscale_all_dim": all_dim,
    }


def _write_yarn(args: Any) -> Flags:
    keys: Flags = {
        "rope_type": "yarn",
        "type": "yarn",
        "factor": args.rotary_scaling_factor,
        "original_max_position_embeddings": args.original_max_position_embeddings,
        "beta_fast": args.beta_fast,
        "beta_slow": args.beta_slow,
    }
    factor, mscale, all_dim = args.rotary_scaling_factor, args.mscale, args.mscale_all_dim
    if all_dim:
        keys["mscale_all_dim"] = all_dim
    if mscale > 0 and all_dim:
        keys["mscale"] = mscale
    elif mscale != 1.0:
        keys["attention_factor"] = _mscale(factor, mscale) / _mscale(factor, all_dim)
    return keys


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 1.0 + 0.1 * mscale * math.log(factor)


def _inverse_mscale(factor: float, value: float) -> float:
    """The argument with which :func:`_mscale` is ``value``."""
    if factor <= 1:
        if value != 1.0:
            raise ConfigError(
                f"config.json: rope_scaling.attention_factor is {value}; allowed is 1.0 with a "
                "factor of 1"
            )
        return 1.0
    if value < 1.0:
        raise ConfigError(
            "config.json: rope_scaling has factors that would need a negative --mscale "
            f"(attention_factor times g(mscale_all_dim) is {value:g}; allowed is 1 and more)"
        )
    return (value - 1.0) / (0.1 * math.log(factor))


@dataclass(frozen=True)
class MultiTokenPrediction:
    """Layers of multi-token prediction, after the last one.

    A model is read without them unless ``--mtp-num-layers`` is given.
    """

    def read(self, config: Config) -> Flags:
        """No flags: transformers ignores these layers, too."""
        return {}

    def write(self, args: Any) -> Flags:
        """Write the number of layers."""
        return {"num_nextn_predict_layers": getattr(args, "mtp_num_layers", None) or 0}


def _groups(config: Config, topk: int, counted: int) -> Flags:
    """Groups of experts, whose score is the sum of their best ``counted``.

    Megatron counts the best ``topk / topk_group`` unless it is told another number.
    """
    groups, chosen = config["n_group"], config["topk_group"]
    flags: Flags = {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}
    if groups > 1 and topk // chosen != counted:
        flags["moe_group_score_experts"] = counted
    return flags


def _check_choice(topk: int, experts: int) -> None:
    if topk > experts:
        raise ConfigError(
            f"config.json: num_experts_per_tok is {topk}; allowed is at most the number of "
            f"experts, {experts}"
        )


def _frequency(pattern: list[int]) -> int | list[int]:
    """A pattern as Megatron wants it: 1 where all layers are alike, so that they stack."""
    return 1 if all(pattern) else pattern


def _dense_first(config: Config) -> int | list[int]:
    """The layers after ``first_k_dense_replace`` dense ones."""
    layers, dense = config["num_hidden_layers"], config["first_k_dense_replace"]
    return _frequency([int(layer >= dense) for layer in range(layers)])


def _dense_layers(args: Any) -> list[int]:
    frequency = args.moe_layer_freq
    pattern: Iterable[int] = frequency if isinstance(frequency, list) else ()
    return [index for index, moe in enumerate(pattern) if not moe]
