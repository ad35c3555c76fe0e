"""FLOPs of one training step from the shape of the model: Megatron's convention.

    3 (forward, two in backward) x 2 (multiply, add) x weights used by a token
    + attention scores and weighted sum, halved for the causal mask, less in a sliding window

Embedding look-ups, norms and the optimizer are excluded. With ``causal=False`` the attention terms
count the full score matrix, as :class:`mindspeed.instruments.flops.FlopCounter` does for kernels
that compute masked blocks too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_PASSES_TIMES_FMA = 6
_BAND = 4  # --sparse-mode
Computing = Callable[[list[bool]], list[bool]]


@dataclass(frozen=True)
class LatentAttention:
    """Sizes of multi-latent attention (MLA); without ``q_rank`` queries are not compressed."""

    q_rank: int | None
    kv_rank: int
    qk_head_dim: int
    rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class DeltaNets:
    """Gated delta nets in the place of attention in some layers.

    Attributes:
        layers: how many layers have one.
        key_heads: heads of queries and keys, each of ``key_channels``.
        value_heads: heads of values and of their gates, each of ``value_channels``.
        taps: tokens that the convolution sees.
    """

    layers: int
    key_heads: int
    key_channels: int
    value_heads: int
    value_channels: int
    taps: int

    def products(self, hidden_size: int) -> int:
        """Multiplications of one token in one of them, as Megatron counts them.

        A value head counts four products of the size of its squared channels: two corrections of
        the memory, its decay, and the read-out.
        """
        keys = self.key_heads * self.key_channels
        values = self.value_heads * self.value_channels
        projections = hidden_size * (2 * keys + 3 * values + 2 * self.value_heads)
        convolution = self.taps * (2 * keys + values)
        return projections + convolution + 4 * self.value_heads * self.value_channels**2


@dataclass(frozen=True)
class ModelShape:
    """The sizes that determine the FLOPs of a transformer.

    Attributes:
        moe_layers: for each layer that computes whether its MLP is a mixture of experts; those of
            multi-token prediction are the last, and each is like the last one of the model.
        vocab_size: rows of the output layer, padding included.
        gated: the MLP has a gate (SwiGLU and the like): three matrices instead of two.
        causal_keys: keys that a query sees, mean over queries and layers; None: half the sequence.
        output_gate: the attention has a gate of the size of the queries.
        moe_latent_size: size of what routed experts get, with a projection to and from it; 0: the
            hidden size.
        mtp_layers: how many of the layers are those of multi-token prediction.
        delta_nets: layers that have no attention.
    """

    moe_layers: tuple[bool, ...]
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    ffn_hidden_size: int
    seq_length: int
    vocab_size: int
    gated: bool = False
    moe_topk: int = 0
    moe_ffn_hidden_size: int = 0
    shared_expert_size: int = 0
    moe_latent_size: int = 0
    mtp_layers: int = 0
    latent: LatentAttention | None = None
    output_gate: bool = False
    causal_keys: float | None = None
    delta_nets: DeltaNets | None = None

    @property
    def keys(self) -> float:
        """Keys that a query sees, mean over queries and layers."""
        return self.seq_length / 2 if self.causal_keys is None else self.causal_keys

    @classmethod
    def from_megatron(
        cls, args: Mapping[str, Any], computing: Computing = list
    ) -> ModelShape | None:
        """The shape given by Megatron's arguments; None for models other than GPT.

        Args:
            args: Megatron's arguments by name.
            computing: leaves out the layers that do not compute.
        """
        variant = args.get("experimental_attention_variant")
        unknown = ("is_hybrid_model", "heterogeneous_layers_config_path")
        if any(args.get(name) for name in unknown) or variant not in (None, "gated_delta_net"):
            return None
        heads, extra = args["num_attention_heads"], args.get("mtp_num_layers") or 0
        pattern = moe_pattern(args)
        return cls(
            moe_layers=(*computing(pattern), *pattern[-1:] * extra),
            hidden_size=args["hidden_size"],
            num_attention_heads=heads,
            num_query_groups=args["num_query_groups"]
            if args.get("group_query_attention")
            else heads,
            kv_channels=args.get("kv_channels") or args["hidden_size"] // heads,
            ffn_hidden_size=args["ffn_hidden_size"],
            seq_length=args["seq_length"],
            vocab_size=args["padded_vocab_size"],
            gated=any(args.get(name) for name in ("swiglu", "quick_geglu", "geglu")),
            moe_topk=args.get("moe_router_topk") or 0,
            moe_ffn_hidden_size=args.get("moe_ffn_hidden_size") or args["ffn_hidden_size"],
            shared_expert_size=args.get("moe_shared_expert_intermediate_size") or 0,
            moe_latent_size=args.get("moe_latent_size") or 0,
            mtp_layers=extra,
            latent=_latent(args),
            output_gate=bool(args.get("attention_output_gate")),
            causal_keys=causal_keys(
                window_of(args), window_pattern(args, computing), args["seq_length"]
            ),
            delta_nets=_delta_nets(args, computing),
        )


def moe_pattern(args: Mapping[str, Any]) -> list[bool]:
    """Whether Megatron's arguments make a layer a mixture of experts, for each layer."""
    layers, frequency = args["num_layers"], args.get("moe_layer_freq") or 1
    if args.get("num_experts") is None:
        return [False] * layers
    if isinstance(frequency, int):
        return [i % frequency == 0 for i in range(layers)]
    return [bool(moe) for moe in frequency]


