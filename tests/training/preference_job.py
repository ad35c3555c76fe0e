"""Runs of ``mindspeed dpo`` on ranks of the pool, and TRL's trainers as their oracle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WORDS = ["tensor", "rank", "learns", "gradient", "from", "small", "data", "and", "large", "text"]
# TRL counts every token after the prompt: here none follows the mark that ends an answer.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_PACKAGES = {"ORPO": "trl.experimental.orpo", "CPO": "trl.experimental.cpo"}
STEPS, PAIRS, LR = 3, 12, 1e-3  # a step is all pairs, however they are packed; the third sees Adam


def write_model(folder: str, kind: str = "Llama", labels: int | None = None, **sizes: Any) -> None:
    """A tiny model with weights so large that mistakes show, one token a byte, ChatML.

    With ``labels`` it has a head for them.
    """
    import torch
    import transformers as hf

    from tests.training.raw_data_job import write_model as write_tokenizer

    write_tokenizer(folder)
    path = Path(folder) / "chat_template.jinja"
    path.write_text(TEMPLATE)
    config = getattr(hf, f"{kind}Config")(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        **({} if labels is None else {"num_labels": labels}),
        **sizes,
    )
    name = f"{kind}For{'CausalLM' if labels is None else 'SequenceClassification'}"
    model = getattr(hf, name)(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.copy_(0.08 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)


def write_models(folder: str) -> None:
    """A model, one of rewards and one of experts: ``model``, ``scored``, ``experts``."""
    write_model(f"{folder}/model")
    write_model(f"{folder}/scored", labels=1)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}
    write_model(f"{folder}/experts", "Mixtral", **experts)


def with_margins(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one | {"margin": 0.25 * (i % 3)} for i, one in enumerate(found)]


def judged(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One answer of each pair, mostly the chosen one."""
    return [
        {
            "prompt": one["prompt"],
            "completion": one["rejected" if i % 3 == 1 else "chosen"],
            "label": i % 3 != 1,
        }
        for i, one in enumerate(found)
    ]


def records(count: int = PAIRS) -> list[dict[str, Any]]:
    """Pairs of answers to questions of some words."""
    found = []
    for i in range(count):
        asked = [WORDS[(i * k) % len(WORDS)] for k in range(1, 3 + i % 4)]
        answers = " ".join(reversed(asked)), " ".join([*asked[: 1 + i % 3], "no"])
        found.append(
            {
                "prompt": [{"role": "user", "content": " ".join(asked)}],
                "chosen": [{"role": "assistant", "content": answers[0]}],
                "rejected": [{"role": "assistant", "content": answers[1]}],
            }
        )
    return found


def write_pairs(path: Path, found: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(one)}\n" for one in found))
    return path


def _trainer(base: type) -> type:
    from torch.utils.data import SequentialSampler

    class InOrder(base):
        """Reads the pairs in order, and keeps what it logs."""

        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return SequentialSampler(self.train_dataset)

    return InOrder


def trl(calls: Sequence[tuple[str, str, str, dict[str, Any]]]) -> list[list[dict[str, float]]]:
    """What TRL's trainers log: of each its kind, the folder of a model, data, and options."""
    return [_trl(*call) for call in calls]


def _trl(kind: str, folder: str, data: str, options: dict[str, Any]) -> list[dict[str, float]]:
    """What the trainer ``kind`` (DPO, Reward, ...) logs in :data:`STEPS` steps."""
    import importlib
    import tempfile

    import torch
    import transformers as hf
    from datasets import Dataset

    package = importlib.import_module(_PACKAGES.get(kind, "trl"))

    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = "<|im_start|>"  # an answer does not end with it
    name = "AutoModelForSequenceClassification" if kind == "Reward" else "AutoModelForCausalLM"
    model = getattr(hf, name).from_pretrained(folder, dtype=torch.float32)
    model.config.pad_token_id = tokenizer.pad_token_id
    with tempfile.TemporaryDirectory() as scratch:
        args = getattr(package, f"{kind}Config")(
            output_dir=scratch,
            per_device_train_batch_size=PAIRS,
            max_steps=STEPS,
            learning_rate=LR,
            lr_scheduler_type="constant",
            logging_steps=1,
            bf16=False,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            gradient_checkpointing=False,
            disable_tqdm=True,
            max_length=1024,
            **options,
        )
        lines = [json.loads(line) for line in Path(data).read_text().splitlines()]
        trainer = _trainer(getattr(package, f"{kind}Trainer"))(
            model=model,
            args=args,
            train_dataset=Dataset.from_list(lines),
            processing_class=tokenizer,
        )
        trainer.train()
    return [one for one in trainer.state.log_history if "loss" in one]


