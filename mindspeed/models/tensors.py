"""Mapping tables: which Hugging Face tensors Megatron's parameters are made of.

The tables are put together from parts, because families differ in one part at a time: how queries,
keys and values are stored, whether the MLP has experts, whether attention is latent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mindspeed.models.stored_weights import ExpertStack
from mindspeed.models.table import Rule
from mindspeed.models.weight_shards import (
    ShardMap,
    delta_part,
    gated_qkv,
    grouped_pack,
    grouped_qkv,
    padded_vocabulary,
    part_of,
    stacked,
    whole,
)

_LAYER, _HF = "decoder.layers.{layer}.", "model.layers.{layer}."
_ATTENTION, _HF_ATTENTION = _LAYER + "self_attention.", _HF + "self_attn."
_EXPERT = _LAYER + "mlp.experts.local_experts.{expert}."
_DEPTH = "mtp.layers.{depth}."


def _words(embedding: str, head: str) -> tuple[Rule, Rule]:
    """Embedding and output layer under Hugging Face's names."""
    words, scores = padded_vocabulary(embedding), padded_vocabulary(head)
    return (
        Rule("embedding.word_embeddings.weight", words, "hidden", "rows", tied=(head,)),
        Rule("output_layer.weight", scores, "hidden", "rows", needs="untied"),
    )


_FINAL_NORM = Rule("decoder.final_layernorm.weight", whole("model.norm.weight", "hidden"))
_EMBEDDING, _OUTPUT = _words("model.embed_tokens.weight", "lm_head.weight")
_OUTSIDE = (_EMBEDDING, _FINAL_NORM, _OUTPUT)


def _norms(**names: str) -> tuple[Rule, ...]:
    """Norms of a layer: Megatron's name (dots as double underscores) -> Hugging Face's."""
    return tuple(
        Rule(f"{_LAYER}{ours.replace('__', '.')}.weight", whole(f"{_HF}{theirs}.weight", "hidden"))
        for ours, theirs in names.items()
    )


_NORMS = _norms(input_layernorm="input_layernorm", pre_mlp_layernorm="post_attention_layernorm")


def _attention(
    qkv: Mapping[str, ShardMap], norms: tuple[str, str] = ("q_norm", "k_norm")
) -> tuple[Rule, ...]:
    """Attention with the projection to queries, keys and values as ``qkv`` has it.

    ``norms`` names those of queries and keys.
    """
    out = _ATTENTION + "linear_proj."
    rules = [
        Rule(_ATTENTION + "linear_qkv.weight", qkv["weight"], "hidden", "rows"),
        Rule(out + "weight", whole(_HF_ATTENTION + "o_proj.weight", "hidden"), "query", "columns"),
        Rule(out + "bias", whole(_HF_ATTENTION + "o_proj.bias", "hidden"), needs="proj_bias"),
    ]
    if "bias" in qkv:
        bias = _ATTENTION + "linear_qkv.bias"
        rules.append(Rule(bias, qkv["bias"], split="rows", needs="qkv_bias"))
    for part, size, norm in zip("qk", ("query", "key"), norms, strict=True):
        theirs = f"{_HF_ATTENTION}{norm}.weight"
        ours, last = f"{part}_layernorm.weight", f"core_attention.{part}_layernorm.weight"
        rules += [
            Rule(_ATTENTION + ours, whole(theirs, "head"), needs="qk_norm"),
            Rule(_ATTENTION + ours, whole(theirs, size), split="rows", needs="heads_norm"),
            Rule(_ATTENTION + last, whole(theirs, "head"), needs="qk_norm_after_rope"),
        ]
    return tuple(rules)


def _projections(kind: str) -> tuple[str, str, str]:
    query, key, value = (f"{_HF_ATTENTION}{part}_proj.{kind}" for part in "qkv")
    return query, key, value


_QKV = {kind: grouped_qkv(*_projections(kind)) for kind in ("weight", "bias")}
_SEPARATE = _attention(_QKV)
_PACKED = _attention({"weight": grouped_pack(_HF_ATTENTION + "W_pack.weight")})


