"""The source keeps the security rules: no pickle, no shell, no eval, no unguarded writing.

Each rule looks at the calls in every module of the package. An exception is listed here with its
reason, and an exception that is not needed any more fails, too.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "mindspeed"

Rule = Callable[[ast.Call, str], bool]


def keyword(call: ast.Call, name: str) -> str | None:
    """The source of one keyword argument."""
    return next((ast.unparse(item.value) for item in call.keywords if item.arg == name), None)


def opens_for_writing(call: ast.Call, position: int) -> bool:
    """Whether the mode argument writes; a mode that only the run knows counts as writing."""
    given = call.args[position] if len(call.args) > position else None
    text = keyword(call, "mode") or (ast.unparse(given) if given is not None else "'r'")
    return not text.startswith(("'", '"')) or bool(set(text) & set("wax+"))


def runs_pickle(call: ast.Call, name: str) -> bool:
    if name == "torch.load":
        return keyword(call, "weights_only") != "True"
    if name in ("np.load", "numpy.load"):
        return keyword(call, "allow_pickle") not in (None, "False")
    return name in ("pickle.load", "pickle.loads", "pickle.Unpickler", "dill.load", "dill.loads")


def runs_code(call: ast.Call, name: str) -> bool:
    if name in ("yaml.load", "yaml.load_all", "yaml.unsafe_load"):
        return True
    return name in ("eval", "exec") or keyword(call, "trust_remote_code") == "True"


def runs_shell(call: ast.Call, name: str) -> bool:
    return name in ("os.system", "os.popen") or keyword(call, "shell") not in (None, "False")


def writes_bare(call: ast.Call, name: str) -> bool:
    if name in ("open", "io.open", "gzip.open", "bz2.open", "lzma.open"):
        return opens_for_writing(call, 1)
    if name.endswith(".open") and not name.startswith(("os.", "Image.")):
        return opens_for_writing(call, 0)
    return name.endswith((".write_text", ".write_bytes")) or name in (
        "os.mkdir",
        "os.makedirs",
        "torch.save",
        "np.save",
        "numpy.save",
    )


RULES: dict[str, tuple[Rule, dict[str, str]]] = {
    "no pickle": (
        runs_pickle,
        {
            "security.py": "behind allow_pickle, for files that nobody else can change",
            "testing/": "arguments and results of ranks, between processes of one test run",
            "planner/isolated.py": "results of children, from the pipe they were forked with",
        },
    ),
    "no code from data": (
        runs_code,
        {
            "parsing.py": "a SafeLoader of ours, which refuses more than yaml's own",
            "models/presets.py": "yaml's own SafeLoader in C, of a file of the package",
            "adaptor/script_job.py": "the training script to plan, as Python would start it",
        },
    ),
    "no shell": (runs_shell, {}),
    "all writing goes through mindspeed.files": (
        writes_bare,
        {
            "files.py": "is what the others go through",
            "storage/global_tensors.py": "into memory",
            "checkpoint/weights/": "into files of atomic_writer and secure_open",
            "storage/directory.py": "inside a directory that is hardened, synced and renamed",
            "testing/": "temporary files of one test run",
            "adaptor/repairs/scripts/failed_exit.py": "to the null device: stacks of a dying rank",
            "device/host_memory.py": "asks the kernel, in /proc, to forget its peak",
        },
    ),
}


@cache
def calls(path: Path) -> list[tuple[ast.Call, str]]:
    """The calls of a module, with the source of what they call."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [(node, ast.unparse(node.func)) for node in nodes if isinstance(node, ast.Call)]


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_every_module_keeps_the_rule(name: str) -> None:
    breaks, exceptions = RULES[name]
    found: list[str] = []
    used: set[str] = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE).as_posix()
        for call, function in calls(path):
            if not breaks(call, function):
                continue
            reason = [exception for exception in exceptions if place.startswith(exception)]
            used.update(reason)
            if not reason:
                found.append(f"mindspeed/{place}:{call.lineno} {ast.unparse(call)[:80]}")
    assert found == []
    assert set(exceptions) - used == set(), "these exceptions are not needed any more"


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("no pickle", "torch.load(p)", "torch.load(p, weights_only=True)"),
        ("no pickle", "np.load(p, allow_pickle=True)", "np.load(p)"),
        ("no pickle", "pickle.loads(b)", "json.loads(b)"),
        ("no code from data", "yaml.load(f, Loader)", "yaml.safe_load(f)"),
        ("no code from data", "eval(text)", "model.eval()"),
        ("no code from data", "A.f(p, trust_remote_code=True)", "A.f(p, trust_remote_code=trust)"),
        ("no shell", "subprocess.run(c, shell=True)", "subprocess.run([c])"),
        ("all writing goes through mindspeed.files", "open(p, 'wb')", "open(p)"),
        ("all writing goes through mindspeed.files", "p.open(mode='a')", "p.open('rb')"),
        ("all writing goes through mindspeed.files", "p.write_text(t)", "p.read_text()"),
    ],
)
def test_the_rule_finds_violations_only(name: str, bad: str, good: str) -> None:
    breaks, _ = RULES[name]
    for text, expected in ((bad, True), (good, False)):
        call = ast.parse(text, mode="eval").body
        assert isinstance(call, ast.Call)
        assert breaks(call, ast.unparse(call.func)) is expected