FLAGS = (
    f"--train-iters {STEPS} --lr {LR} --lr-decay-style constant --lr-warmup-fraction 0 "
    "--weight-decay 0 --clip-grad 1 --adam-beta2 0.999 --log-interval 1 --no-shuffle "
    "--recompute-granularity selective --split 100,0,0"
)
PADDED = (
    f"--no-pack-sequences --seq-length 128 --micro-batch-size 6 --global-batch-size {2 * PAIRS}"
)
PACKED = "--pack-sequences --seq-length 448 --global-batch-size 4"  # rows of 2 to 4 pairs


def run(words: Sequence[str], file: str) -> tuple[int, str]:
    """``mindspeed WORDS`` with its metrics in a file: status and messages."""
    from tests.training.raw_data_job import command

    return command([words[0], *FLAGS.split(), "--metrics-file", file, *words[1:]])


def logged(path: Path) -> list[dict[str, Any]]:
    """The records of training."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [one for one in found if "loss" in one]


def counted(words: Sequence[str], file: str) -> dict[str, Any]:
    """A run: forward passes, bytes of the reference's parameters, and what is beside them."""
    from megatron.core.models.gpt import GPTModel

    from mindspeed.training import model, reference

    found: dict[str, Any] = {"forwards": 0, "bytes": 0, "more": []}
    copies, optimizers = [], []
    plain, copy, build = GPTModel.forward, reference.frozen_copy, model.build_optimizer

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        found["forwards"] += 1
        return plain(self, *args, **kwargs)

    def frozen_copy(*args: Any) -> Any:
        copies.extend(copy(*args))
        return copies

    def build_optimizer(*args: Any) -> Any:
        optimizers.append(build(*args))
        return optimizers[-1]

    GPTModel.forward = forward
    reference.frozen_copy, model.build_optimizer = frozen_copy, build_optimizer
    status, messages = run(words, file)
    assert status == 0, messages
    trained = {
        id(one) for opt in optimizers for group in opt.param_groups for one in group["params"]
    }
    for module in copies:
        for name, one in module.named_parameters():
            found["bytes"] += one.numel() * one.element_size()
            beside = one.requires_grad, one.grad is not None, hasattr(one, "main_grad")
            if any(beside) or id(one) in trained:
                found["more"].append(name)
    return found


def refusals(words: Sequence[str], cases: Sequence[Sequence[str]]) -> list[str]:
    """What ``mindspeed WORDS CASE`` says, in forks of this process."""
    from tests.support import forked

    return [forked.run([*words, *case])[1] for case in cases]


def written(words: Sequence[str], command_words: Sequence[str], folder: str) -> float:
    """Train, write for transformers, and the mean reward of the pairs' answers there."""
    import torch
    import transformers as hf

    from tests.support import forked

    for one in ([words[0], *FLAGS.split(), *words[1:]], command_words):
        status, text = forked.run(one)
        assert status == 0, text
    model, report = hf.AutoModelForSequenceClassification.from_pretrained(
        folder, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    rewards = []
    for one in records():
        for answer in ("chosen", "rejected"):
            ids = tokenizer.apply_chat_template(one["prompt"] + one[answer], tokenize=False)
            found = tokenizer(ids, return_tensors="pt", add_special_tokens=False)
            with torch.no_grad():
                rewards.append(model(**found).logits.item())
    return sum(rewards) / len(rewards)


def generated(load: str) -> str:
    """What ``mindspeed generate`` says to a checkpoint."""
    from tests.training.raw_data_job import command

    return command(["generate", "--load", load, "--prompt", "a"])[1]
