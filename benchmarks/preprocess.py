"""Megabytes per second and core of our preprocessing over Megatron-LM's preprocess_data.py.

    python benchmarks/preprocess.py --megatron /path/to/Megatron-LM [--json out.json]

Both tokenize the same jsonl file with the same Hugging Face tokenizer into the same two files,
which are compared byte by byte: equal or no figure. All processes of a run share one core. What a
run costs is the processor time of all its processes; what starting costs is measured with one
document and taken off. The figure is the ratio of the medians of several rounds in turns; at least
1.00 is the target.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

VOCABULARY = 8000


def main() -> None:
    """Print one row per program, and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megatron", required=True, type=Path, help="Megatron-LM core_v0.16.1")
    parser.add_argument("--megabytes", type=int, default=10, help="size of the corpus")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = write_corpus(folder, options.megabytes)
        single = folder / "single.jsonl"
        single.write_text(corpus.read_text("utf-8").split("\n", 1)[0] + "\n", "utf-8")
        seconds: dict[str, list[float]] = {"Megatron-LM": [], "mindspeed": []}
        for _ in range(options.rounds):
            for program in seconds:
                start = run(program, options.megatron, single, folder)
                seconds[program].append(run(program, options.megatron, corpus, folder) - start)
            compare(folder)
        megabytes = corpus.stat().st_size / 1e6
    figures = {
        program: {
            "seconds": [round(value, 3) for value in values],
            "megabytes_per_second_and_core": round(megabytes / statistics.median(values), 2),
        }
        for program, values in seconds.items()
    }
    for program, figure in figures.items():
        print(f"{program:<14}{figure['megabytes_per_second_and_core']:>8} MB/s per core")
    medians = {program: statistics.median(values) for program, values in seconds.items()}
    ratio = medians["Megatron-LM"] / medians["mindspeed"]
    print(f"ratio         {ratio:8.2f}")
    if options.json:
        machine = {"processor": platform.processor() or platform.machine(), "megabytes": megabytes}
        content = {"ratio": round(ratio, 3), **machine, **figures}
        options.json.write_text(json.dumps(content, indent=2) + "\n")


def write_corpus(folder: Path, megabytes: int) -> Path:
    """Python's documentation, several times, and a tokenizer trained on it."""
    from mindspeed.data.quickstart_corpus import write_python_docs
    from mindspeed.data.tokenizer import save_tokenizer, train_bpe

    once = write_python_docs(folder / "once.jsonl").path.read_text("utf-8")
    texts = [json.loads(line)["text"] for line in once.splitlines()]
    (folder / "tokenizer").mkdir()
    save_tokenizer(train_bpe(texts, VOCABULARY), folder / "tokenizer")
    corpus = folder / "corpus.jsonl"
    corpus.write_text(once * -(-megabytes * 1_000_000 // len(once.encode())), "utf-8")
    return corpus


def run(program: str, megatron: Path, source: Path, folder: Path) -> float:
    """Processor seconds of one run and all its processes."""
    output = folder / program
    shared = ["--input", str(source), "--output-prefix", str(output), "--append-eod"]
    shared += ["--tokenizer-type", "HuggingFaceTokenizer", "--workers", "1"]
    shared += ["--tokenizer-model", str(folder / "tokenizer")]
    environment = dict(os.environ)
    if program == "mindspeed":
        command = [sys.executable, "-m", "mindspeed", "preprocess", "--overwrite", *shared]
    else:
        start = "import mindspeed.megatron_adaptor, runpy, sys; sys.argv = sys.argv[1:]; "
        start += "runpy.run_path(sys.argv[0], run_name='__main__')"
        script = str(megatron / "tools" / "preprocess_data.py")
        command = [sys.executable, "-c", start, script, *shared]
        environment["PYTHONPATH"] = os.pathsep.join([str(megatron), *sys.path])
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def compare(folder: Path) -> None:
    """Stop unless both programs wrote the same bytes."""
    for end in (".bin", ".idx"):
        ours, theirs = (
            (folder / f"{program}_text_document{end}").read_bytes()
            for program in ("mindspeed", "Megatron-LM")
        )
        if ours != theirs:
            sys.exit(f"the two {end} files differ")


if __name__ == "__main__":
    main()
