"""docs/extending.md: every example on the page is a file, and every file is executed here."""

from __future__ import annotations

import importlib
import json
import os
import re
from pathlib import Path

import pytest
import torch

from mindspeed.cli.main import main
from mindspeed.ops import catalog, verify
from tests.docs import extending_ranks
from tests.docs.extending_ranks import EXAMPLES
from tests.plugins.packages import forget, install
from tests.support import trainer_job

PAGE = EXAMPLES.parent / "extending.md"
MOST_LINES = 75
SMALL = ["--train-iters", "3", "--no-swiglu", "--ffn-hidden-size", "64"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the dist-info that pip would make of ``docs/examples/pyproject.toml``."""
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((EXAMPLES / "pyproject.toml").read_text())["project"]
    folder = tmp_path_factory.mktemp("site-packages")
    install(folder, project["name"], {}, project["entry-points"], project["version"])
    return folder


@pytest.fixture
def acme(site: Path, monkeypatch: pytest.MonkeyPatch):
    """The package in this process."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.syspath_prepend(str(site))
    forget()
    yield importlib.import_module
    monkeypatch.undo()
    forget()


def test_the_page_shows_the_files_as_they_are():
    shown = dict(re.findall(r'^```\w+ title="(\S+)"\n(.*?)^```$', PAGE.read_text(), re.M | re.S))
    files = [*EXAMPLES.glob("acme/[!_]*.py"), EXAMPLES / "pyproject.toml"]
    assert {str(file.relative_to(EXAMPLES)): file.read_text() for file in files} == shown
    assert max(text.count("\n") for text in shown.values()) <= MOST_LINES


def test_commands_list_what_the_package_brings(acme, capsys):
    assert main(["features"]) == 0
    assert capsys.readouterr().out.count("from acme-mindspeed 1.0") == 4
    assert main(["models", "--family", "acme"]) == 0
    assert "family acme is brought by acme-mindspeed 1.0" in capsys.readouterr().out


def test_operator(acme):
    module = acme("acme.operator")
    for operator in (module.SQUARED_RELU, module.SQUARED_RELU_BACKWARD):
        assert operator in list(catalog.operators())
        for dtype in operator.dtypes:
            assert verify.verify(operator, torch.device("cpu"), dtype).passed
            for sample in operator.samples(dtype):
                if dtype == torch.float32:
                    torch.library.opcheck(operator.overload, sample)
    x = torch.tensor([-1.0, 0.5, 3.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(module.squared_relu, x)


def metrics_of(ranks, tmp_path, site, world, *flags, function=trainer_job.train):
    """Loss and gradient norm of every step, and what ``function`` returned on rank 0."""
    file = tmp_path / "metrics.jsonl"
    file.unlink(missing_ok=True)
    given = [*SMALL, "--metrics-file", str(file), *flags]
    more = (extending_ranks.use_package,) if function is trainer_job.train else ()
    results = ranks(
        world, function, given, *more, str(site),
        setup=trainer_job.SETUP, backend=None, timeout=240,
    )  # fmt: skip
    assert {result["error"] for result in results} == {None}, results
    records = trainer_job.metrics(file)
    return [r[name] for r in records for name in ("lm_loss", "grad_norm")], results[0]


def test_feature_with_the_operator_trains_as_megatrons_flag(ranks, tmp_path, site):
    ours, _ = metrics_of(ranks, tmp_path, site, 1, "--acme-squared-relu")
    theirs, _ = metrics_of(ranks, tmp_path, site, 1, "--squared-relu")
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_feature_refuses_what_it_cannot_do(ranks, site):
    (result,) = ranks(
        1, trainer_job.train, ["--acme-squared-relu"], extending_ranks.use_package, str(site),
        setup=trainer_job.SETUP, backend=None,
    )  # fmt: skip
    assert "--acme-squared-relu: is no gated activation; remove --swiglu" in result["error"]


@pytest.mark.weekly_cases("chunks0")
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("chunks", [[], ["--num-layers-per-virtual-pipeline-stage", "1"]])
def test_schedule_computes_what_megatrons_does(ranks, tmp_path, site, chunks):
    parallel = ["--pipeline-model-parallel-size", "2", "--eval-interval", "2", "--eval-iters", "1"]
    parallel += chunks
    ours, first = metrics_of(ranks, tmp_path, site, 2, *parallel, "--acme-gpipe")
    theirs, second = metrics_of(ranks, tmp_path, site, 2, *parallel)
    assert len(ours) == 6
    assert ours == theirs and first["digest"] == second["digest"]


def test_dispatcher_sends_tokens_in_bf16(ranks, tmp_path, site):
    experts = [
        "--num-experts", "4", "--expert-model-parallel-size", "2", "--moe-token-dispatcher-type",
        "alltoall", "--moe-router-topk", "2",
    ]  # fmt: skip
    run = extending_ranks.calls_of_dispatch
    halves, found = metrics_of(
        ranks, tmp_path, site, 2, *experts, "--acme-bf16-dispatch", function=run
    )
    plain, exact = metrics_of(ranks, tmp_path, site, 2, *experts, function=run)
    assert exact["sent"] == ["torch.float32"]
    assert found["sent"] == ["torch.bfloat16", "torch.float32"]  # the way back is unchanged
    assert halves == pytest.approx(plain, rel=2e-2) and halves != plain


def test_optimizer_rule_and_wrapper(ranks, tmp_path, site, acme):
    given = ["--acme-lion", "--lr", "1e-4"]
    alone, found = metrics_of(
        ranks, tmp_path, site, 1, *given, function=extending_ranks.steps_of_lion
    )
    sharded, _ = metrics_of(ranks, tmp_path, site, 2, *given, "--use-distributed-optimizer")
    assert found["steps"] == 3
    assert found["bytes"]["exp_avg"] > 100_000
    assert found["bytes"].get("exp_avg_sq", 0) < 1_000, "Lion has one moment"
    assert sharded == pytest.approx(alone, rel=1e-4)

    from mindspeed.optimizer.rules import StepOptions

    w, g, m = torch.tensor([1.0, 2.0]), torch.tensor([0.5, -0.5]), torch.tensor([0.0, 10.0])
    options = StepOptions(1, 0.1, (0.9, 0.99), 1e-8, 0.5, True, True)
    acme("acme.optimizer").lion([w], [g], {"exp_avg": [m]}, options)
    torch.testing.assert_close(w, torch.tensor([1 * 0.95 - 0.1, 2 * 0.95 - 0.1]))
    torch.testing.assert_close(m, torch.tensor([0.005, 9.895]))


def test_device_gives_each_rank_its_cores(ranks, site):
    found = ranks(
        2, extending_ranks.cores_of_bound_cpu, str(site), setup=trainer_job.SETUP, backend=None
    )
    cores = sorted(os.sched_getaffinity(0))
    assert found == ([cores[::2], cores[1::2]] if len(cores) > 1 else [cores, cores])


def test_task_scores_with_its_own_function(acme, tmp_path):
    from mindspeed.evaluation import answer_matching, prepared_tasks, prompts

    (tmp_path / "test.jsonl").write_text('{"country": "Peru", "answer": "Lima"}\n')
    (prepared,) = prepared_tasks.prepare_tasks(
        ["acme-capitals"], [str(tmp_path)], options=prompts.TaskOptions()
    )
    (question,) = prepared.questions
    assert question.body == "The capital of Peru is"
    assert answer_matching.is_correct(question.score, " lima, of course", question.target)
    assert not answer_matching.is_correct(question.score, " Cusco", question.target)


def test_family_maps_the_same_weights_as_llama(ranks, tmp_path, site):
    from safetensors.torch import load_file

    ranks(1, extending_ranks.convert_acme, str(tmp_path), str(site), setup=trainer_job.SETUP,
          backend=None, timeout=240)  # fmt: skip
    acme, llama = (load_file(tmp_path / name / "model.safetensors") for name in ("back", "llama"))
    assert torch.equal(acme.pop("model.last_norm.weight"), llama.pop("model.norm.weight"))
    assert acme.keys() == llama.keys()
    assert all(torch.equal(acme[name], llama[name]) for name in acme)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["model_type"] == "acme"
    assert (config["depth"], config["mlp_size"], config["num_key_value_heads"]) == (2, 48, 2)
    one, other = (
        {path.name: path.read_bytes() for path in sorted((tmp_path / name).rglob("*.safetensors"))}
        for name in ("from_acme", "from_llama")
    )
    assert one and one == other, "the same Megatron weights"
