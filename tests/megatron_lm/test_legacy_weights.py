"""Legacy checkpoints (``mp_rank_XX``) go from Hugging Face to a running Megatron-LM and back.

Megatron-LM takes the shape and the layout of the model from our files (``--use-checkpoint-args
--use-mp-args-from-checkpoint-args``), so these are read, too. transformers computes the loss of the
batch that our trainer saw first; all three agree to the printed digits.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from mindspeed.models.parallel_sizes import ParallelSizes
from tests.megatron_lm import weights_ranks
from tests.megatron_lm.launch import pretrain
from tests.support.lazy import Lazy
from tests.support.tiny import CASES

Target = Lazy("mindspeed.checkpoint.weights.convert", "Target")
convert = Lazy("mindspeed.checkpoint.weights.convert", "convert")
open_weights = Lazy("mindspeed.checkpoint.weights.convert", "open_weights")


pytestmark = [pytest.mark.slow, pytest.mark.megatron_lm]

Batch = list[tuple[torch.Tensor, torch.Tensor]]
SETUP = "tests.support.warm"
LOAD = "--use-checkpoint-args --use-mp-args-from-checkpoint-args --finetune --no-load-optim"
LAYOUTS = {
    "tp2": ("llama2-gqa", ParallelSizes(tensor=2), None, ""),
    "pp2-tied-local": (
        "llama3.2-tied",
        ParallelSizes(pipeline=2),
        "local",
        "--transformer-impl local",
    ),
    "ep2-grouped": (
        "qwen3-moe",
        ParallelSizes(expert=2),
        None,
        # Not among what --use-checkpoint-args takes.
        "--qk-layernorm --moe-grouped-gemm --moe-aux-loss-coeff 0",
    ),
}


def first_loss_of_megatron(folder: Path, load: Path, flags: str, more: str = "") -> float:
    """First loss that ``pretrain_gpt.py`` prints with the weights of ``load``."""
    folder.mkdir()
    common = f"{weights_ranks.TRAINING} {LOAD} --ckpt-format torch --load {load} --no-load-rng"
    return pretrain(folder, 2, *f"{common} {flags} {more}".split()).losses[0]


def first_loss_of_transformers(folder: Path, batch: Batch, legacy: Path) -> float:
    """The same with a Hugging Face directory.

    Padding entries compete in Megatron-LM's softmax, so their rows are taken from ``legacy``.
    """
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    weights = open_weights(legacy)
    table = {parameter.name: parameter for parameter in weights.table}
    output = table.get("output_layer.weight") or table["embedding.word_embeddings.weight"]
    padding = weights.read(output)[model.config.vocab_size :]
    losses = []
    with torch.no_grad():
        for tokens, labels in batch:
            hidden = model.model(tokens).last_hidden_state
            logits = torch.cat((model.lm_head(hidden), hidden @ padding.t()), -1)
            losses.append(F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
    return torch.stack(losses).mean().item()


@pytest.mark.parametrize("case", LAYOUTS)
def test_megatron_lm_reads_our_files_and_we_read_its(case, ranks, tmp_path):
    name, layout, implementation, flags = LAYOUTS[case]
    given, ours, theirs = tmp_path / "given", tmp_path / "ours", tmp_path / "theirs"
    CASES[name].save(CASES[name].model(), given)
    target = Target(
        "torch",
        layout,
        transformer_impl=implementation,
        grouped="grouped" in flags,
        vocab_multiple=weights_ranks.PADDING,
    )
    convert(open_weights(given), ours, target)
    save = f"--save {theirs} --save-interval 2"
    loss = first_loss_of_megatron(tmp_path / "first", ours, flags, save)
    run = weights_ranks.first_step
    metrics = str(tmp_path / "metrics.jsonl")
    (found,) = ranks(1, run, str(given), metrics, flags.split(), setup=SETUP, timeout=240)
    assert loss == pytest.approx(found["loss"], rel=2e-6)
    assert loss == pytest.approx(first_loss_of_transformers(given, found["batch"], ours), rel=2e-6)

    again = first_loss_of_megatron(tmp_path / "second", theirs, flags)
    assert abs(again - loss) > 1e-3  # it has learned
    convert(open_weights(theirs), tmp_path / "hf", Target("hf", like=str(given)))
    trained = first_loss_of_transformers(tmp_path / "hf", found["batch"], theirs)
    assert again == pytest.approx(trained, rel=2e-6)
