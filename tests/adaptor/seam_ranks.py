"""A small GPT model with multi-token prediction, built while features are attached to its seams."""

from __future__ import annotations

from typing import Any

FFN = 48


def around_construction() -> dict[str, Any]:
    """What each of the three seams saw, the widths of the built MLPs, and a model built later."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from mindspeed import session
    from tests.support.release import prediction_layer

    active = session.current()
    active.configure({})
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    calls: list[tuple[str, Any]] = []

    def layer_spec(block: Any, config: Any, first: int) -> Any:
        calls.append(("layer_spec", config.ffn_hidden_size))
        return block

    def model_arguments(given: dict[str, Any]) -> dict[str, Any]:
        calls.append(("model_arguments", given["mtp_block_spec"] is not None))
        given["config"].ffn_hidden_size = FFN
        return given | {"share_embeddings_and_output_weights": True}

    def chunk(model: Any, config: Any, vp_stage: int | None) -> None:
        calls.append(("chunk", (len(model.decoder.layers), len(model.mtp.layers), vp_stage)))
        for layer in (*model.decoder.layers, prediction_layer(model.mtp.layers[0])):
            layer.mlp.seen_by_feature = True

    # Another order than that of the calls: the seams decide, not the features.
    active.seams.chunk.add(chunk, owner="test")
    active.seams.layer_spec.add(layer_spec, owner="test")
    active.seams.model_arguments.add(model_arguments, owner="test")
    patches = _patches(active)
    model = _model()
    active.seams.clear()
    plain = _model()
    return {
        "calls": calls,
        "patches": patches,
        "shared": [m.share_embeddings_and_output_weights for m in (model, plain)],
        "widths": [_widths(m) for m in (model, plain)],
        "marked": sum(hasattr(m, "seen_by_feature") for m in model.modules()),
        "left": _patches(active),
    }


def _patches(active: Any) -> int:
    """How often the target is patched, without repairs."""
    patches, _ = active.engine.stacks()[_TARGET]
    return sum(not patch.owner.startswith("repair:") for patch in patches)


_TARGET = "megatron.core.models.gpt.gpt_model:GPTModel.__init__"


def _model() -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=2, mtp_num_layers=1, add_bias_linear=False
    )
    layers = get_gpt_layer_local_spec()
    prediction = get_gpt_mtp_block_spec(config, layers, use_transformer_engine=False)
    return GPTModel(config, layers, vocab_size=16, max_sequence_length=4, mtp_block_spec=prediction)


def _widths(model: Any) -> list[int]:
    return [p.shape[0] for name, p in model.named_parameters() if "linear_fc1.weight" in name]
