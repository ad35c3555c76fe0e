"""Flags, variables and settings of the features that overlap products with their collectives."""

from __future__ import annotations

import argparse
import contextlib
import json

import pytest

from mindspeed.errors import ConfigError
from mindspeed.features import registry
from mindspeed.features.tensor_parallel import coc
from mindspeed.features.tensor_parallel.coc import Coc
from mindspeed.tensor_parallel.strategy import coc_cfgs, read_settings

TP = {"tensor_model_parallel_size": 4, "seq_length": 96, "micro_batch_size": 1}
SP = TP | {"sequence_parallel": True}
COC, MC2 = {"use_ascend_coc": True}, {"use_ascend_mc2": True}


def enabled(values):
    return [f.name for f in registry.resolve(values, "cpu").enabled]


def test_variables_alone_switch_it_on_and_the_command_line_wins(monkeypatch):
    assert enabled(TP) == []
    for number, fused in (("1", "0"), ("", "")):
        monkeypatch.setenv("COC_PARALLEL_NUM", number)
        monkeypatch.setenv("USE_COC_FUSED_KERNEL", fused)
        assert enabled(TP) == []
    monkeypatch.setenv("COC_PARALLEL_NUM", "4")
    assert enabled(TP) == ["coc"]
    parser = registry.add_arguments(argparse.ArgumentParser())
    assert parser.parse_args([]).coc_parallel_num == 4
    given = parser.parse_args(["--coc-parallel-num", "2", "--coc-mode", "2"])
    assert (given.coc_parallel_num, given.coc_mode) == (2, 2)
    assert enabled(TP | {"coc_parallel_num": 1}) == []
    monkeypatch.setenv("USE_COC_FUSED_KERNEL", "1")
    assert parser.parse_args([]).use_ascend_coc is False
    assert enabled(TP) == ["coc"]


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("COC_PARALLEL_NUM", "3", "COC_PARALLEL_NUM='3': choose one of 1, 2, 4, 8"),
        ("COC_PARALLEL_NUM", "two", "COC_PARALLEL_NUM='two'"),
        ("COC_MODE", "3", "COC_MODE='3': choose one of -1, 0, 1, 2"),
        ("USE_COC_FUSED_KERNEL", "2", "USE_COC_FUSED_KERNEL='2': use 1 or 0"),
    ],
)
def test_wrong_variables(monkeypatch, variable, value, message):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=message):
        registry.resolve(TP, "cpu")


REFUSED = {
    "nothing chosen": (TP | COC, "--use-ascend-coc: has no effect .* choose 2, 4 or 8"),
    "one rank": (
        TP | {"coc_parallel_num": 2, "tensor_model_parallel_size": 1},
        "--tensor-model-parallel-size is 1",
    ),
    "rows": (
        TP | {"coc_parallel_num": 8, "seq_length": 100},
        r"--coc-parallel-num .*100 rows .* cannot be divided into 8 parts; possible: 1, 2, 4",
    ),
    "rows of a rank": (
        SP | {"coc_parallel_num": 4, "seq_length": 24},
        r"6 rows \(24 rows / 4 ranks .* possible: 1, 2",
    ),
    "rows with context parallelism": (
        SP | {"coc_parallel_num": 4, "context_parallel_size": 4},
        "6 rows",
    ),
    "mode 1": (TP | {"coc_parallel_num": 2, "coc_mode": 1}, "--coc-mode .*does not divide"),
    "mode 2": (TP | {"coc_mode": 2}, "--coc-mode .*nothing is divided"),
    "both": (
        SP | MC2 | {"coc_parallel_num": 2},
        r"^--use-ascend-mc2: cannot be combined with --coc-parallel-num; [^\n]*$",
    ),
    "coc and megatron's": (
        SP | {"coc_parallel_num": 2, "tp_comm_overlap": True},
        "--coc-parallel-num: cannot be combined with --tp-comm-overlap",
    ),
    "mc2 and megatron's": (
        SP | MC2 | {"tp_comm_overlap": True},
        "--use-ascend-mc2: cannot be combined with --tp-comm-overlap",
    ),
    "mc2 without sp": (
        TP | MC2 | {"sequence_parallel": False},
        "--use-ascend-mc2: .*add --sequence-parallel",
    ),
    "mc2 on one rank": (
        SP | MC2 | {"tensor_model_parallel_size": 1},
        "--use-ascend-mc2: --tensor-model-parallel-size is 1",
    ),
    "fp8": (TP | {"coc_parallel_num": 2, "fp8": "e4m3"}, "--fp8-format"),
    "tp-comm-overlap without sp": (
        TP | {"tp_comm_overlap": True, "sequence_parallel": False},
        "--tp-comm-overlap: .*add --sequence-parallel",
    ),
    "userbuffers": (
        SP | {"tp_comm_overlap": True, "tp_comm_overlap_cfg": "x.yaml"},
        "--tp-comm-overlap-cfg .*NVIDIA",
    ),
    "bulk": (
        SP | {"tp_comm_overlap": True, "tp_comm_bulk_wgrad": False},
        "--tp-comm-bulk-wgrad is always on",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    values, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        registry.resolve(values, "cpu")


def test_accepted():
    assert enabled(SP | MC2) == ["mc2"]
    assert enabled(SP | {"tp_comm_overlap": True}) == ["tp-comm-overlap"]
    assert enabled(TP | {"coc_mode": 1}) == ["coc"]
    assert enabled(TP | {"coc_mode": 0}) == []
    assert enabled(TP | COC | {"coc_fused_kernel": True, "coc_parallel_num": 8}) == ["coc"]
    # Lengths that vary are divided as far as they can be.
    varying = {"seq_length": 100, "variable_seq_lengths": True, "coc_parallel_num": 8}
    assert "coc" in enabled(TP | varying)


def test_the_originals_dictionary_is_read_and_a_file_wins(monkeypatch, tmp_path):
    from mindspeed.core.tensor_parallel.lcal_coc import user_config

    assert user_config.coc_cfgs is coc_cfgs
    monkeypatch.setitem(coc_cfgs, "recompute_all_gather", False)
    monkeypatch.setitem(coc_cfgs, "customized_coc", {"[96,  8, 4]": 8})
    read = Coc().settings()
    assert read.customized_coc == {(96, 8, 4): 8} and not read.recompute_all_gather
    file = tmp_path / "coc.json"
    file.write_text(json.dumps({"customized_coc": {"[96, 8, 4]": 1}}))
    read = Coc(coc_cfgs=str(file)).settings()
    assert read.customized_coc == {(96, 8, 4): 1} and not read.recompute_all_gather


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"colour": 1}, "'colour' is not one of matmul_soc_friendly"),
        ({"customized_coc": {"[1, 2]": 2}}, r"'\[1, 2\]' is no shape"),
        ({"customized_coc": {"[1, 2, x]": 2}}, "is no shape"),
        ({"customized_coc": {"[1, 2, -3]": 2}}, "is no shape"),
        ({"customized_coc": {"[1, 2, 3]": 3}}, "has 3 parts; choose one of 1, 2, 4, 8"),
        ({"customized_coc": {"[1, 2, 3]": True}}, "has True parts"),
        ({"customized_coc": {"[1,2,3]": 2, "[1, 2, 3]": 4}}, "given twice"),
        ({"customized_coc": [1]}, "maps shapes"),
        ({"recompute_all_gather": 0}, "True or False, not 0"),
        ({"k_min": 0}, "whole number"),
        ({"print_tensor_value_open": True}, "prints nothing"),
    ],
)
def test_wrong_settings(given, message):
    with pytest.raises(ConfigError, match=message):
        read_settings(given, "FILE")


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"[80, 8, 8]": 8}, r"customized_coc \[80, 8, 8\]: 8: .* possible: 1, 2, 4"),
    ],
)
def test_shapes_that_no_product_has_are_refused(monkeypatch, shapes, message):
    monkeypatch.setitem(coc_cfgs, "customized_coc", shapes)
    with pytest.raises(ConfigError, match=message):
        registry.resolve(SP | {"seq_length": 80, "coc_parallel_num": 2}, "cpu")


