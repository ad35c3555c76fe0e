"""No payload in a checkpoint is executed, in any entry of any format, by any command.

Each case puts a payload in one kind of entry and runs the commands that read such files; those that
need the entry refuse it in one line, and the payload never goes off.
"""

from __future__ import annotations

import pytest

from tests.support.lazy import needs

needs("megatron.core", "transformers")

from tests.security import planted_jobs as jobs
from tests.support.forked import run_all
from tests.support.trainer_job import SETUP, TINY

LORA = ["--lora-r", "2", "--lora-target-modules", "linear_qkv"]
MODEL = [*TINY, "--transformer-impl", "transformer_engine"]


@pytest.fixture(scope="module")
def sources(rank_pool, tmp_path_factory):
    """The same small model in every format, by its name."""
    root = tmp_path_factory.mktemp("sources")
    names = {name: root / name for name in ("torch_dist", "torch", "safetensors", "hf")}
    good = str(names["torch_dist"])
    convert = ["convert", "--input", good, "--output"]
    commands = [
        ["pretrain", *MODEL, "--train-iters", "1", "--save", good],
        [*convert, str(names["torch"]), "--format", "torch"],
        [*convert, str(names["safetensors"]), "--format", "safetensors"],
        ["export", "--hf", "--load", good, "--output", str(names["hf"])],
    ]
    (results,) = rank_pool.run(1, run_all, commands, setup=SETUP, backend=None, timeout=240)
    assert [status for status, _ in results] == [0] * 4, results
    return names


def commands(name: str, load: str, target) -> list[str]:
    """A command that reads the weights in ``load``."""
    new = ["--output", f"{target}-{name}"]
    path = load.removeprefix("hf:")
    return {
        "pretrain": ["pretrain", *MODEL, "--load", load, "--train-iters", "2"],
        "adapters": ["pretrain", *MODEL, "--load", load, *LORA, "--train-iters", "2"],
        "generate": ["generate", "--load", load, "--prompt", "1 2", "--max-new-tokens", "1"],
        "chat": ["chat", "--load", load],
        "serve": ["serve", "--load", load, "--port", "0"],
        "convert": ["convert", "--input", path, *new, "--format", "torch"],
        "export": ["export", "--hf", "--load", path, *new],
    }[name]


ALL = ("pretrain", "generate", "chat", "serve", "convert", "export")
LOADERS = ("pretrain", "adapters", "generate", "chat", "serve")
CASES = {
    "torch_dist index": ("torch_dist", jobs.plant_in_index, (), ALL, ()),
    "torch_dist common part": ("torch_dist", jobs.plant_in_common, (), ALL, ()),
    "torch_dist extra state": (
        "torch_dist",
        jobs.plant_in_entry,
        ("_extra_state",),
        LOADERS,
        ("convert", "export"),
    ),
    "torch_dist generators": (
        "torch_dist",
        jobs.plant_in_entry,
        ("rng_state",),
        ("pretrain",),
        ("generate", "convert", "export"),
    ),
    "torch_dist weight": (
        "torch_dist",
        jobs.plant_in_entry,
        ("embedding.word_embeddings.weight",),
        ALL,
        (),
    ),
    "torch_dist optimizer": (
        "torch_dist",
        jobs.plant_in_entry,
        ("optimizer.state.exp_avg.output_layer.weight",),
        ("pretrain",),
        ("generate", "convert"),
    ),
    "legacy rank file": ("torch", jobs.plant_in_rank_file, (), ALL, ()),
    "hugging face bin": ("hf", jobs.plant_in_bin, (), ALL[:-1], ()),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if "gener" in name else pytest.mark.slow) for name in CASES],
)
def test_a_payload_is_refused_and_never_runs(name, sources, ranks, tmp_path):
    form, plant, args, refuse, go_on = CASES[name]
    target = tmp_path / "planted"
    load = f"hf:{target}" if form == "hf" else str(target)
    words = [commands(command, load, target) for command in (*refuse, *go_on)]
    ((went_off, results),) = ranks(
        1,
        jobs.run_planted,
        sources[form],
        target,
        plant,
        args,
        words,
        setup=SETUP,
        backend=None,
        timeout=240,
    )
    assert not went_off
    for command, (status, output) in zip(refuse, results, strict=False):
        said = f"mindspeed {'pretrain' if command == 'adapters' else command}: "
        lines = [line for line in output.splitlines() if said in line]
        assert status == 1 and len(lines) == 1, (command, output)
        assert "mkdir" in lines[0] and "code" in lines[0], (command, lines)
        assert "Traceback" not in output
    for command, (status, output) in zip(go_on, results[len(refuse) :], strict=True):
        assert status == 0, (command, output)


@pytest.mark.parametrize("entry", ["index", "object"])
def test_torch_checkpoint_loading_is_restricted_too(entry, ranks, tmp_path):
    """The formats ``torch_dcp`` and ``fsdp_dtensor`` of Megatron-LM are read by torch's library."""
    ((went_off, message),) = ranks(1, jobs.load_with_torch, tmp_path, entry, setup=SETUP)
    assert not went_off
    assert "posix.mkdir" in message and "refusing to load" in message


def test_extra_state_of_transformer_engine_is_read_through_an_allow_list(tmp_path):
    (went_off, message, good) = jobs.state_of_an_engine(tmp_path)
    assert not went_off
    assert "posix.mkdir" in message
    assert good


def test_cached_index_maps_of_a_data_set_are_arrays(ranks, tmp_path):
    ((went_off, message),) = ranks(1, jobs.index_map, tmp_path, setup=SETUP, backend=None)
    assert not went_off
    assert "no index map" in message
