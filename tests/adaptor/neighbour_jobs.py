"""Libraries beside Megatron in one process, each trained as its documentation shows."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import torch

BATCHES, LENGTH, VOCABULARY = 3, 8, 32


def trained(names: list[str]) -> dict[str, dict[str, Any]]:
    """Of each losses of three steps, bits of the weights, and the device that it chose."""
    return {name: _trained(name) for name in names}


def _trained(name: str) -> dict[str, Any]:
    torch.manual_seed(5)
    losses, parameters, device = NEIGHBOURS[name]()
    digest = hashlib.sha256()
    for parameter in parameters:
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return {"losses": losses, "weights": digest.hexdigest(), "device": torch.device(device).type}


def transformer_engine_seen() -> tuple[bool, bool]:
    """Whether Megatron and accelerate see a Transformer Engine."""
    from accelerate.utils import is_transformer_engine_available
    from megatron.core.extensions.transformer_engine import HAVE_TE

    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("transformer_engine")
        return HAVE_TE, True
    return HAVE_TE, is_transformer_engine_available()


Trained = tuple[list[float], Iterable[torch.Tensor], torch.device | str]


def _tokens() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(VOCABULARY, (2, LENGTH), generator=generator, device="cpu")
        for _ in range(BATCHES)
    ]


def _llama() -> Any:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
    )
    return transformers.LlamaForCausalLM(config)


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.01)


def _transformers() -> Trained:
    import transformers

    model = _llama()
    rows = [{"input_ids": row, "labels": row} for batch in _tokens() for row in batch]
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=2,
            max_steps=BATCHES,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=rows,
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, model.parameters(), trainer.args.device


def _accelerate() -> Trained:
    import accelerate

    accelerator = accelerate.Accelerator()
    model = _llama()
    model, optimizer = accelerator.prepare(model, _optimizer(model))
    losses = []
    for tokens in _tokens():
        tokens = tokens.to(accelerator.device)
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.parameters(), accelerator.device


def _peft() -> Trained:
    import peft

    model = peft.get_peft_model(_llama(), peft.LoraConfig(target_modules=["q_proj"], r=2))
    return _steps(model, lambda tokens: model(input_ids=tokens, labels=tokens).loss)


def _lightning() -> Trained:
    import lightning

    losses = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = _llama()

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            loss = self.model(input_ids=batch, labels=batch).loss
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return _optimizer(self.model)

    module = Module()
    data = torch.utils.data.DataLoader(_tokens(), batch_size=None)
    trainer = lightning.Trainer(
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(module, data)
    return losses, module.parameters(), trainer.strategy.root_device


def _deepspeed() -> Trained:
    import deepspeed

    model = _llama()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=_optimizer(model), config=config)
    losses = []
    for tokens in _tokens():
        tokens = tokens.to(engine.device)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, model.parameters(), engine.device


def _torchtitan() -> Trained:
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer
    from torchtitan.tools.utils import device_type

    model = Transformer(
        TransformerModelArgs(
            dim=16, n_layers=1, n_heads=2, vocab_size=VOCABULARY, max_seq_len=LENGTH
        )
    )
    with torch.no_grad():
        model.init_weights()
    losses, parameters, _ = _steps(model, lambda tokens: cross_entropy_loss(model(tokens), tokens))
    return losses, parameters, device_type


def _steps(model: torch.nn.Module, loss_of: Callable[[torch.Tensor], torch.Tensor]) -> Trained:
    optimizer, losses = _optimizer(model), []
    for tokens in _tokens():
        loss = loss_of(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.parameters(), next(model.parameters()).device


NEIGHBOURS = {
    "transformers": _transformers,
    "accelerate": _accelerate,
    "peft": _peft,
    "lightning": _lightning,
    "deepspeed": _deepspeed,
    "torchtitan": _torchtitan,
}
