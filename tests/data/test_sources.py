"""Every file format gives the same records, in the same blocks each time."""

from __future__ import annotations

import csv
import gzip
import json

import pytest

from mindspeed.data import file_formats
from mindspeed.data.sources import find_files, hub_dataset
from mindspeed.errors import DataError
from mindspeed.parsing import decode_json

RECORDS = [{"text": f'first\nsecond {i}, "quoted" ä', "id": str(i)} for i in range(2500)]


def read(source) -> list:
    rows = [record for block in source.blocks() for record in block.records]
    return [json.loads(row) if isinstance(row, bytes) else row for row in rows]


def write(path, kind: str):
    if kind == "jsonl":
        path.write_text("".join(json.dumps(r) + "\n" for r in RECORDS), "utf-8")
    elif kind == "json":
        path.write_text("\ufeff" + json.dumps(RECORDS, indent=1, ensure_ascii=False), "utf-8")
    elif kind == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["text", "id"])
            writer.writeheader()
            writer.writerows(RECORDS)
    else:
        pyarrow = pytest.importorskip("pyarrow")
        table = pyarrow.Table.from_pylist(RECORDS)
        if kind == "parquet":
            import pyarrow.parquet

            pyarrow.parquet.write_table(table, path, row_group_size=700)
        else:
            with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
                writer.write_table(table)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "arrow"])
