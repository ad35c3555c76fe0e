"""Write examples/FAMILY/*.sh from the table below, or check that they are up to date.

    python tools/example_scripts.py            write the scripts
    python tools/example_scripts.py --check    fail where one is missing, changed or left over

A script only names a recipe (``mindspeed recipes``) and paths; everything else is in the recipe.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from string import Template

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mindspeed import recipes

ROOT = Path(__file__).resolve().parent.parent / "examples"
DEVICES_PER_NODE = 8


@dataclass(frozen=True)
class Model:
    """The scripts of one model.

    Attributes:
        family: Folder.
        size: As in the names of the scripts.
        recipe: Recipe of its pretraining; ``recipe + "-lora"`` tunes it.
        entry: Script at the root that trains it.
        pretrain: Name of the pretraining script behind ``pretrain_FAMILY_``.
        tensor, pipeline: Layout for text generation and evaluation, on one machine; 0 if none.
    """

    family: str
    size: str
    recipe: str
    pretrain: str
    tensor: int = 1
    pipeline: int = 1
    entry: str = "pretrain_gpt.py"

    @property
    def folder(self) -> str:
        return {"internlm": "intern"}.get(self.family, self.family)


_LLAMA, _BAICHUAN = "pretrain_llama.py", "pretrain_baichuan.py"
_BLOOM, _INTERN = "pretrain_bloom.py", "pretrain_intern.py"
MODELS = (
    Model("llama", "7B", "llama-7b", "7B_zero_8p", 2, 2, _LLAMA),
    Model("llama", "13B", "llama-13b", "13B_ptd_8p", 4, 2, _LLAMA),
    Model("llama", "33B", "llama-33b", "33B_ptd_32p", 4, 2, _LLAMA),
    Model("llama", "65B", "llama-65b", "65B_ptd_32p", 8, 1, _LLAMA),
    Model("llama2", "7B", "llama2-7b", "7B_ptd_8p", 2, 1, _LLAMA),
    Model("llama2", "13B", "llama2-13b", "13B_ptd_8p", 4, 1, _LLAMA),
    Model("llama2", "34B", "llama2-34b", "34B_ptd_16p", 8, 1, _LLAMA),
    Model("llama2", "70B", "llama2-70b", "70B_ptd_64p", 8, 1, _LLAMA),
    Model("aquila", "7B", "aquila-7b", "7B_zero_8p", 2, 1, "pretrain_aquila.py"),
    Model("baichuan", "7B", "baichuan-7b", "zero_7B", 2, 1, _BAICHUAN),
    Model("baichuan", "13B", "baichuan-13b", "ptd_13B", 4, 1, _BAICHUAN),
    Model("baichuan2", "7B", "baichuan2-7b", "ptd_7B", 2, 1, _BAICHUAN),
    Model("baichuan2", "13B", "baichuan2-13b", "ptd_13B", 4, 1, _BAICHUAN),
    Model("bloom", "7B", "bloom-7b1", "7B_ptd_8p", 2, 1, _BLOOM),
    Model("bloom", "176B", "bloom-176b", "176B_ptd_96p", 8, 2, _BLOOM),
    Model("internlm", "7B", "internlm-7b", "7B_zero_8p", 2, 1, _INTERN),
    Model("internlm", "65B", "internlm-65b", "65B_ptd_32p", 8, 1, _INTERN),
    Model("llama3", "8B", "llama3-8b", "8B_ptd_8p", 2, 1, _LLAMA),
    Model("qwen2.5", "7B", "qwen2.5-7b", "7B_ptd_8p", 2),
    Model("qwen3", "8B", "qwen3-8b", "8B_ptd_8p", 2),
    Model("qwen3", "30B_A3B", "qwen3-30b-a3b", "30B_A3B_ptd_16p", 4),
    Model("mistral", "7B", "mistral-7b-v0.3", "7B_ptd_8p", 2),
    Model("mixtral", "8x7B", "mixtral-8x7b", "8x7B_ptd_32p", 8),
    Model("deepseek", "V3", "deepseek-v3", "V3_ptd_2048p", 0),
)

HEAD = """\
#!/usr/bin/env bash
# $title
#   $use
# (written by tools/example_scripts.py)
set -euo pipefail
"""
PATHS = {
    "ROOT": """ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)""",
    "DATA_PATH": """\
