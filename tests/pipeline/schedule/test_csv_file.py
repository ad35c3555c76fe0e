"""Plans as csv files: round trips, and what a wrong file is told."""

import os

import pytest

from mindspeed.errors import ConfigError
from mindspeed.pipeline.schedule.csv_file import read_plan, write_plan
from mindspeed.pipeline.schedule.schedules import KINDS, ScheduleRequest, build_plan

REQUESTS = {kind: ScheduleRequest(kind=kind) for kind in KINDS} | {
    "swap": ScheduleRequest(kind="nanopipe", swap=True),
    "bubble": ScheduleRequest(kind="interleaved", recompute="bubble"),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_plan_comes_back_as_it_was(name, tmp_path):
    plan = build_plan(REQUESTS[name], 4, 2, 16)
    file = tmp_path / "plan.csv"
    write_plan(file, plan)
    read = read_plan(file, ranks=4, chunks=2, num_microbatches=16)
    assert (read.rows, read.placement, read.num_microbatches) == (plan.rows, plan.placement, 16)
    assert read.name == "plan.csv"
    again = build_plan(ScheduleRequest(plan=read), 4, 2, 16)
    assert again.rows == plan.rows


def test_a_file_with_a_byte_order_mark_is_read(tmp_path):
    plan = build_plan(ScheduleRequest(kind="1f1b"), 2, 1, 4)
    file = tmp_path / "plan.csv"
    write_plan(file, plan)
    file.write_text(file.read_text(), "utf-8-sig")
    assert read_plan(file).rows == plan.rows


def test_reductions_are_written_only_where_they_are_not_the_usual_ones(tmp_path):
    file = tmp_path / "plan.csv"
    write_plan(file, build_plan(ScheduleRequest(), 2, 1, 2))
    assert file.read_text() == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    (tmp_path / "late.csv").write_text("0F0,1F0,1B0,0B0,0G,1G\n")
    plan = read_plan(tmp_path / "late.csv")
    write_plan(file, plan)
    assert file.read_text() == "0F0,1F0,1B0,0B0,0G,1G\n"


def test_empty_cells_and_spaces_are_skipped(tmp_path):
    file = tmp_path / "plan.csv"
    file.write_text("0F0, 0F1 ,,0B0,0B1\r\n,1F0,1B0,1F1,1B1,,\r\n,,\r\n")
    assert read_plan(file).rows == build_plan(ScheduleRequest(), 2, 1, 2).rows


def test_overlapped_actions_of_torch_are_two(tmp_path):
    file = tmp_path / "plan.csv"
    file.write_text("0F0,1F0,(0F1;1B0)OVERLAP_F_B,0B0,1F1,1B1,0B1\n")
    assert " ".join(map(str, read_plan(file).rows[0])) == "0F0 1F0 0F1 1B0 0B0 1F1 1B1 1G 0B1 0G"


def test_writing_is_private_and_replaces_the_file_at_once(tmp_path):
    file = tmp_path / "new" / "plan.csv"
    write_plan(file, build_plan(ScheduleRequest(), 2, 1, 2))
    assert os.listdir(file.parent) == ["plan.csv"]
    assert file.stat().st_mode & 0o137 == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,,0X0\n", "line 1, column 3: '0X0' is no action; 2F0"),
        ("0F0,0B0\n\n1F0,1B\n", "line 3, column 2: '1B': B needs a micro-batch"),
        ("0F0,0B0,0G0\n", "line 1, column 3: '0G0': G has no micro-batch"),
        ("0F0,1SEND_F0\n", "column 2: '1SEND_F0' is communication of torch's"),
        ("(0F0;0Y0)OVERLAP_F_B\n", "line 1, column 1: '0Y0' is no action"),
        ("0F0,0B0\n0F1,0B1\n", "stage 0 is on rank 0 (line 1) and on rank 1 (line 2)"),
        ("0F0,0B0\n2F0,2B0\n", "stage 1 is on no rank, though there is a stage 2"),
        ("\n,,\n", "no action in the file"),
        ("0G\n", "no micro-batch in the file"),
    ],
)
def test_typos_are_reported_with_line_and_column(text, message, tmp_path):
    file = tmp_path / "plan.csv"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_plan(file)
    assert message in str(error.value)
    assert str(file) in str(error.value)


def test_a_file_for_another_job_says_which_size_differs(tmp_path):
    file = tmp_path / "plan.csv"
    write_plan(file, build_plan(ScheduleRequest(), 4, 2, 8))
    good = {"ranks": 4, "chunks": 2, "num_microbatches": 8}
    read_plan(file, **good)
    for wrong, message in (
        ({"ranks": 8}, "has 4 pipeline ranks (lines), the job 8"),
        ({"chunks": 1}, "has 2 stages on rank 0, the job 1"),
        ({"num_microbatches": 16}, "has 8 micro-batches, the job 16"),
    ):
        with pytest.raises(ConfigError) as error:
            read_plan(file, **(good | wrong))
        assert message in str(error.value)


def test_a_plan_for_another_job_is_refused_where_it_is_used():
    plan = build_plan(ScheduleRequest(), 4, 2, 8)
    request = ScheduleRequest(plan=plan)
    for sizes, message in (
        ((8, 2, 8), "is for 4 pipeline ranks, the job has 8"),
        ((4, 1, 8), "has 2 stages on rank 0, the job 1 model chunks"),
        ((4, 2, 16), "is for 8 micro-batches, the step has 16"),
    ):
        with pytest.raises(ConfigError) as error:
            build_plan(request, *sizes)
        assert message in str(error.value)
    assert build_plan(request, 4, 2, 16, forward_only=True).num_microbatches == 16


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="there is no such file"):
        read_plan(tmp_path / "nowhere.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe0F0")
    with pytest.raises(ConfigError, match="is no text in UTF-8"):
        read_plan(tmp_path / "binary.csv")
