"""Runs Megatron-LM's own unit tests through the adaptor: what passes, and why the rest fails.

    python tools/megatron_tests.py --megatron ~/Megatron-LM --world-size 1 2 8 --json results.jsonl
    python tools/megatron_tests.py --json results.jsonl --report      # print the tables again

Every test file runs in WORLD_SIZE processes, as torchrun would start them; a test passes only if
it passes on every rank. Hangs and crashes cost one test, not the run. Results are appended to the
JSON lines file one test at a time; ``--resume`` continues an interrupted run. The checkout is
copied to a temporary folder first and never written to. Tests that mean nothing on a CPU are listed
with their reasons in ``megatron_tests_cpu.toml`` and reported apart.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parent
UNIT_TESTS = "tests/unit_tests"
OUTCOMES = (
    "passed",
    "failed",
    "hang or crash",
    "skipped",
    "needs more ranks",
    "meaningless on CPU",
    "needs a download",
)
RULES = ("tests", "errors", "more_ranks", "downloads")
BROKEN = ("failed", "hang", "crash")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_GLOO_LAZY_INIT": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "disabled",
    "ONE_LOGGER_JOB_CATEGORY": "test",
}


def main() -> int:
    args = parse_arguments()
    results = Path(args.json)
    if args.report:
        print(report(read_results(results)))
        return 0
    if results.exists() and not args.resume:
        raise SystemExit(f"{results} exists; continue it with --resume or choose another --json")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave through the clean-up below
    with tempfile.TemporaryDirectory(prefix="megatron-copy-", ignore_cleanup_errors=True) as folder:
        copy = copy_checkout(Path(args.megatron).resolve(), Path(folder).resolve() / "Megatron-LM")
        Run(args, copy, results).run()
    print(report(read_results(results)))
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megatron", help="a Megatron-LM checkout", default=None)
    parser.add_argument("--world-size", type=int, nargs="+", default=[1])
    parser.add_argument(
        "--select",
        nargs="+",
        default=[""],
        help=f"files or folders below {UNIT_TESTS}, in the order to run them",
    )
    parser.add_argument("--adaptor", default="mindspeed.megatron_adaptor", help='"" for none')
    parser.add_argument("--device", default="cpu", help="MINDSPEED_DEVICE of the tests")
    parser.add_argument("--json", default="megatron_tests.jsonl", help="one result per line")
    parser.add_argument("--resume", action="store_true", help="leave out what --json contains")
    parser.add_argument("--jobs", type=int, default=1, help="test files at the same time")
    parser.add_argument("--timeout", type=float, default=60, help="seconds for one test")
    parser.add_argument(
        "--patience", type=float, default=10, help="seconds for other ranks after a failure"
    )
    parser.add_argument("--report", action="store_true", help="only print the tables of --json")
    args = parser.parse_args()
    if not args.report and args.megatron is None:
        parser.error("--megatron PATH is needed to run tests")
    if args.megatron and not Path(args.megatron, UNIT_TESTS).is_dir():
        parser.error(f"--megatron {args.megatron} has no {UNIT_TESTS}: not a Megatron-LM checkout")
    return args


def copy_checkout(checkout: Path, copy: Path) -> Path:
    """Copies what the tests need, so that nothing they write lands in the checkout."""
    shutil.copytree(
        checkout, copy, ignore=shutil.ignore_patterns(".git", "__pycache__", "docs", "images")
    )
    datasets = copy / "megatron/core/datasets"
    if not list(datasets.glob("helpers_cpp*.so")):
        for folder in map(Path, sys.path):
            for built in (folder / "megatron/core/datasets").glob("helpers_cpp*.so"):
                shutil.copy(built, datasets)
    return copy


# -------------------------------------------------------------------------------------- running


class Run:
    """Hands files to nurseries and writes down what they answer."""

    def __init__(self, args: argparse.Namespace, copy: Path, results: Path):
        self.args = args
        self.copy = copy
        self.results = results
        self.lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.rules = load_rules()
        done, self.finished_files = defaultdict(set), set()
        for entry in read_results(results, keep_done=True):
            key = (entry["world_size"], entry["file"])
            if "done" in entry:
                self.finished_files.add(key)
            else:
                done[key].add(entry["nodeid"])
        self.done = done

    def run(self) -> None:
        from tqdm import tqdm

        work: queue.Queue[tuple[int, str]] = queue.Queue()
        for world_size in self.args.world_size:
            for file in self.files():
                if (world_size, file) not in self.finished_files:
                    work.put((world_size, file))
        self.bar = tqdm(total=work.qsize(), unit="file", smoothing=0.05)
        _end_last_line(self.results)
        with open(self.results, "a", buffering=1) as self.log, self.bar:
            threads = [
                threading.Thread(target=self._work, args=(work,), daemon=True)
                for _ in range(self.args.jobs)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def files(self) -> list[str]:
        root = self.copy / UNIT_TESTS
        found: list[Path] = []
        for name in self.args.select:
            name = name.removeprefix(UNIT_TESTS).strip("/")
            path = root / name
            if not path.exists():
                raise SystemExit(f"--select {name}: there is no {path.relative_to(self.copy)}")
            found += [path] if path.is_file() else sorted(path.rglob("test_*.py"))
        return [str(path.relative_to(self.copy)) for path in dict.fromkeys(found)]

    def _work(self, work: queue.Queue[tuple[int, str]]) -> None:
        nursery: Nursery | None = None
        while True:
            try:
                world_size, file = work.get_nowait()
            except queue.Empty:
                break
            for attempt in range(3):
                nursery = nursery or Nursery(self.args, self.copy)
                if self._run_file(nursery, world_size, file):
                    break
                nursery.close()
                if not nursery.ready:
                    self.bar.write(f"no test can run:\n{nursery.last_words()}")
                    return
                nursery = None
                if attempt == 2:
                    self._note(world_size, file, "the process that forks the ranks died 3 times")
            self.bar.update()
        if nursery is not None:
            nursery.close()

    def _run_file(self, nursery: Nursery, world_size: int, file: str) -> bool:
        request = {
            "file": file,
            "world_size": world_size,
            "skip": sorted(self.done[world_size, file]),
            "excluded": self.rules["tests"],
            "expected_errors": [pattern for kind in RULES[1:] for pattern, _ in self.rules[kind]],
            "timeout": self.args.timeout,
            "patience": self.args.patience,
        }
        for answer in nursery.ask(request):
            entry = {"world_size": world_size, "file": file, **answer}
            if "note" in answer:
                self.bar.write(answer["note"])
                continue
            with self.lock:
                if "nodeid" in answer:
                    entry = self._tidy(entry)
                    self.done[world_size, file].add(answer["nodeid"])
                    self.counts[category(classify(entry, self.rules))] += 1
                    self.bar.set_postfix(self.counts, refresh=False)
                self.log.write(json.dumps(entry) + "\n")
            if "done" in answer:
                return True
        return False

    def _tidy(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Makes paths relative to the checkout."""
        for key in ("error", "where", "traceback"):
            if isinstance(entry.get(key), str):
                entry[key] = entry[key].replace(f"{self.copy}/", "")
        return entry

    def _note(self, world_size: int, file: str, text: str) -> None:
        nodeid = f"{file}::<file>"
        entry = {"world_size": world_size, "file": file, "nodeid": nodeid}
        with self.lock:
            self.log.write(json.dumps({**entry, "outcome": "crash", "error": text}) + "\n")


