"""Training with the package of ``docs/examples`` installed, in the processes of a rank pool."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.plugins.packages import forget

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"


def use_package(site: str) -> None:
    """Make the examples importable and their entry points known."""
    sys.path[:0] = [site, str(EXAMPLES)]
    forget()


def calls_of_dispatch(flags: Sequence[str], site: str) -> dict[str, Any]:
    """Train with experts; returns the dtypes in which tokens were sent, besides ``train``'s."""
    from megatron.core.transformer.moe import token_dispatcher

    from tests.support.trainer_job import train

    plain, sent = token_dispatcher.all_to_all, set()

    def all_to_all(group: Any, tokens: Any, *splits: Any) -> Any:
        if tokens.dim() == 2:
            sent.add(str(tokens.dtype))
        return plain(group, tokens, *splits)

    token_dispatcher.all_to_all = all_to_all
    return {**train(flags, use_package, site), "sent": sorted(sent)}


def steps_of_lion(flags: Sequence[str], site: str) -> dict[str, Any]:
    """Train with Lion; adds the bytes of each state and the counted steps to the result."""
    from mindspeed.training import model
    from tests.support.trainer_job import train

    plain, built = model.build_optimizer, []

    def build_optimizer(*args: Any) -> Any:
        built.append(plain(*args))
        return built[-1]

    model.build_optimizer = build_optimizer
    result = train(flags, use_package, site)
    bytes_of: dict[str, int] = {}
    for state in built[0].optimizer.state.values():
        for name, value in state.items():
            bytes_of[name] = bytes_of.get(name, 0) + value.untyped_storage().nbytes()
    return {**result, "bytes": bytes_of, "steps": built[0].steps}


def cores_of_bound_cpu(site: str) -> list[int]:
    """The cores of this process on the example's device."""
    use_package(site)
    os.environ["MINDSPEED_DEVICE"] = "bound-cpu"
    from mindspeed import device

    here = device.current()
    here.set_index(int(os.environ["LOCAL_RANK"]))
    assert here.properties().cores == len(os.sched_getaffinity(0))
    return sorted(os.sched_getaffinity(0))


def convert_acme(folder: str, site: str) -> None:
    """A Llama and the same model as ``acme``: both to Megatron, the latter back again."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    from mindspeed.cli.main import main

    use_package(site)
    here = Path(folder)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"max_position_embeddings": 64, "vocab_size": 128}
    torch.manual_seed(1)
    config = LlamaConfig(
        num_hidden_layers=2, intermediate_size=48, **sizes, tie_word_embeddings=False
    )
    LlamaForCausalLM(config).save_pretrained(here / "llama")
    tensors = load_file(here / "llama" / "model.safetensors")
    tensors["model.last_norm.weight"] = tensors.pop("model.norm.weight")
    (here / "acme").mkdir()
    save_file(tensors, here / "acme" / "model.safetensors", {"format": "pt"})
    values = {"model_type": "acme", "depth": 2, "mlp_size": 48, "tie_word_embeddings": False}
    (here / "acme" / "config.json").write_text(json.dumps({**values, **sizes}))
    for source, target, *more in (
        ("llama", "from_llama", "--format", "safetensors"),
        ("acme", "from_acme", "--format", "safetensors"),
        ("from_acme", "back", "--to", "hf"),
    ):
        given = ["--input", str(here / source), "--output", str(here / target), *more]
        assert main(["convert", *given]) == 0
