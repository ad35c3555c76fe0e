"""The README's first door in an environment that has nothing else: install, check, train.

    python tools/fresh_environment.py [--torch-index URL]

Makes a virtual environment in a temporary folder, installs torch and then exactly what the README
says, runs ``mindspeed doctor``, and trains on two ranks: with the ``pretrain_gpt.py`` of the
checkout in MEGATRON_LM_PATH, else with the script over megatron.core of the tests, which then
imports the packages that Megatron-LM's script imports. Only the README's import line is added.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
ADAPTOR_LINE = "import torch\nimport mindspeed.megatron_adaptor\n"
# Not ours to choose: the imports that stop pretrain_gpt.py of core_v0.16.1 where one is absent.
IMPORTS = "import numpy, packaging, pydantic, regex, six, tqdm, typing_extensions, yaml\n"
FLAGS = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32
    --max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 4 --lr 1e-3
    --train-iters 2 --eval-iters 0 --mock-data --tokenizer-type NullTokenizer --vocab-size 100
    --num-workers 0 --log-interval 1 --tensor-model-parallel-size 2 --sequence-parallel
""".split()  # noqa: SIM905


def readme_installation() -> list[str]:
    """The words of the README's ``pip install`` for the adaptor, after ``pip``."""
    line = re.search(
        r"^pip (install .*\[megatron\][^#\n]*)", (ROOT / "README.md").read_text(), re.M
    )
    if line is None:
        raise SystemExit('README.md has no line `pip install -e ".[megatron]" ...`')
    return shlex.split(line[1])


def pinned_torch() -> str:
    """The requirement of torch in constraints.txt."""
    return next(
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line.startswith("torch==")
    )


def script(folder: Path) -> tuple[Path, list[str], dict[str, str]]:
    """Script with the import line, its flags, and the environment variables that it needs."""
    checkout = os.environ.get("MEGATRON_LM_PATH")
    source = (
        Path(checkout, "pretrain_gpt.py") if checkout else ROOT / "tests/megatron_lm/core_script.py"
    )
    text = source.read_text()
    line = ADAPTOR_LINE if checkout else ADAPTOR_LINE + IMPORTS
    target = folder / source.name
    target.write_text(text.replace("import torch\n", line, 1))
    flags = (
        FLAGS if checkout else ["--tensor-model-parallel-size=2", f"--losses={folder / 'losses'}"]
    )
    return target, flags, {"PYTHONPATH": checkout} if checkout else {}


def main() -> None:
    """Run every step; the first that fails ends the process with its status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--torch-index", default="", help="index of the torch wheel")
    index = parser.parse_args().torch_index
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    clean |= {"MINDSPEED_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = folder / "venv/bin/python"

        def run(*words: str, **variables: str) -> None:
            print("==>", shlex.join(words), flush=True)
            done = subprocess.run([python, *words], cwd=ROOT, env=clean | variables, check=False)
            if done.returncode:
                raise SystemExit(f"fresh environment: {shlex.join(words)} failed")

        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        pip = ("-m", "pip", "--disable-pip-version-check", "--quiet")
        run(*pip, "install", *(["--index-url", index] if index else []), pinned_torch())
        run(*pip, *readme_installation())
        path, flags, variables = script(folder)
        run("-m", "mindspeed", "doctor", **variables)
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
        run(*launcher, str(path), *flags, **variables)


if __name__ == "__main__":
    main()