def _end_last_line(path: Path) -> None:
    """Closes a line that an interruption cut off, so that the next one starts afresh."""
    if path.exists() and not path.read_bytes().endswith(b"\n"):
        with open(path, "a") as file:
            file.write("\n")


class Nursery:
    """The process that has imported Megatron and forks the ranks."""

    def __init__(self, args: argparse.Namespace, copy: Path):
        environment = {
            **os.environ,
            **ENVIRONMENT,
            "MINDSPEED_DEVICE": args.device,
            "PYTHONPATH": os.pathsep.join(
                [str(copy), str(TOOLS), os.environ.get("PYTHONPATH", "")]
            ).rstrip(os.pathsep),
        }
        self.ready = False  # has imported the adaptor and Megatron
        self.errors = open(copy.parent / "nursery.log", "a+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, str(TOOLS / "megatron_nursery.py"), str(copy), args.adaptor],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=environment,
        )

    def ask(self, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields the answers to a request; ends early if the process dies."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return
        for line in self.process.stdout:
            answer = json.loads(line)
            if "ready" in answer:
                self.ready = True
            else:
                yield answer
            if "done" in answer:
                return

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def last_words(self) -> str:
        """The end of what the process wrote to standard error."""
        return Path(self.errors.name).read_text(errors="replace")[-4000:]


def load_rules() -> dict[str, list[tuple[str, str]]]:
    """Reads which tests and which errors mean nothing on a CPU."""
    import tomllib

    with open(TOOLS / "megatron_tests_cpu.toml", "rb") as file:
        data = tomllib.load(file)
    return {
        kind: [(entry["match"], entry["reason"]) for entry in data.get(kind, [])] for kind in RULES
    }


# ------------------------------------------------------------------------------------- reporting


def read_results(path: Path, keep_done: bool = False) -> list[dict[str, Any]]:
    """Returns the entries of a results file; a last line cut off by an interruption is left out."""
    entries = []
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue
            if keep_done or "nodeid" in entry:
                entries.append(entry)
    return entries


def classify(entry: dict[str, Any], rules: dict[str, list[tuple[str, str]]]) -> dict[str, Any]:
    """Marks a failure whose error message says that the test means nothing here."""
    if entry["outcome"] in BROKEN:
        kinds = {"errors": "meaningless", "downloads": "needs a download"}
        if entry["world_size"] < 8:
            kinds["more_ranks"] = "needs more ranks"
        for kind, outcome in kinds.items():
            for pattern, reason in rules[kind]:
                if re.search(pattern, entry["error"]):
                    return {**entry, "outcome": outcome, "reason": reason}
    return entry


def category(entry: dict[str, Any]) -> str:
    outcome = entry["outcome"]
    if outcome in ("hang", "crash"):
        return "hang or crash"
    return "meaningless on CPU" if outcome == "meaningless" else outcome


def report(entries: list[dict[str, Any]]) -> str:
    """The tables for every world size, then the causes of what failed."""
    rules = load_rules()
    entries = [classify(entry, rules) for entry in entries]
    parts = []
    for world_size in sorted({entry["world_size"] for entry in entries}):
        chosen = [entry for entry in entries if entry["world_size"] == world_size]
        parts += [f"WORLD_SIZE {world_size}", "", outcome_table(chosen)]
        parts += ["", "causes of failures, hangs and crashes", "", cause_table(chosen)]
        parts += ["", "meaningless on CPU or needs a download", "", reason_table(chosen), ""]
    return "\n".join(parts)


def outcome_table(entries: list[dict[str, Any]]) -> str:
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for entry in entries:
        rows[directory(entry["file"])][category(entry)] += 1
    total: Counter[str] = sum(rows.values(), Counter())
    lines = [("directory", *OUTCOMES, "passed of run")]
    for name, counts in [*sorted(rows.items()), ("total", total)]:
        ran = sum(counts[outcome] for outcome in OUTCOMES[:3])
        share = f"{100 * counts['passed'] / ran:.1f} %" if ran else "-"
        lines.append((name, *(str(counts[outcome]) for outcome in OUTCOMES), share))
    return markdown(lines)


def directory(file: str) -> str:
    folder = str(Path(file).parent.relative_to(UNIT_TESTS))
    return "(root)" if folder == "." else folder


def cause_table(entries: list[dict[str, Any]]) -> str:
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for entry in entries:
        if entry["outcome"] in BROKEN:
            groups[cause(entry)].append(entry)
    lines = [("tests", "cause", "where", "for example")]
    for name, members in sorted(groups.items(), key=lambda group: -len(group[1])):
        places = Counter(entry.get("where", "") for entry in members)
        example = members[0]["nodeid"].removeprefix(UNIT_TESTS + "/")
        lines.append((str(len(members)), name, places.most_common(1)[0][0], example))
    return markdown(lines)


def reason_table(entries: list[dict[str, Any]]) -> str:
    reasons = Counter(
        entry.get("reason") or entry["error"]
        for entry in entries
        if entry["outcome"] in ("meaningless", "needs a download")
    )
    lines = [("tests", "reason"), *((str(count), name) for name, count in reasons.most_common())]
    return markdown(lines)


def cause(entry: dict[str, Any]) -> str:
    """The last error line without what varies: numbers, addresses, paths, long names."""
    text = entry["error"]
    text = re.sub(r"( when instantiating \w+)+$", "", text)
    text = re.sub(r"0x[0-9a-f]+", "0x..", text)
    text = re.sub(r"/(?:tmp|var)/\S+", "/tmp/..", text)
    text = re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "N", text)
    text = re.sub(r"N(, N)+", "N..", text)
    if re.match(r"(AssertionError|assert)\b", text):
        text += f" [{Path(entry['file']).name}]"
    return f"{entry['outcome']}: {text}"[:160] if entry["outcome"] != "failed" else text[:160]


def markdown(lines: list[tuple[str, ...]]) -> str:
    """A Markdown table that is also readable as it is."""
    cells = [[cell.replace("|", "/") for cell in line] for line in lines]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    rendered = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |"
        for line in cells
    ]
    rendered.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(rendered)


if __name__ == "__main__":
    sys.exit(main())