def test_formats_agree(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(file_formats, "BLOCK_BYTES", 5000)
    files = find_files([write(tmp_path / f"x.{kind}", kind)])
    assert read(files) == RECORDS
    blocks = list(files.blocks())
    assert len(blocks) > 2
    assert sum(block.size for block in blocks) == files.size
    assert blocks == list(files.blocks())
    assert [block.first for block in blocks[1:]] == [
        block.first + len(block.records) for block in blocks[:-1]
    ]


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv"])
@pytest.mark.parametrize("compression", ["gz", "zst"])
def test_compressed_formats_agree(tmp_path, kind, compression):
    content = write(tmp_path / f"x.{kind}", kind).read_bytes()
    if compression == "gz":
        packed = gzip.compress(content)
    else:
        packed = pytest.importorskip("zstandard").compress(content)
    path = tmp_path / f"y.{kind}.{compression}"
    path.write_bytes(packed)
    assert read(find_files([path])) == RECORDS
    path.write_bytes(packed[: len(packed) // 2])
    if compression == "gz":
        with pytest.raises(DataError, match=rf"y\.{kind}\.gz is damaged after line"):
            read(find_files([path]))


BOM = "\ufeff"
HUGE = "9" * 5000
ODD = {
    "bom.csv": f'{BOM}"text",id\r\nx,1\r\n',
    "bom.jsonl": f'{BOM}{{"text": "x", "id": "1"}}\r\n',
    "separator.jsonl": '{"text": "x", "id": "1\u2028\x85"}\n',
    "huge.jsonl": f'{{"text": "x", "id": {HUGE}}}\n',
    "huge.json": f'[{{"text": "x", "id": {HUGE}}}]',
    "long.jsonl": json.dumps({"text": "x", "id": "1" * (9 << 20)}) + "\n",
}


@pytest.mark.parametrize("name", ODD)
def test_marks_separators_and_numbers_of_other_tools_are_read(tmp_path, name):
    file = tmp_path / name
    file.write_bytes(ODD[name].encode())
    [block] = find_files([file]).blocks()
    [record] = [decode_json(row) if isinstance(row, bytes) else row for row in block.records]
    assert list(record) == ["text", "id"] and record["text"] == "x"
    expected = {"separator": "1\u2028\x85", "huge": HUGE, "long": "1" * (9 << 20)}
    assert record["id"] == expected.get(name.split(".")[0], "1")


@pytest.mark.parametrize(
    ("unit", "texts"),
    [
        ("line", ["a", "b", "", "c"]),
        ("blank", ["a\nb", "c"]),
        ("file", ["a\nb\n\nc\n"]),
    ],
)
def test_text_files_by_line_paragraph_or_whole(tmp_path, unit, texts):
    (tmp_path / "x.txt").write_text("a\nb\n\nc\n")
    assert read(find_files([tmp_path], unit)) == [{"text": text} for text in texts]


def test_a_folder_is_read_in_its_most_frequent_format(tmp_path):
    for name in ("b.jsonl", "a.json", "c.csv", "dataset_info.json", ".hidden.jsonl"):
        (tmp_path / name).write_text(json.dumps({"text": name}) + "\n")
    files = find_files([tmp_path])
    assert [path.name for path in files.paths] == ["a.json", "b.jsonl"]
    assert files.ignored == 1


@pytest.mark.parametrize("below", ["", "data"])
def test_of_a_folder_in_the_hubs_layout_the_training_files_are_read(tmp_path, below):
    folder = tmp_path / below
    folder.mkdir(exist_ok=True)
    names = ["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"]
    for name in (*names, "test-00000-of-00001.jsonl", "validation.jsonl", "retest.jsonl"):
        (folder / name).write_text('{"text": "x"}\n')
    found = find_files([tmp_path])
    assert [path.name for path in found.paths] == ["retest.jsonl", *names]
    assert found.ignored == 2
    for name in names:
        (folder / name).unlink()
    assert len(find_files([tmp_path]).paths) == 3  # nothing is named after training


def test_a_hugging_face_data_set_on_disk_is_read_in_its_own_order(tmp_path):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(RECORDS)
    data.save_to_disk(str(tmp_path / "plain"), num_shards=3)
    datasets.DatasetDict(train=data).save_to_disk(str(tmp_path / "split"))
    assert read(find_files([tmp_path / "plain"])) == RECORDS
    assert read(find_files([tmp_path / "split"])) == RECORDS


@pytest.mark.parametrize("streaming", [False, True])
def test_load_dataset_by_a_parameter_file(tmp_path, streaming):
    pytest.importorskip("datasets")
    write(tmp_path / "x.jsonl", "jsonl")
    params = tmp_path / "params.json"
    params.write_text(json.dumps({"path": "json", "data_files": str(tmp_path / "x.jsonl")}))
    params_source = hub_dataset(params, [tmp_path], streaming)
    assert read(params_source) == RECORDS


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{\n"streaming: True,\n"split": "train"\n}', r"p\.json .*line 2: .*: \"streaming: True,"),
        ("[]", "a JSON object with arguments of load_dataset"),
    ],
)
def test_a_wrong_parameter_file_shows_the_line(tmp_path, content, said):
    (tmp_path / "p.json").write_text(content)
    with pytest.raises(DataError, match=said):
        hub_dataset(tmp_path / "p.json", [tmp_path], False)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('[{"text": "a"},\n{"text" "b"}]', r"x\.json:2: invalid JSON"),
        ('[{"text": "a"},\n', r"x\.json:2: the array does not end"),
        ('[{"text": "a"},\n' + "[" * 100_000, r"x\.json:2: a record is nested too deep"),
        ('[{"text": "a"} {"text": "b"}]', r"x\.json:1: .* expected"),
    ],
)
def test_a_broken_array_is_named_with_its_line(tmp_path, content, said):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(DataError, match=said):
        read(find_files([tmp_path / "x.json"]))


def test_wrong_inputs_are_named(tmp_path):
    (tmp_path / "x.pdf").write_bytes(b"")
    for path, said in (
        (tmp_path / "none.jsonl", "no such file or directory"),
        (tmp_path / "x.pdf", "the name must end in .jsonl, "),
        (tmp_path, "has no file that ends in"),
    ):
        with pytest.raises(DataError, match=said):
            find_files([path])
    (tmp_path / "x.parquet").write_bytes(b"rubbish")
    pytest.importorskip("pyarrow")
    with pytest.raises(DataError, match="not a valid parquet file"):
        read(find_files([tmp_path / "x.parquet"]))