def linear_pattern(args: Mapping[str, Any]) -> list[bool]:
    """Whether the attention of a layer is linear, for each layer (``--linear-attention-freq``)."""
    layers, frequency = args["num_layers"], args.get("linear_attention_freq")
    if args.get("experimental_attention_variant") != "gated_delta_net" or frequency is None:
        return [False] * layers
    if isinstance(frequency, int):
        return [number % frequency != 0 for number in range(1, layers + 1)]
    return [bool(linear) for linear in frequency]


def window_pattern(args: Mapping[str, Any], computing: Computing = list) -> list[bool]:
    """Whether an attention has a window, for each, those of multi-token prediction included.

    Args:
        args: Megatron's arguments by name.
        computing: leaves out the layers that do not compute.
    """
    layers, extra = args["num_layers"], args.get("mtp_num_layers") or 0
    frequency = args.get("window_attn_skip_freq")
    if window_of(args) is None:
        pattern = [False] * (layers + extra)
    elif args.get("sparse_mode") == _BAND or frequency is None:
        pattern = [True] * (layers + extra)
    elif isinstance(frequency, int):
        pattern = [number % frequency != 0 for number in range(1, layers + extra + 1)]
    else:
        pattern = [bool(windowed) for windowed in frequency]
    return [*computing(pattern[:layers]), *pattern[layers : layers + extra]]


def causal_keys(window: tuple[int, int] | None, pattern: Sequence[bool], length: int) -> float:
    """Keys that a query sees, mean over the queries of a sequence and over layers.

    A causal layer counts as half of the square, as Megatron counts it; a window counts what it
    has of this half, and the keys after a query's own that it has besides.

    Args:
        window: of :func:`window_of`.
        pattern: of :func:`window_pattern`.
    """
    if window is None or not any(pattern):
        return length / 2
    before = length if window[0] < 0 else min(window[0] + 1, length)
    after = min(max(window[1], 0), length)
    within = sum(keys - keys**2 / (2 * length) for keys in (before, after))
    return length / 2 + (within - length / 2) * sum(pattern) / len(pattern)


def window_of(args: Mapping[str, Any]) -> tuple[int, int] | None:
    """Keys before and after a query's own; -1 for all."""
    if args.get("sparse_mode") == _BAND:
        return args.get("pre_tockens", -1), args.get("next_tockens", 0)  # a framework gives some
    return args.get("window_size") or None


def model_flops(shape: ModelShape, sequences: int, *, causal: bool = True) -> int:
    """FLOPs of forward and backward of ``sequences`` sequences, on all ranks together.

    Args:
        causal: count half of the attention matrix, as Megatron does.
    """
    tokens, keys = sequences * shape.seq_length, shape.keys if causal else shape.seq_length
    return round(flops_of_tokens(shape, tokens, tokens * keys))


