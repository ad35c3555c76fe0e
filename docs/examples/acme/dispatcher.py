"""``--acme-bf16-dispatch``: tokens are sent to their experts in bf16."""

from dataclasses import dataclass

import torch

from mindspeed.features.feature import Feature, Problem
from mindspeed.flags import flag


@dataclass(frozen=True)
class Options:
    acme_bf16_dispatch: bool = flag(False, "send tokens to experts in bf16: half of fp32's bytes")


def _validate(options, megatron):
    if megatron.get("moe_token_dispatcher_type") != "alltoall":
        return [Problem("--acme-bf16-dispatch", "needs --moe-token-dispatcher-type alltoall")]
    return []


def in_bf16(dispatcher):
    """Wrap ``token_dispatch(tokens [t, h], probs [t])`` of one dispatcher: the all-to-all."""
    plain = dispatcher.token_dispatch

    def token_dispatch(tokens, probs):
        received, probs = plain(tokens.to(torch.bfloat16), probs)
        return received.to(tokens.dtype), probs

    dispatcher.token_dispatch = token_dispatch


def _attach(seams, options, megatron):
    def change(model, config, vp_stage):
        """``model``: a finished model chunk, layers of multi-token prediction included."""
        from mindspeed.adaptor.moe import moe_layers

        for layer in moe_layers(model):
            in_bf16(layer.token_dispatcher)

    seams.chunk.add(change, owner=FEATURE.name)


FEATURE = Feature(
    name="acme-bf16-dispatch",
    summary="tokens are sent to experts in bf16",
    level=2,
    options=Options,
    enabled=lambda options, megatron: options.acme_bf16_dispatch,
    validate=_validate,
    attach=_attach,
    seams=("chunk",),
)
