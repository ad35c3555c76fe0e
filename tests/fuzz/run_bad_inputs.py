"""Runs bad inputs and prints what went wrong, as JSON: ``python -m tests.fuzz.run_bad_inputs``
SEED COUNT DIR.

Everything is imported once and warmed up; then each case is a forked process of its own, so that a
signal is seen and nothing that a case leaves behind (groups, umask, seeds) changes the next one.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import re
import shutil
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

SECONDS = 30
TOGETHER = 2


def good_files(root: Path) -> dict[str, bytes]:
    """Write what a user would have: a model, an adapter, data; returns the contents by path."""
    import torch
    import transformers
    from safetensors.torch import save_file

    from mindspeed.data.tokenizer import save_tokenizer, train_bpe

    texts = [f"line {i} of a small corpus" for i in range(40)]
    model = root / "model"
    config = transformers.LlamaConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        vocab_size=300, max_position_embeddings=64,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(model)
    save_tokenizer(train_bpe(texts, 300), model)
    (model / "generation_config.json").write_text('{"eos_token_id": 0, "pad_token_id": 1}')
    (root / "adapter").mkdir()
    prefix = "base_model.model.model.layers"
    adapter = {
        f"{prefix}.{layer}.self_attn.q_proj.lora_{part}.weight": torch.ones(shape)
        for layer in range(2)
        for part, shape in (("A", (2, 16)), ("B", (16, 2)))
    }
    save_file(adapter, root / "adapter/adapter_model.safetensors")
    described = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4,
        "target_modules": ["q_proj"], "lora_dropout": 0.0, "bias": "none", "rank_pattern": {},
    }  # fmt: skip
    (root / "adapter/adapter_config.json").write_text(json.dumps(described))
    (root / "boolq").mkdir()
    question = {"question": "is it", "passage": "it is", "answer": True}
    for name, rows in {
        "boolq/dev.jsonl": [question] * 2,
        "corpus.jsonl": [{"text": text} for text in texts[:8]],
        "metrics.jsonl": [
            {"iteration": i, "lm_loss": 3.0 / i, "grad_norm": 1.0} for i in (1, 2, 3)
        ],
    }.items():
        (root / name).write_text("\n".join(map(json.dumps, rows)))
    (root / "template.yaml").write_text("user: 'U {content}'\nassistant: 'A {content}'\n")
    (root / "template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    (root / "params.json").write_text(
        '{"path": "json", "data_files": "corpus.jsonl", "split": "train"}'
    )
    (root / "settings.yaml").write_text("optimization_level: 2\nnoop_layers: [0]\n")
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": texts[:4]}), root / "data.parquet")
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def warm_up(root: Path) -> None:
    """Import and build once what every case would."""
    from mindspeed.cli.main import main
    from tests.fuzz.bad_inputs import DRY

    os.chdir(root)
    assert main(DRY) == 0
    commands = ("generate", "chat", "evaluate", "convert", "merge_lora", "preprocess", "verify")
    for name in (
        *commands,
        "export",
        "plot",
        "attention",
        "pipeline",
        "moe",
        "tokenizer",
        "serve",
        "doctor",
        "ops",
    ):
        __import__(f"mindspeed.cli.{name}")
    for name in (
        "inference.text_generator", "inference.load", "inference.generate", "evaluation.evaluate",
        "evaluation.prepared_tasks", "evaluation.model_adapter", "checkpoint.weights.convert",
        "lora.merge", "lora.peft", "training.pretrain", "cli.plot", "data.hf_tokenizer",
        "data.hf_template", "data.templates", "cli.attention",
    ):  # fmt: skip
        __import__(f"mindspeed.{name}")
    for name in (
        "matplotlib.figure",
        "matplotlib.backends.backend_agg",
        "pyarrow.parquet",
        "datasets",
    ):
        __import__(name)


def start(case, number: int, root: Path) -> tuple[int, Path]:
    """Fork the process of a case."""
    home = root / str(number)
    home.mkdir()
    pid = os.fork()
    if pid:
        return pid, home
    status = 99
    try:
        status = _inside(case, root / "good", home)
    finally:
        os._exit(status if isinstance(status, int) and 0 <= status < 128 else 98)


def _inside(case, good: Path, home: Path) -> int:
    os.setsid()
    os.chdir(home)
    changed = {Path(name).parts[0] for name in case.files}
    for entry in good.iterdir():
        if entry.name not in changed:
            os.symlink(entry, entry.name)
        elif entry.is_dir():
            shutil.copytree(entry, entry.name)
    for name, content in case.files.items():
        Path(name).write_bytes(content)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    output = os.open("output", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdin = open(0)  # noqa: SIM115
    os.environ.update(case.env)
    from mindspeed.cli.main import main

    try:
        status = main(list(case.argv))
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def verdict(case, status: int, late: bool, output: str) -> str | None:
    """What is wrong with how a case ended; None if nothing is."""
    if late:
        return f"took more than {SECONDS} s"
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    if "Traceback (most recent call last)" in output or code in (98, 99):
        return "traceback"
    if found := re.search(r": (unexpected \w+\W.*); (traceback: |--debug)", output):
        return found[1]
    if code and not output.strip():
        return "failed without a word"
    if not code and case.refused:
        return "silent success"
    return None


def run(seed: int, count: int, directory: str) -> dict[str, Any]:
    """Run so many inputs in an empty directory: how many ``ran``, and what went ``wrong``."""
    root = Path(directory)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)  # a case is no rank of a job
    os.environ.update(MINDSPEED_DEVICE="cpu", TMPDIR=directory, HF_HUB_OFFLINE="1")
    warnings.simplefilter("ignore")
    import mindspeed.megatron_adaptor  # noqa: F401  (before anything of Megatron)

    (root / "good").mkdir()
    good = good_files(root / "good")
    warm_up(root / "good")
    gc.collect()
    gc.freeze()  # a collection in a case would look at, and so copy, all that was imported
    from tests.fuzz.bad_inputs import generated, known

    first = known()
    more = itertools.islice(generated(good, seed), max(0, count - len(first)))
    cases = iter([*first, *more] if count >= len(first) else first[:: len(first) // count])
    running: dict[int, tuple] = {}
    wrong, ran = [], 0
    for number in itertools.count():
        case = next(cases, None)
        if case is not None:
            pid, home = start(case, number, root)
            running[pid] = (case, home, time.monotonic())
        elif not running:
            break
        while len(running) >= (TOGETHER if case is not None else 1):
            pid, status = os.waitpid(-1, os.WNOHANG)
            now = time.monotonic()
            late = next((p for p, (*_, began) in running.items() if now - began > SECONDS), None)
            if not pid and late is None:
                time.sleep(0.005)
                continue
            if not pid:
                os.killpg(late, signal.SIGKILL)
                pid, status = os.waitpid(late, 0)
            ended, home, _ = running.pop(pid)
            file = home / "output"
            output = file.read_text("utf-8", errors="replace") if file.exists() else ""
            ran += 1
            if problem := verdict(ended, status, pid == late, output):
                wrong.append({
                    "problem": problem, "kind": ended.kind, "argv": [w[:80] for w in ended.argv],
                    "files": {n: repr(c[:300]) for n, c in ended.files.items()},
                    "output": output[-600:],
                })  # fmt: skip
            shutil.rmtree(home, ignore_errors=True)
    return {"ran": ran, "wrong": wrong}


def main() -> None:
    print(json.dumps(run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))


if __name__ == "__main__":
    main()