def flops_of_tokens(shape: ModelShape, tokens: int, pairs: float) -> float:
    """FLOPs of forward and backward of tokens of sequences of any lengths.

    Args:
        shape: the model; its sequence length is not used.
        tokens: of all sequences.
        pairs: of queries and keys in one attention head, mean over layers: half the squares of the
            lengths, less in a sliding window.
    """
    attention, extra, hidden = attention_products(shape), shape.mtp_layers, shape.hidden_size
    layers, sparse = len(shape.moe_layers), sum(shape.moe_layers)
    nets = shape.delta_nets
    attending = layers - (nets.layers if nets else 0)
    per_token = (
        attending * attention.weights
        + (nets.layers * nets.products(hidden) if nets else 0)
        + (layers - sparse) * mlp_weights(shape, shape.ffn_hidden_size)
        + sparse * _experts(shape)
        + extra * (2 * hidden + 3) * hidden
        + (1 + extra) * hidden * shape.vocab_size
    )
    return _PASSES_TIMES_FMA * (per_token * tokens + attending * attention.per_key * pairs)


def _experts(shape: ModelShape) -> int:
    routed = mlp_weights(shape, shape.moe_topk * shape.moe_ffn_hidden_size)
    if latent := shape.moe_latent_size:  # the input of experts, with a projection to and from it
        routed = routed // shape.hidden_size * latent + 2 * shape.hidden_size * latent
    return routed + mlp_weights(shape, shape.shared_expert_size)


def mlp_weights(shape: ModelShape, ffn_hidden_size: int) -> int:
    """Entries of the matrices of one MLP."""
    return (3 if shape.gated else 2) * shape.hidden_size * ffn_hidden_size


@dataclass(frozen=True)
class AttentionProducts:
    """Multiplications of one token in one attention.

    Attributes:
        inputs: to make query, key and value.
        per_key: for each key that the token sees: its score, and the weighted sum.
        output: of the projection.
    """

    inputs: int
    per_key: int
    output: int

    @property
    def weights(self) -> int:
        """Entries of the matrices; with latent attention, of its norms too."""
        return self.inputs + self.output


def attention_products(shape: ModelShape) -> AttentionProducts:
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    if shape.latent is not None:
        return _latent_attention(shape.latent, hidden, heads)
    queries = heads * shape.kv_channels
    keys_and_values = 2 * shape.num_query_groups * shape.kv_channels
    gate = queries if shape.output_gate else 0
    return AttentionProducts(
        hidden * (queries + keys_and_values + gate), 2 * queries, queries * hidden
    )


def _latent_attention(latent: LatentAttention, hidden: int, heads: int) -> AttentionProducts:
    """The ``+ 1`` is the norm of a compressed vector, as Megatron counts it."""
    query_dim = latent.qk_head_dim + latent.rope_head_dim
    query = (
        hidden * heads * query_dim
        if latent.q_rank is None
        else latent.q_rank * (hidden + heads * query_dim + 1)
    )
    key_and_value = latent.kv_rank * (hidden + heads * (latent.qk_head_dim + latent.v_head_dim) + 1)
    return AttentionProducts(
        query + key_and_value + hidden * latent.rope_head_dim,
        heads * (query_dim + latent.v_head_dim),
        heads * latent.v_head_dim * hidden,
    )


def _latent(args: Mapping[str, Any]) -> LatentAttention | None:
    if not args.get("multi_latent_attention"):
        return None
    return LatentAttention(
        q_rank=args.get("q_lora_rank"),
        kv_rank=args["kv_lora_rank"],
        qk_head_dim=args["qk_head_dim"],
        rope_head_dim=args["qk_pos_emb_head_dim"],
        v_head_dim=args["v_head_dim"],
    )


def _delta_nets(args: Mapping[str, Any], computing: Computing) -> DeltaNets | None:
    pattern = linear_pattern(args)
    if not any(pattern):
        return None
    return DeltaNets(
        layers=sum(computing(pattern)),
        key_heads=args["linear_num_key_heads"],
        key_channels=args["linear_key_head_dim"],
        value_heads=args["linear_num_value_heads"],
        value_channels=args["linear_value_head_dim"],
        taps=args["linear_conv_kernel_dim"],
    )