DATA_PATH=${DATA_PATH:?is not set: prefix of the .bin and .idx files of mindspeed preprocess}""",
    "INSTRUCTIONS": """\
DATA_PATH=${DATA_PATH:?is not set: prefix of instruction data (preprocess --handler-name ...)}""",
    "BENCHMARK": """\
DATA_PATH=${DATA_PATH:?is not set: directory of the benchmark, such as dataset/boolq/test}""",
    "TOKENIZER": "TOKENIZER=${TOKENIZER:?is not set: directory of the tokenizer}",
    "LOAD": "LOAD=${LOAD:?is not set: directory of checkpoints, or hf:DIR}",
    "LORA_LOAD": "LORA_LOAD=${LORA_LOAD:?is not set: directory of adapter checkpoints, or of PEFT}",
}
TORCHRUN = """\
torchrun --nnodes "${NNODES:-$nodes}" --nproc-per-node "${NPROC_PER_NODE:-$devices}" \\
    --node-rank "${NODE_RANK:-0}" \\
    --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-6000}" \\
"""
# $DATA_PATH is not quoted where it may be several prefixes with weights.
PRETRAIN = """\
SAVE=${SAVE:-ckpt/$recipe}

${torchrun}    "$ROOT/$entry" --config $recipe --data-path $DATA_PATH \\
    --tokenizer-type PretrainedFromHF --tokenizer-name-or-path "$TOKENIZER" \\
    --save "$SAVE" --save-interval 1000 --auto-resume "$@"
"""
TUNE = """\
SAVE=${SAVE:-ckpt/$recipe-lora}

${torchrun}    "$ROOT/$entry" --config $recipe-lora --data-path $DATA_PATH \\
    --tokenizer-type PretrainedFromHF --tokenizer-name-or-path "$TOKENIZER" \\
    --load "$LOAD" --save "$SAVE" --save-interval 500 "$@"
"""
GENERATE = """\
PROMPT=${PROMPT:-Give three tips for staying healthy.}

mindspeed generate --load "$LOAD"$adapter --prompt "$PROMPT" --max-new-tokens 256 \\
    --tensor-model-parallel-size $tensor --pipeline-model-parallel-size $pipeline "$@"
"""
EVALUATE = """\
TASK=${TASK:-boolq}

mindspeed evaluate --load "$LOAD" --task $TASK --task-data-path $DATA_PATH \\
    --output "${OUTPUT:-scores/$recipe}" \\
    --tensor-model-parallel-size $tensor --pipeline-model-parallel-size $pipeline "$@"