def test_one_file_of_shapes_serves_several_sequence_lengths(monkeypatch, capsys):
    monkeypatch.setitem(coc_cfgs, "customized_coc", {"[48, 8, 8]": 2, "[80, 8, 8]": 4})
    coc._say_once.cache_clear()
    for length in (48, 80, 80):
        registry.resolve(SP | {"seq_length": length, "coc_parallel_num": 2}, "cpu")
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(" (")[0] for line in said] == [
        f"CoC: 1 of 2 entries of customized_coc are not used: they are not of {rows} rows"
        for rows in (48, 80)
    ]


def test_variables_of_a_machine_do_not_stop_a_job_without_tensor_parallelism(monkeypatch, capsys):
    coc._say_once.cache_clear()
    monkeypatch.setenv("COC_PARALLEL_NUM", "4")
    one_rank = TP | {"tensor_model_parallel_size": 1}
    for _ in range(2):
        assert enabled(one_rank) == []
    said = "CoC: COC_PARALLEL_NUM: no effect, --tensor-model-parallel-size is 1\n"
    assert capsys.readouterr().out == said
    with pytest.raises(
        ConfigError, match=r"^--coc-parallel-num: --tensor-model-parallel-size is 1"
    ):
        registry.resolve(one_rank | {"coc_parallel_num": 2}, "cpu")  # the user wants it here
    parser = registry.add_arguments(argparse.ArgumentParser())
    for words, stops in ((["--coc-parallel-num", "4"], True), ([], False)):  # the same value
        values = one_rank | vars(parser.parse_args(words))
        with pytest.raises(ConfigError, match=r"^--coc-p") if stops else contextlib.nullcontext():
            assert "coc" not in enabled(values)
    with pytest.raises(ConfigError, match=r"combined with COC_PARALLEL_NUM; remove one$"):
        registry.resolve(SP | MC2, "cpu")


@pytest.mark.parametrize("number", ["flag", "variable"])
def test_mode_0_wins(monkeypatch, capsys, number):
    coc._say_once.cache_clear()
    monkeypatch.setenv("COC_MODE", "0")
    given = {"coc_parallel_num": 4} if number == "flag" else {}
    if number == "variable":
        monkeypatch.setenv("COC_PARALLEL_NUM", "4")
    for _ in range(2):
        assert enabled(TP | given) == []
    (line,) = capsys.readouterr().out.splitlines()
    assert "no effect, --coc-mode (COC_MODE) 0 leaves products as they are" in line


def test_kept_gathers_need_sequence_parallelism(monkeypatch):
    monkeypatch.setitem(coc_cfgs, "recompute_all_gather", False)
    with pytest.raises(ConfigError, match=r"recompute_all_gather: False: .*--sequence-parallel"):
        registry.resolve(TP | {"sequence_parallel": False, "coc_parallel_num": 2}, "cpu")
