"""No circle of imports between modules, and the counts of tools/structure.py."""

from __future__ import annotations

import sys
from functools import cache

from tests.architecture.source import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import structure


@cache
def package() -> structure.Structure:
    return structure.structure(structure.on_disk())


def test_modules_have_no_import_circle() -> None:
    """Inside of rooms, too, imports in functions and for type checkers included."""
    assert package().circles == ()


def test_every_form_of_import_is_an_edge() -> None:
    sources = {
        "p/__init__.py": "",
        "p/a.py": "import p.b\nif TYPE_CHECKING:\n    from p import c\n",
        "p/b.py": "def f():\n    from p.c import name\n",
        "p/c.py": "importlib.import_module('p.d')\n",
        "p/d.py": "import_module(f'p.a.{x}')\nimport os\nfrom p import other\n",
    }
    counted = structure.structure(sources)
    assert counted.circles == ("p.a p.b p.c p.d",)
    assert counted.files == 5
    assert counted.single_importer == ("p.a <- p.d", "p.b <- p.a", "p.d <- p.c")


def test_long_functions_and_equal_class_names_are_listed() -> None:
    long = "def f():\n" + "    x = 1\n" * structure.LONG
    counted = structure.structure({"p/a.py": f"class K: ...\n{long}", "p/b.py": "class K: ...\n"})
    assert counted.long_functions == ("p/a.py:2 f, 51 lines",)
    assert counted.classes_twice == ("K, 2 times",)
    assert (counted.lines, counted.functions) == (53, 1)


def test_flags_are_counted_where_they_are_read_and_written() -> None:
    edge = next(iter(structure.EDGES))
    sources = {
        "p/a.py": "args.x = args.y\nother.x = settings.args.z\n",
        "p/cli/b.py": "print(args.x)\n",
        edge: "args.v = args.w\n",
    }
    counted = structure.structure(sources)
    assert counted.flag_writes == ("p/a.py:1 x",)
    assert counted.flag_reads == ("p/a.py:1 y", "p/a.py:2 z")
    assert sorted(counted.flags_at_edges) == [f"{edge}:1 v", f"{edge}:1 w"]


# Modules that have not been given values yet.
STILL = {
    "mindspeed/checkpoint/architecture.py",
    "mindspeed/checkpoint/load.py",
    "mindspeed/checkpoint/save.py",
    "mindspeed/checkpoint/state.py",
    "mindspeed/checkpoint/weights/convert.py",
    "mindspeed/checkpoint/weights/legacy.py",
    "mindspeed/checkpoint/weights/torch_dist.py",
    "mindspeed/guard/job.py",
    "mindspeed/inference/gpt_model.py",
    "mindspeed/inference/load.py",
    "mindspeed/lora/config.py",
    "mindspeed/lora/export.py",
    "mindspeed/lora/flags.py",
    "mindspeed/lora/load.py",
    "mindspeed/models/hf_load.py",
    "mindspeed/models/megatron_choice.py",
    "mindspeed/models/model_extras.py",
    "mindspeed/planner/cluster/rates.py",
    "mindspeed/planner/count/balanced_routing.py",
    "mindspeed/planner/count/check.py",
    "mindspeed/planner/count/fake_world.py",
    "mindspeed/planner/count/loop.py",
    "mindspeed/planner/expert_loads.py",
    "mindspeed/planner/explain/changes.py",
    "mindspeed/planner/feature_plans.py",
    "mindspeed/planner/interval.py",
    "mindspeed/planner/job.py",
    "mindspeed/planner/measured_products.py",
    "mindspeed/planner/megatron_experts.py",
    "mindspeed/planner/scripts.py",
    "mindspeed/planner/search/bounds.py",
    "mindspeed/planner/search/expert_programs.py",
    "mindspeed/planner/search/space.py",
    "mindspeed/planner/time/whole_ranks.py",
    "mindspeed/preference/losses.py",
    "mindspeed/training/data.py",
    "mindspeed/training/forward_step.py",
    "mindspeed/training/initialize.py",
    "mindspeed/training/log.py",
    "mindspeed/training/loop.py",
    "mindspeed/training/model.py",
    "mindspeed/training/pipeline_figures.py",
    "mindspeed/training/preference.py",
    "mindspeed/training/pretrain.py",
    "mindspeed/training/raw_data.py",
    "mindspeed/training/reference.py",
    "mindspeed/training/scripts.py",
    "mindspeed/training/setup.py",
    "mindspeed/training/sinks.py",
    "mindspeed/training/step.py",
    "mindspeed/training/token_counts.py",
    "mindspeed/type_check/equal_parts.py",
    "mindspeed/type_check/report.py",
    "mindspeed/type_check/stage.py",
}


def test_the_namespace_of_flags_is_read_and_written_at_edges_only() -> None:
    """Others take dataclasses: of mindspeed.job, of mindspeed.flags.read, or single values."""
    assert modules(package().flag_writes + package().flag_reads) == STILL
    assert modules(package().flags_at_edges) == set(structure.EDGES)


def modules(places: tuple[str, ...]) -> set[str]:
    return {place.partition(":")[0] for place in places}


def test_the_report_has_differences_and_names() -> None:
    sources = {"p/a.py": "class K: ...\n", "p/b.py": "class K: ...\n"}
    now, before = structure.structure(sources), structure.structure({"p/a.py": ""})
    text = "\n".join(structure.report(now, before, listed=True))
    assert "files                                                2        +1" in text
    assert "\n    K, 2 times" in text


def test_rooms_have_their_differences() -> None:
    now, before = {"p/a/b.py": "x\ny\n", "p/c.py": "x\n"}, {"p/a/b.py": "x\n", "p/d.py": ""}
    header, *rows = structure.report_rooms(now, before)
    assert header.split() == ["files", "lines"]
    assert [row.split() for row in rows] == [
        ["a", "1", "2", "+0", "+1"],
        ["c.py", "1", "1", "+1", "+1"],
        ["d.py", "0", "0", "-1", "+0"],
    ]