def _gated_mlp(megatron: str, gate: str, up: str, down: str, size: str) -> tuple[Rule, ...]:
    """A gated MLP of ``size`` rows; rules still without layers and needs."""
    return (
        Rule(megatron + "linear_fc1.weight", stacked((gate, up), size), "hidden", "halves"),
        Rule(megatron + "linear_fc2.weight", whole(down, "hidden"), size, "columns"),
    )


def _with_copies(outside: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Files with multi-token prediction repeat the embedding and output layer that it shares."""
    copies = {
        "embedding.word_embeddings.weight": (_HF + "embed_tokens.weight",),
        "output_layer.weight": (_HF + "shared_head.head.weight",),
    }
    return tuple(replace(rule, copies=copies.get(rule.name, ())) for rule in outside)


def _in(rules: tuple[Rule, ...], **changes: Any) -> tuple[Rule, ...]:
    return tuple(replace(rule, **changes) for rule in rules)


def _mlp_names(prefix: str) -> tuple[str, str, str]:
    gate, up, down = (f"{prefix}{part}_proj.weight" for part in ("gate", "up", "down"))
    return gate, up, down


def _dense(block: str) -> tuple[Rule, ...]:
    return _in(_gated_mlp(_LAYER + "mlp.", *_mlp_names(_HF + block), "ffn"), layers="dense")


_DENSE = _dense("mlp.")


def _experts(router: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    scores = Rule(_LAYER + "mlp.router.weight", whole(_HF + router, "experts"), "hidden")
    expert = _gated_mlp(_EXPERT, _HF + gate, _HF + up, _HF + down, "expert_ffn")
    return _in((scores, *expert), layers="moe")


def _stacks(
    block: str,
    names: tuple[str, str, str],
    files: tuple[str, str] = ("gate_up_proj", "down_proj"),
    transposed: bool = False,
) -> tuple[ExpertStack, ...]:
    """All experts of a layer in two tensors, gate before up."""
    gate, up, down = (_HF + name for name in names)
    first, second = (f"{_HF}{block}{name}" for name in files)
    return ExpertStack(first, (gate, up), transposed), ExpertStack(second, (down,), transposed)


_MIXTRAL_EXPERTS = _experts(
    "block_sparse_moe.gate.weight",
    *(f"block_sparse_moe.experts.{{expert}}.{part}.weight" for part in ("w1", "w3", "w2")),
)
_PLAIN_EXPERTS = _experts("mlp.gate.weight", *_mlp_names("mlp.experts.{expert}."))


def _expert_bias(theirs: str) -> tuple[Rule, ...]:
    bias = whole(f"{_HF}{theirs}.e_score_correction_bias", "experts")
    ours = _LAYER + "mlp.router.expert_bias"
    return (Rule(ours, bias, needs="expert_bias", layers="moe"),)


_EXPERT_BIAS = _expert_bias("mlp.gate")


def _shared_expert(name: str) -> tuple[Rule, ...]:
    mlp = _gated_mlp(_LAYER + "mlp.shared_experts.", *_mlp_names(f"{_HF}{name}."), "shared_ffn")
    gate = Rule(
        _LAYER + "mlp.shared_experts.gate_weight",
        whole(f"{_HF}{name}_gate.weight", "one"),
        "hidden",
        layers="moe",
        needs="shared_gate",
    )
    return (*_in(mlp, needs="shared_expert", layers="moe"), gate)


_SHARED_EXPERTS = _shared_expert("mlp.shared_experts")


def _latent() -> tuple[Rule, ...]:
    def rule(ours: str, theirs: str, rows: str, columns: str | None = None, **more: Any) -> Rule:
        shard_map = whole(f"{_HF_ATTENTION}{theirs}.weight", rows)
        return Rule(f"{_ATTENTION}{ours}.weight", shard_map, columns, **more)

    q, down = {"needs": "q_lora"}, "rows_if_local"
    return (
        rule("linear_q_proj", "q_proj", "q_up", "hidden", split="rows", needs="direct_q"),
        rule("linear_q_down_proj", "q_a_proj", "q_lora", "hidden", split=down, **q),
        rule("q_layernorm", "q_a_layernorm", "q_lora", **q),
        rule("linear_q_up_proj", "q_b_proj", "q_up", "q_lora", split="rows", **q),
        rule("linear_kv_down_proj", "kv_a_proj_with_mqa", "kv_down", "hidden", split=down),
        rule("kv_layernorm", "kv_a_layernorm", "kv_lora"),
        rule("linear_kv_up_proj", "kv_b_proj", "kv_up", "kv_lora", split="rows"),
        rule("linear_proj", "o_proj", "hidden", "value", split="columns"),
    )


def _multi_token_prediction(layer: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Layers of multi-token prediction after the last one, each like a layer of the model.

    Depth k predicts from the concatenation of the embedding of the k-th next token and the output
    of the layer before it, in this order, each after its own norm. Source: DeepSeek-V3
    (arXiv 2412.19437, section 2.2), and the layer ``num_hidden_layers`` of its files.
    """

    def rule(ours: str, theirs: str, columns: str | None = None, **more: Any) -> Rule:
        return Rule(
            f"{_DEPTH}{ours}.weight", whole(f"{_HF}{theirs}.weight", "hidden"), columns, **more
        )

    inner = (
        replace(rule, name=rule.name.replace(_LAYER, _DEPTH + "transformer_layer."))
        for rule in layer
    )
    return (
        rule("enorm", "enorm"),
        rule("hnorm", "hnorm"),
        rule("eh_proj", "eh_proj", "two_hidden", split="rows"),
        *inner,
        rule("final_layernorm", "shared_head.norm"),
    )


def _internlm2() -> tuple[Rule, ...]:
    """LLaMA under other names, with q, k and v packed group by group, as Megatron does."""

    def rule(ours: str, theirs: str, rows: str, *more: Any) -> Rule:
        return Rule(f"{_LAYER}{ours}.weight", whole(f"{_HF}{theirs}.weight", rows), *more)

    embedding, output = _words("model.tok_embeddings.weight", "output.weight")
    gate, up, down = (f"{_HF}feed_forward.{part}.weight" for part in ("w1", "w3", "w2"))
    return (
        embedding,
        _FINAL_NORM,
        output,
        rule("input_layernorm", "attention_norm", "hidden"),
        rule("pre_mlp_layernorm", "ffn_norm", "hidden"),
        rule("self_attention.linear_qkv", "attention.wqkv", "qkv", "hidden", "rows"),
        rule("self_attention.linear_proj", "attention.wo", "hidden", "query", "columns"),
        *_gated_mlp(_LAYER + "mlp.", gate, up, down, "ffn"),
    )


def _bloom() -> tuple[Rule, ...]:
    hf = "transformer.h.{layer}."
    pairs: tuple[tuple[str, str, str, str | None, Any], ...] = (
        ("input_layernorm", "input_layernorm", "hidden", None, None),
        ("pre_mlp_layernorm", "post_attention_layernorm", "hidden", None, None),
        ("self_attention.linear_qkv", "self_attention.query_key_value", "qkv", "hidden", "rows"),
        ("self_attention.linear_proj", "self_attention.dense", "hidden", "query", "columns"),
        ("mlp.linear_fc1", "mlp.dense_h_to_4h", "ffn", "hidden", "rows"),
        ("mlp.linear_fc2", "mlp.dense_4h_to_h", "hidden", "ffn", "columns"),
    )
    norms = {
        "embedding.word_embeddings_layernorm": "transformer.word_embeddings_layernorm",
        "decoder.final_layernorm": "transformer.ln_f",
    }
    rules = list(_words("transformer.word_embeddings.weight", "lm_head.weight"))
    for kind in ("weight", "bias"):
        rules += [Rule(f"{a}.{kind}", whole(f"{b}.{kind}", "hidden")) for a, b in norms.items()]
        for ours, theirs, rows, columns, split in pairs:
            rules.append(
                Rule(
                    f"{_LAYER}{ours}.{kind}",
                    whole(f"{hf}{theirs}.{kind}", rows),
                    columns if kind == "weight" else None,
                    # The bias of a row-parallel layer is whole on every rank.
                    split if kind == "weight" or split == "rows" else None,
                )
            )
    return tuple(rules)


def _gpt() -> tuple[Rule, ...]:
    """Every parameter a GPT of Megatron Core can have, latent attention apart, by its own name."""

    def rule(name: str, rows: str, columns: str | None = None, **more: Any) -> Rule:
        return Rule(name, whole(name, rows), columns, **more)

    def norm(name: str) -> tuple[Rule, ...]:
        bias = rule(f"{name}.bias", "hidden", needs="norm_bias")
        return rule(f"{name}.weight", "hidden"), bias

    def mlp(prefix: str, rows: str, columns: str, **more: Any) -> tuple[Rule, ...]:
        down = rule(prefix + "linear_fc2.weight", "hidden", columns, split="columns", **more)
        return rule(prefix + "linear_fc1.weight", rows, "hidden", split="fc1", **more), down

    qkv, out, dense = _ATTENTION + "linear_qkv.", _ATTENTION + "linear_proj.", _LAYER + "mlp."
    moe: Any = {"layers": "moe"}
    return (
        rule("embedding.word_embeddings.weight", "padded_vocab", "hidden", split="rows"),
        rule("embedding.position_embeddings.weight", "positions", "hidden", needs="positions"),
        *norm("decoder.final_layernorm"),
        rule("output_layer.weight", "padded_vocab", "hidden", split="rows", needs="untied"),
        *norm(_LAYER + "input_layernorm"),
        *norm(_LAYER + "pre_mlp_layernorm"),
        rule(qkv + "weight", "qkv", "hidden", split="rows"),
        rule(qkv + "bias", "qkv", split="rows", needs="qkv_bias"),
        rule(out + "weight", "hidden", "query", split="columns"),
        rule(out + "bias", "hidden", needs="proj_bias"),
        *(rule(f"{_ATTENTION}{part}_layernorm.weight", "head", needs="qk_norm") for part in "qk"),
        *mlp(dense, "fc1", "ffn", layers="dense"),
        rule(dense + "linear_fc1.bias", "fc1", split="fc1", needs="mlp_bias", layers="dense"),
        rule(dense + "linear_fc2.bias", "hidden", needs="mlp_bias", layers="dense"),
        rule(dense + "router.weight", "experts", "hidden", **moe),
        rule(dense + "router.expert_bias", "experts", needs="expert_bias", **moe),
        *mlp(_EXPERT, "expert_fc1", "expert_ffn", **moe),
        *mlp(dense + "shared_experts.", "shared_fc1", "shared_ffn", needs="shared_expert", **moe),
    )


LLAMA = _OUTSIDE + _NORMS + _SEPARATE + _DENSE
BAICHUAN = _OUTSIDE + _NORMS + _PACKED + _DENSE
MIXTRAL = _OUTSIDE + _NORMS + _SEPARATE + _MIXTRAL_EXPERTS
QWEN_MOE = _OUTSIDE + _NORMS + _SEPARATE + _DENSE + _PLAIN_EXPERTS
_DEEPSEEK_LAYER = _NORMS + _latent() + _DENSE + _PLAIN_EXPERTS + _EXPERT_BIAS + _SHARED_EXPERTS
DEEPSEEK = _with_copies(_OUTSIDE) + _DEEPSEEK_LAYER + _multi_token_prediction(_DEEPSEEK_LAYER)
DEEPSEEK_V2 = _OUTSIDE + _NORMS + _latent() + _DENSE + _PLAIN_EXPERTS + _SHARED_EXPERTS
_GLM_MOE_LAYER = _NORMS + _SEPARATE + _DENSE + _PLAIN_EXPERTS + _EXPERT_BIAS + _SHARED_EXPERTS
GLM_MOE = _with_copies(_OUTSIDE) + _GLM_MOE_LAYER + _multi_token_prediction(_GLM_MOE_LAYER)
_PACKED_MLP = (
    Rule(
        _LAYER + "mlp.linear_fc1.weight",
        whole(_HF + "mlp.gate_up_proj.weight", "fc1"),
        "hidden",
        "halves",
    ),
    Rule(
        _LAYER + "mlp.linear_fc2.weight",
        whole(_HF + "mlp.down_proj.weight", "hidden"),
        "ffn",
        "columns",
    ),
)
_GATED_SHARED = _shared_expert("mlp.shared_expert")
QWEN2_MOE = QWEN_MOE + _GATED_SHARED
_QKV_PACK = {"weight": grouped_pack(_HF_ATTENTION + "qkv_proj.weight")}
PHI3 = _OUTSIDE + _NORMS + _attention(_QKV_PACK) + _PACKED_MLP
GLM4 = (
    *_OUTSIDE,
    *_NORMS,
    *_norms(self_attn_bda__norm="post_self_attn_layernorm", mlp_bda__norm="post_mlp_layernorm"),
    *_SEPARATE,
    *_PACKED_MLP,
)
_BEHIND = _norms(
    self_attn_bda__norm="post_attention_layernorm", mlp_bda__norm="post_feedforward_layernorm"
)
OLMO = _OUTSIDE + _BEHIND + _SEPARATE + _DENSE
_AROUND = _norms(input_layernorm="input_layernorm", pre_mlp_layernorm="pre_feedforward_layernorm")
GEMMA = _OUTSIDE + _AROUND + _BEHIND + _SEPARATE + _DENSE
_HUNYUAN = _OUTSIDE + _NORMS + _attention(_QKV, ("query_layernorm", "key_layernorm"))
HUNYUAN = _HUNYUAN + _DENSE
HUNYUAN_MOE = (
    *_HUNYUAN,
    *_experts("mlp.gate.wg.weight", *_mlp_names("mlp.experts.{expert}.")),
    *_shared_expert("mlp.shared_mlp"),
)
ERNIE_MOE = (
    *_OUTSIDE,
    *_NORMS,
    *_SEPARATE,
    *_DENSE,
    *_PLAIN_EXPERTS,
    *_SHARED_EXPERTS,
    Rule(
        _LAYER + "mlp.router.expert_bias",
        whole(_HF + "mlp.moe_statics.e_score_correction_bias", "one"),
        "experts",
        layers="moe",
    ),
)
_LINEAR_ATTENTION = _HF + "linear_attn."
_DELTA_SIZES = ("delta_key", "delta_key", "delta_value")


def _hybrid(projections: Mapping[str, ShardMap]) -> tuple[Rule, ...]:
    """Layers with gated attention or a delta net, with the parts of ``in_proj`` as given."""
    attention = _attention({"weight": gated_qkv(*_projections("weight"))})
    return (
        *_OUTSIDE,
        *_NORMS,
        *_in(attention, mixer="attention"),
        *_in(_delta_net(projections), mixer="linear"),
        *_DENSE,
    )


def _delta_net(projections: Mapping[str, ShardMap]) -> tuple[Rule, ...]:
    """Linear attention with its parts of ``in_proj`` as ``projections`` has them."""
    convolution = _LINEAR_ATTENTION + "conv1d.weight"
    taps = ("one", "delta_taps")
    return (
        *(
            Rule(f"{_ATTENTION}in_proj.weight.{part}", rows, "hidden", "rows")
            for part, rows in projections.items()
        ),
        *(
            Rule(
                f"{_ATTENTION}conv1d.weight.{part}",
                part_of(convolution, _DELTA_SIZES, index),
                taps,
                "rows",
            )
            for index, part in enumerate(("query", "key", "value"))
        ),
        *(
            Rule(_ATTENTION + name, whole(_LINEAR_ATTENTION + name, "delta_heads"), split="rows")
            for name in ("A_log", "dt_bias")
        ),
        Rule(
            _ATTENTION + "out_norm.weight",
            whole(_LINEAR_ATTENTION + "norm.weight", "delta_value_head"),
        ),
        Rule(
            _ATTENTION + "out_proj.weight",
            whole(_LINEAR_ATTENTION + "out_proj.weight", "hidden"),
            "delta_value",
            "columns",
        ),
    )


_QKVZ, _BA = (f"{_LINEAR_ATTENTION}in_proj_{part}.weight" for part in ("qkvz", "ba"))
_NEXT_PROJECTIONS = {
    **{part: delta_part(_QKVZ, part) for part in ("query", "key", "value", "z")},
    **{part: delta_part(_BA, part) for part in ("beta", "alpha")},
}
QWEN3_NEXT = _hybrid(_NEXT_PROJECTIONS) + _PLAIN_EXPERTS + _GATED_SHARED
_QKV_OF_NET = _LINEAR_ATTENTION + "in_proj_qkv.weight"
_THREE_FIVE_PROJECTIONS = {
    **{
        part: part_of(_QKV_OF_NET, _DELTA_SIZES, index)
        for index, part in enumerate(("query", "key", "value"))
    },
    "z": whole(_LINEAR_ATTENTION + "in_proj_z.weight", "delta_value"),
    "beta": whole(_LINEAR_ATTENTION + "in_proj_b.weight", "delta_heads"),
    "alpha": whole(_LINEAR_ATTENTION + "in_proj_a.weight", "delta_heads"),
}
QWEN3_5 = _hybrid(_THREE_FIVE_PROJECTIONS)
QWEN3_5_MOE = QWEN3_5 + _PLAIN_EXPERTS + _GATED_SHARED
MINIMAX = MIXTRAL + _expert_bias("block_sparse_moe")
_OSS, _OSS_EXPERT = _HF + "mlp.experts.", _HF + "mlp.experts.{expert}."
_GATE, _UP, _DOWN = (f"{_OSS_EXPERT}{part}_proj." for part in ("gate", "up", "down"))
GPT_OSS = (
    *_OUTSIDE,
    *_NORMS,
    *_SEPARATE,
    Rule(
        _ATTENTION + "core_attention.softmax_offset",
        whole(_HF_ATTENTION + "sinks", "heads"),
        split="rows",
        needs="sinks",
    ),
    *_experts(
        "mlp.router.weight",
        *(f"mlp.experts.{{expert}}.{part}_proj.weight" for part in ("gate", "up", "down")),
    ),
    *_in(
        (
            Rule(_LAYER + "mlp.router.bias", whole(_HF + "mlp.router.bias", "experts")),
            Rule(
                _EXPERT + "linear_fc1.bias",
                stacked((_GATE + "bias", _UP + "bias"), "expert_ffn"),
                split="halves",
            ),
            Rule(_EXPERT + "linear_fc2.bias", whole(_DOWN + "bias", "hidden")),
        ),
        layers="moe",
    ),
)
GPT_OSS_STACKS = (
    ExpertStack(_OSS + "gate_up_proj", (_GATE + "weight", _UP + "weight"), True, True),
    ExpertStack(_OSS + "gate_up_proj_bias", (_GATE + "bias", _UP + "bias"), interleaved=True),
    ExpertStack(_OSS + "down_proj", (_DOWN + "weight",), transposed=True),
    ExpertStack(_OSS + "down_proj_bias", (_DOWN + "bias",)),
)
_LLAMA4_EXPERT = _mlp_names("feed_forward.experts.{expert}.")
LLAMA4 = (
    *_OUTSIDE,
    *_NORMS,
    *_SEPARATE,
    *_dense("feed_forward."),
    *_experts("feed_forward.router.weight", *_LLAMA4_EXPERT),
    *_shared_expert("feed_forward.shared_expert"),
)
LLAMA4_STACKS = _stacks("feed_forward.experts.", _LLAMA4_EXPERT, transposed=True)
_GRANITE_EXPERT = _mlp_names("block_sparse_moe.experts.{expert}.")
GRANITE_MOE = (
    *_OUTSIDE,
    *_NORMS,
    *_SEPARATE,
    *_experts("block_sparse_moe.router.layer.weight", *_GRANITE_EXPERT),
)
GRANITE_STACKS = _stacks(
    "block_sparse_moe.", _GRANITE_EXPERT, ("input_linear.weight", "output_linear.weight")
)
INTERNLM2 = _internlm2()
BLOOM = _bloom()
GPT = _gpt()
