"""Entry points: loaded when they are needed, shown with their package, refused with a message."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from mindspeed import device, plugins
from mindspeed.adaptor.repairs import repairs_for
from mindspeed.adaptor.repairs.layers import rng_tracker
from mindspeed.cli import features as features_command
from mindspeed.cli.main import main
from mindspeed.device import MemoryStats, Properties
from mindspeed.errors import ConfigError
from mindspeed.evaluation import answer_matching, task
from mindspeed.evaluation.dataset_readers import Subject
from mindspeed.evaluation.prompts import TaskOptions, questions
from mindspeed.features import registry
from mindspeed.journal import Journal
from mindspeed.models import families, presets
from tests.plugins import plugin_ranks, sources

ONE_FEATURE = {plugins.FEATURES: {"acme-gain": "acme_gain:Gain"}}
GAIN = {"acme_gain": sources.FEATURE.format(seam="log")}


def test_a_feature_is_listed_with_its_package_and_its_flags_reach_every_parser(packages, capsys):
    packages("acme-mindspeed", GAIN, ONE_FEATURE, version="2.5")
    assert "acme_gain" not in sys.modules, "nothing is loaded before a list is needed"
    assert registry.origin_of("acme-gain") == "acme-mindspeed 2.5"
    assert registry.origin_of("profiling") == "mindspeed"
    parser = registry.add_arguments(argparse.ArgumentParser())
    assert parser.parse_args(["--acme-amplification", "2"]).acme_gain == 2.0
    registry.refuse_unknown(["acme_gain"])  # what mindspeed.configure accepts
    enabled = registry.resolve({"acme_gain": 2}, "cpu").enabled
    assert "acme-gain" in [feature.name for feature in enabled]
    assert main(["features", "--explain", "acme-gain"]) == 0
    assert "brought by acme-mindspeed 2.5" in capsys.readouterr().out
    assert main(["features"]) == 0
    assert "from acme-mindspeed 2.5" in capsys.readouterr().out
    described = features_command.describe(registry.all_features()[0])
    assert described["origin"] == "acme-mindspeed 2.5"


def test_a_family_brings_its_presets_and_is_found_by_its_model_type(packages, capsys):
    config = dict(presets.presets()["llama2-7b"].config, model_type="acme_lm", vocab_size=128)
    source = sources.FAMILY.format(kind="acme_lm", more=f"presets={{'acme-7b': {config!r}}}")
    packages(
        "acme-models", {"acme_family": source}, {plugins.FAMILIES: {"acme": "acme_family:FAMILY"}}
    )
    assert families.family_of_config({"model_type": "acme_lm"}).name == "acme"
    assert families.family_of_args(argparse.Namespace(model_family="acme")).name == "acme"
    flags = presets.model_flags("acme-7b")
    assert flags["model_family"] == "acme" and flags["vocab_size"] == 128
    assert main(["models", "--family", "acme"]) == 0
    out = capsys.readouterr().out
    assert "acme-7b" in out and "family acme is brought by acme-models 1.0" in out


def test_a_task_prepares_and_scores_with_its_own_functions(packages, capsys):
    packages(
        "acme-tasks", {"acme_task": sources.TASK}, {plugins.TASKS: {"acme-sums": "acme_task:TASK"}}
    )
    with pytest.raises(SystemExit):
        main(["evaluate", "--help"])
    assert "acme-sums (acme-tasks 1.0)" in " ".join(capsys.readouterr().out.split())
    subject = Subject("", ({"question": "1+2", "answer": "21"},), (), "")
    (question,) = questions(task.task("acme-sums"), [subject], TaskOptions())
    assert question.target == "12"
    assert answer_matching.is_correct(question.score, "5+7", question.target) is True
    assert answer_matching.is_correct(question.score, "5+8", question.target) is False


def test_a_fourth_device_is_chosen_by_the_name_of_its_entry_point(packages, monkeypatch):
    packages(
        "acme", {"acme_device": sources.DEVICE}, {plugins.DEVICES: {"acme": "acme_device:Acme"}}
    )
    monkeypatch.setenv("MINDSPEED_DEVICE", "acme")
    here = device.current()
    assert str(here.torch_device()) == "xpu:1"
    assert here.properties() == Properties("Acme 1", 50, 7)
    assert here.memory_stats() == MemoryStats(10, 20, 30, 40, 50)
    assert here.has("streams") and not here.has("fp8")
    assert device.install(Journal()) is here
    assert sys.modules["acme_device"].LOG == ["installed"]
    assert "noop-layers" in [f.name for f in registry.resolve({"noop_layers": [0]}, "xpu").enabled]
    monkeypatch.setenv("MINDSPEED_DEVICE", "acne")
    with pytest.raises(ConfigError, match="'acne' is unknown; use one of cpu, cuda, npu, acme"):
        device.current()


def test_a_device_on_the_host_is_treated_as_the_cpu_whatever_its_name(packages, monkeypatch):
    source = (
        "from mindspeed.device.cpu import CpuDevice\nclass Near(CpuDevice):\n    name = 'xpu'\n"
    )
    packages("near", {"near_device": source}, {plugins.DEVICES: {"near": "near_device:Near"}})
    monkeypatch.setenv("MINDSPEED_DEVICE", "near")
    here, megatrons = device.current(), object()
    assert here.on_host and here.name == "xpu" and not device.Accelerator.on_host
    assert rng_tracker.fork(megatrons) is not megatrons  # operators draw from torch's generator
    assert repairs_for(here, "substitute") == repairs_for(device.named("cpu"), "substitute")
    with pytest.raises(ConfigError, match="history of device memory only"):
        registry.resolve({"record_memory_history": True}, "xpu")
    registry.resolve({"fp8": "hybrid", "fp8_recipe": "tensorwise"}, "xpu")  # emulated


BROKEN = {
    "a module that is not there": ("no_such_module:Gain", "", "ModuleNotFoundError"),
    "an attribute that is not there": ("acme:Gain", "", "AttributeError"),
    "code that raises": (
        "acme:Gain",
        "raise RuntimeError('no\\n licence')",
        "RuntimeError: no licence",
    ),
    "another type": ("acme:Gain", "Gain = 7", "it is a int, not a subclass of mindspeed.features"),
    "another name": (
        "acme:Gain",
        sources.FEATURE.format(seam="log"),
        "its object has the name 'acme-gain', not 'acme'",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_one_error_that_names_package_entry_point_and_cause(
    case, packages, capsys
):
    value, source, reason = BROKEN[case]
    packages("acme-mindspeed", {"acme": source}, {plugins.FEATURES: {"acme": value}})
    for _ in range(2):  # the second time as the first
        with pytest.raises(ConfigError) as error:
            registry.all_features()
        assert f"cannot use acme-mindspeed 1.0 (acme = {value}): {reason}" in str(error.value)
        assert "pip uninstall acme-mindspeed" in str(error.value)
    assert main(["features"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_duplicate_names_are_refused_with_both_packages(packages):
    packages("acme", GAIN, {plugins.FEATURES: {"profiling": "acme_gain:Gain"}})
    with pytest.raises(
        ConfigError, match=r"'profiling' is declared twice, by mindspeed and by acme 1"
    ):
        registry.all_features()
    packages("other", GAIN, {plugins.FEATURES: {"profiling": "acme_gain:Gain"}})
    with pytest.raises(
        ConfigError, match=r"by acme 1\.0 \(.*\) and by other 1\.0 \(profiling = acme"
    ):
        registry.all_features()


@pytest.mark.parametrize(
    ("old", "new"), [("acme_gain", "profile_level"), ("--acme-ampl", "--swap")]
)
def test_duplicate_flags_are_refused_with_both_packages(old, new, packages):
    """By its name and by an alias."""
    source = GAIN["acme_gain"].replace(old, new)
    other = source.replace('name="acme-gain"', 'name="other"').replace("acme_gain:", "another:")
    packages("acme", {"acme_gain": source}, ONE_FEATURE)
    packages("rest", {"other": other}, {plugins.FEATURES: {"other": "other:Gain"}})
    with pytest.raises(ConfigError) as error:
        registry.all_features()
    first = "'profiling' (mindspeed)" if new == "profile_level" else "'acme-gain' (acme 1.0)"
    assert f"declared twice: by feature {first} and by feature '" in str(error.value)


def test_a_flag_of_megatron_is_not_shared_by_accident(packages):
    packages("acme", {"acme_gain": GAIN["acme_gain"].replace("acme_gain", "lr")}, ONE_FEATURE)
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float)
    with pytest.raises(ConfigError, match=r"--lr of feature 'acme-gain' \(acme 1.0\) is a flag of"):
        registry.add_arguments(parser)


def test_a_duplicate_model_type_or_preset_is_refused(packages):
    source = sources.FAMILY.format(kind="qwen2", more="")
    packages("acme", {"acme_family": source}, {plugins.FAMILIES: {"acme": "acme_family:FAMILY"}})
    with pytest.raises(
        ConfigError, match=r"'qwen2' is declared twice: by family 'qwen2' \(mindspeed"
    ):
        families.families()


def test_ranks_with_different_packages_raise_on_every_rank(ranks):
    messages = ranks(2, plugin_ranks.compare, ("acme (a = b:C)",), ("acme (a = b:C)", "other"))
    assert (
        messages
        == [
            "the ranks have different plug-ins: other is not installed on rank 0; install the same "
            "packages on all hosts"
        ]
        * 2
    )
    assert ranks(2, plugin_ranks.compare, ("acme",), ("acme",)) == ["", ""]


OTHER = GAIN["acme_gain"].replace("acme-gain", "acme-bias").replace("acme_gain", "acme_bias")
UNDECLARED = {
    "acme_bias": OTHER.replace("amplification", "shift").replace("seams.log", "seams.step")
}
USER = """
import sys
import mindspeed.megatron_adaptor
assert not any(name.startswith("acme") for name in sys.modules)
from mindspeed.training.arguments import parse
gain = parse(["--acme-gain", "3"]).acme_gain
import mindspeed
print([f.name for f in mindspeed.configure(acme_gain=gain).enabled if "acme" in f.name])
from mindspeed import session
print([owner for owner, _ in session.current().seams.parallel_groups.functions])
try:
    mindspeed.configure(acme_bias=2.0)