"""


def scripts() -> dict[str, str]:
    """All scripts: path below examples/ -> text."""
    found = {}
    for model in MODELS:
        found |= scripts_of(model)
    alpaca = Model("alpaca", "13B", "llama-13b", "", 4, 2)
    found["alpaca/generate_alpaca_13B_deepspeed.sh"] = generate(alpaca, "Chinese-LLaMA-Alpaca 13B")
    found["alpaca/generate_alpaca_13B_lora_deepspeed.sh"] = generate(
        alpaca, "LLaMA 13B with an adapter", lora=True
    )
    found["llama/generate_llama_7B_deepspeed_pipeline.sh"] = generate(
        Model("llama", "7B", "llama-7b", "", 2, 1), "LLaMA 7B trained with ZeRO"
    )
    return {
        name: body.replace("bash SCRIPT", f"bash examples/{name}") for name, body in found.items()
    }


def scripts_of(model: Model) -> dict[str, str]:
    """The scripts of one model."""
    folder, family, size = model.folder, model.family, model.size
    layout = f"tp{model.tensor}_pp{model.pipeline}"
    found = {f"{folder}/pretrain_{family}_{model.pretrain}.sh": train(model, lora=False)}
    if model.tensor:
        found[f"{folder}/generate_{family}_{size}_{layout}.sh"] = generate(model, model.recipe)
        found[f"{folder}/evaluate_{family}_{size}_{layout}.sh"] = evaluate(model)
    if f"{model.recipe}-lora" in recipes.table():
        found[f"{folder}/tune_{family}_ptd_{size.lower()}.sh"] = train(model, lora=True)
    return found


def train(model: Model, *, lora: bool) -> str:
    """A script that pretrains or tunes a model."""
    recipe = model.recipe + ("-lora" if lora else "")
    devices = recipes.table()[recipe]["devices"]
    per_node = min(devices, DEVICES_PER_NODE)
    torchrun = fill(TORCHRUN, nodes=devices // per_node, devices=per_node)
    if lora:
        title = (
            f"Tunes {model.recipe} with LoRA on {devices} devices; mindspeed recipes show {recipe}"
        )
        names = ("ROOT", "INSTRUCTIONS", "TOKENIZER", "LOAD")
        use = "DATA_PATH=data/alpaca TOKENIZER=tokenizer LOAD=hf:model bash SCRIPT"
    else:
        title = f"Pretrains {recipe} on {devices} devices; mindspeed recipes show {recipe}"
        names = ("ROOT", "DATA_PATH", "TOKENIZER")
        use = "DATA_PATH=data/corpus_text_document TOKENIZER=tokenizer bash SCRIPT"
    body = fill(
        TUNE if lora else PRETRAIN, recipe=model.recipe, entry=model.entry, torchrun=torchrun
    )
    return text(title, use, names, body)


def generate(model: Model, what: str, *, lora: bool = False) -> str:
    """A script that continues a prompt."""
    title = f"Continues a prompt with {what} on {model.tensor * model.pipeline} devices"
    use = 'LOAD=ckpt PROMPT="How are you?" bash SCRIPT'
    body = fill(
        GENERATE,
        tensor=model.tensor,
        pipeline=model.pipeline,
        adapter=' --lora-load "$LORA_LOAD"' if lora else "",
    )
    return text(title, use, ("LOAD", "LORA_LOAD") if lora else ("LOAD",), body)


def evaluate(model: Model) -> str:
    """A script that scores a model on a benchmark."""
    title = f"Scores {model.recipe} on a benchmark on {model.tensor * model.pipeline} devices"
    use = "LOAD=ckpt TASK=boolq DATA_PATH=dataset/boolq/test bash SCRIPT"
    body = fill(EVALUATE, tensor=model.tensor, pipeline=model.pipeline, recipe=model.recipe)
    return text(title, use, ("LOAD", "BENCHMARK"), body)


def text(title: str, use: str, paths: tuple[str, ...], body: str) -> str:
    """A whole script."""
    lines = "".join(PATHS[name] + "\n" for name in paths)
    return fill(HEAD, title=title, use=use) + lines + body


def fill(template: str, **values: object) -> str:
    """``$name`` of ``values`` filled in; shell variables stay."""
    return Template(template).safe_substitute(values)


def main() -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    wanted = scripts()
    there = {path.relative_to(ROOT).as_posix(): path for path in ROOT.rglob("*.sh")}
    stale = [name for name, body in wanted.items() if _text(there.get(name)) != body]
    stale += [name for name in there if name not in wanted]
    if check:
        print("\n".join(f"examples/{name} is out of date" for name in stale))
        return bool(stale)
    for name in stale:
        path = ROOT / name
        if name not in wanted:
            path.unlink()
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wanted[name])
        path.chmod(0o755)
    return 0


def _text(path: Path | None) -> str | None:
    return path.read_text() if path else None


if __name__ == "__main__":
    sys.exit(main())