except AttributeError as error:
    print(error)
"""
MEGATRON_USER = """
import argparse
import mindspeed.megatron_adaptor
from megatron.training.arguments import add_megatron_arguments
parser = add_megatron_arguments(argparse.ArgumentParser())
print(parser.parse_args(["--acme-gain", "3"]).acme_gain)
"""


def run(code: str, *folders: object) -> list[str]:
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, "MINDSPEED_DEVICE": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_trainer_and_configure_take_the_flag_and_undeclared_seams_are_refused(packages, tmp_path):
    entries = {"acme-gain": "acme_gain:Gain", "acme-bias": "acme_bias:Gain"}
    packages("acme", {**GAIN, **UNDECLARED}, {plugins.FEATURES: entries})
    on, compared, refused = run(USER, tmp_path / "site-packages")
    assert on == "['acme-gain']"
    assert "plugins" in compared, "ranks compare their plug-ins when the groups exist"
    assert "feature 'acme-bias' uses the seam 'step', which its Feature.seams" in refused


def test_the_flag_reaches_the_parser_of_megatron_lm(packages, tmp_path, megatron_lm):
    packages("acme", GAIN, ONE_FEATURE)
    assert run(MEGATRON_USER, tmp_path / "site-packages", megatron_lm)[-1] == "3.0"


def test_an_entry_point_without_a_package_has_an_origin():
    assert plugins._package(EntryPoint("a", "b:c", "group")) == "an unnamed package"
