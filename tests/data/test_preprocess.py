"""From jsonl to indexed data sets: content, determinism, atomicity, broken input."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.lazy import Lazy, needs

needs("megatron.core")


from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from mindspeed.cli.preprocess import print_report
from mindspeed.data import file_formats, templates
from mindspeed.data import preprocess as module
from mindspeed.data.preprocess import PreprocessOptions, Progress, preprocess
from mindspeed.data.tokenizer import build_tokenizer, save_tokenizer, train_bpe
from mindspeed.data.tokenizer_types import END_OF_TEXT, TokenizerOptions
from mindspeed.errors import ConfigError, DataError

IndexedDataset = Lazy("megatron.core.datasets.indexed_dataset", "IndexedDataset")


RECORDS = [
    {"text": f"document {i} " + "lorem ipsum " * (i % 7), "title": f"t{i}"} for i in range(200)
]


@pytest.fixture(scope="module")
def tokenizer_options(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_bpe([r["text"] for r in RECORDS], 300), directory)
    return TokenizerOptions(tokenizer_model=str(directory))


@pytest.fixture
def options(tmp_path, tokenizer_options):
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return PreprocessOptions((source,), tmp_path / "out" / "c", tokenizer_options)


def read(path) -> list[np.ndarray]:
    """Copies: what a data set returns lies in a map that ends with the data set."""
    dataset = IndexedDataset(str(path))
    return [ids.copy() for ids in dataset[:]]


def files(report) -> list[bytes]:
    return [o.with_name(o.name + e).read_bytes() for o in report.outputs for e in (".bin", ".idx")]


def test_megatron_reads_back_every_document_with_its_end_token(options, tokenizer_options):
    report = preprocess(dataclasses.replace(options, append_eod=True))
    tokenizer = build_tokenizer(tokenizer_options)
    dataset = IndexedDataset(str(report.outputs[0]))
    expected = [[*tokenizer.tokenize(record["text"]), tokenizer.eod] for record in RECORDS]
    assert [ids.tolist() for ids in dataset[:]] == expected
    assert dataset.document_indices.tolist() == list(range(len(RECORDS) + 1))
    assert dataset.index.dtype == np.uint16
    assert report.totals.tokens == sum(map(len, expected))
    assert report.totals.bytes_done == report.totals.bytes_total == options.inputs[0].stat().st_size


def test_a_tokenizer_that_adds_its_own_eos_gives_one(options, tokenizer_options, tmp_path):
    """``PretrainedFromHF`` keeps what the tokenizer adds; empty documents stay empty."""
    directory = tmp_path / "adds"
    shutil.copytree(tokenizer_options.tokenizer_model, directory)
    plain = build_tokenizer(tokenizer_options)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    special = [(END_OF_TEXT, plain.eod)]
    both = f"{END_OF_TEXT} $A {END_OF_TEXT}"
    tokenizer.post_processor = TemplateProcessing(single=both, special_tokens=special)
    tokenizer.save(str(directory / "tokenizer.json"))
    adds = TokenizerOptions("PretrainedFromHF", str(directory))
    options.inputs[0].write_text("".join(f'{{"text": "{t}"}}\n' for t in ("Hello", "", "Bye")))
    report = preprocess(dataclasses.replace(options, tokenizer=adds, append_eod=True))
    expected = [[plain.eod, *plain.tokenize(text), plain.eod] for text in ("Hello", "Bye")]
    assert [ids.tolist() for ids in read(report.outputs[0])] == expected
    assert report.totals.empty == 1


def test_gpt_dataset_cuts_the_documents_into_training_samples(options, tokenizer_options):
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import Split

    report = preprocess(dataclasses.replace(options, append_eod=True))
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=16,
        blend=([str(report.outputs[0])], None),
        split="1,0,0",
        tokenizer=build_tokenizer(tokenizer_options),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        mid_level_dataset_surplus=0.005,
    )
    low_level = IndexedDataset(str(report.outputs[0]))
    indices = np.arange(len(RECORDS), dtype=np.int32)
    dataset = GPTDataset(low_level, str(report.outputs[0]), indices, 50, Split.train, config)
    everything = np.concatenate([dataset[i]["tokens"].numpy() for i in range(len(dataset))])
    assert len(dataset) == (report.totals.tokens - 1) // 16
    assert set(everything.tolist()) <= set(np.concatenate(low_level[:]).tolist())
    sample = dataset[0]
    assert sample["tokens"][1:].tolist() == sample["labels"][:-1].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 5])
def test_output_is_byte_identical_for_any_number_of_workers(options, workers, monkeypatch):
    monkeypatch.setattr(file_formats, "BLOCK_BYTES", 700)  # many blocks
    alone = files(preprocess(options))
    several = dataclasses.replace(options, workers=workers, overwrite=True)
    assert files(preprocess(several)) == alone


def test_output_equals_the_builder_of_megatron_fed_document_by_document(options, tmp_path):
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    tokenizer = build_tokenizer(options.tokenizer)
    builder = IndexedDatasetBuilder(
        str(tmp_path / "x.bin"), dtype=DType.optimal_dtype(tokenizer.vocab_size)
    )
    for record in RECORDS:
        ids = tokenizer.tokenize(record["text"])
        builder.add_document(np.array(ids), [len(ids)])
    builder.finalize(str(tmp_path / "x.idx"))
    expected = [(tmp_path / name).read_bytes() for name in ("x.bin", "x.idx")]
    assert files(preprocess(options)) == expected


def test_output_equals_the_preprocessing_script_of_megatron_lm(options, megatron_lm, tmp_path):
    pytest.importorskip("six", reason="Megatron-LM imports six")
    program = "import mindspeed.megatron_adaptor, runpy, sys; sys.argv = sys.argv[1:]; "
    program += "runpy.run_path(sys.argv[0], run_name='__main__')"
    script = str(megatron_lm / "tools" / "preprocess_data.py")
    command = [sys.executable, "-c", program, script, "--append-eod"]
    command += ["--input", str(options.inputs[0]), "--output-prefix", str(tmp_path / "theirs")]
    command += ["--tokenizer-type", "HuggingFaceTokenizer", "--workers", "1"]
    command += ["--tokenizer-model", str(options.tokenizer.tokenizer_model)]
    path = os.pathsep.join([str(megatron_lm), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    theirs = [(tmp_path / f"theirs_text_document{e}").read_bytes() for e in (".bin", ".idx")]
    assert files(preprocess(dataclasses.replace(options, append_eod=True))) == theirs


def test_every_json_key_becomes_a_data_set(options):
    report = preprocess(dataclasses.replace(options, json_keys=("text", "title")))
    assert [o.name for o in report.outputs] == ["c_text_document", "c_title_document"]
    tokenizer = build_tokenizer(options.tokenizer)
    titles = IndexedDataset(str(report.outputs[1]))
    assert tokenizer.detokenize(titles[7]) == "t7"


def test_compressed_files_and_directories_give_the_same_tokens(options, tmp_path):
    folder = tmp_path / "parts"
    folder.mkdir()
    lines = options.inputs[0].read_bytes().splitlines(keepends=True)
    (folder / "a.jsonl").write_bytes(b"".join(lines[:50]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[50:])))
    (folder / "notes.md").write_text("ignored")
    together = files(preprocess(options))
    parts = dataclasses.replace(options, inputs=(folder,), output_prefix=tmp_path / "p")
    assert files(preprocess(parts)) == together


BROKEN = [
    ('{"text": "a', "invalid JSON"),
    ("[1]", "a JSON object is expected, found list"),
    ("[" * 100_000, "invalid JSON: it is nested too deep"),
    ('{"txt": "a"}', "no key 'text'; the line has 'txt'"),
    ('{"text": 3}', "'text' is int, a string is expected"),
    ('{"text": "\\ud800"}', "not valid Unicode"),
]


@pytest.mark.parametrize(("line", "reason"), BROKEN)
def test_broken_lines_are_counted_and_named_with_file_and_line(options, line, reason):
    source = options.inputs[0]
    source.write_text('{"text": "good"}\n\n' + line + '\n{"text": ""}\n{"text": "last"}')
    report = preprocess(options)
    assert (report.totals.documents, report.totals.broken, report.totals.empty) == (2, 1, 1)
    assert str(report.totals.first_broken[0]).startswith(f"{source}:3: ")
    assert reason in str(report.totals.first_broken[0])


def test_strict_stops_at_a_broken_line_and_leaves_nothing(options):
    options.inputs[0].write_text('{"text": "good"}\n{\n')
    with pytest.raises(DataError, match=r"in\.jsonl:2: .*--strict"):
        preprocess(dataclasses.replace(options, strict=True))
    assert list(options.output_prefix.parent.iterdir()) == []


def test_input_without_a_usable_document_is_refused(options):
    options.inputs[0].write_text('{"text": ""}\n{}\n')
    with pytest.raises(DataError, match=r"1 empty and 1 broken lines; the first is .*:2"):
        preprocess(options)


def test_a_truncated_gz_file_is_named(options, tmp_path):
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(gzip.compress(options.inputs[0].read_bytes())[:-20])
    with pytest.raises(DataError, match=r"cut\.jsonl\.gz is damaged"):
        preprocess(dataclasses.replace(options, inputs=(path,)))


def test_existing_output_is_only_replaced_when_asked(options):
    before = files(preprocess(options))
    options.inputs[0].write_text('{"text": "new"}\n')
    with pytest.raises(ConfigError, match="--overwrite"):
        preprocess(options)
    assert files(preprocess(dataclasses.replace(options, overwrite=True))) != before


def test_an_interrupted_run_leaves_the_old_output_and_can_be_started_again(options):
    before = files(preprocess(options))

    def interrupt(progress: Progress) -> None:
        raise KeyboardInterrupt

    again = dataclasses.replace(options, overwrite=True)
    with pytest.raises(KeyboardInterrupt):
        preprocess(again, interrupt)
    assert len(list(options.output_prefix.parent.iterdir())) == 2
    # what a killed process leaves behind is overwritten
    leftover = options.output_prefix.parent / ".c_text_document.bin.tmp"
    leftover.write_bytes(b"rubbish" * 1000)
    assert files(preprocess(again)) == before


def test_two_runs_cannot_write_the_same_output_at_once(options):
    def second(progress: Progress) -> None:
        preprocess(options)

    with pytest.raises(DataError, match="another process is writing"):
        preprocess(options, second)


def test_files_are_private_whatever_the_umask(options):
    before = os.umask(0)
    try:
        report = preprocess(options)
    finally:
        os.umask(before)
    for end in (".bin", ".idx"):
        path = report.outputs[0].with_name(report.outputs[0].name + end)
        assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_missing_input_and_wrong_options_are_refused_before_work_starts(options, tmp_path):
    for change, message in (
        ({"inputs": (tmp_path / "none.jsonl",)}, "there is no such file or directory"),
        ({"inputs": (tmp_path / "out",)}, "no file that ends in"),
        ({"workers": 0}, "--workers 0"),
        ({"json_keys": ("text", "text")}, "name every key once"),
        ({"json_keys": ("hf:/dev/null",)}, "which cannot contain '/'"),
        ({"json_keys": ("text", "a\0b")}, "cannot contain '.x00'"),
    ):
        (tmp_path / "out").mkdir(exist_ok=True)
        with pytest.raises((ConfigError, DataError), match=message):
            preprocess(dataclasses.replace(options, **change))


CONVERSATIONS = [
    {"instruction": f"Say {i}", "input": "twice " * (i % 3), "output": f"{i} {i}\n"}
    for i in range(300)
]


@pytest.fixture
def conversations(tmp_path, tokenizer_options):
    source = tmp_path / "chats.json"
    source.write_text(json.dumps(CONVERSATIONS))
    return PreprocessOptions(
        (source,), tmp_path / "out" / "t", tokenizer_options, handler="GeneralInstructionHandler"
    )


def test_conversations_become_three_aligned_data_sets(conversations):
    report = preprocess(conversations)
    names = ["t_packed_input_ids_document", "t_packed_attention_mask_document"]
    assert [o.name for o in report.outputs] == [*names, "t_packed_labels_document"]
    ids, mask, labels = map(read, report.outputs)
    assert len(ids) == report.totals.documents == len(CONVERSATIONS)
    tokenizer = build_tokenizer(conversations.tokenizer)
    for record, i, m, answer in zip(CONVERSATIONS, ids, mask, labels, strict=True):
        assert len(i) == len(m) == len(answer) and i.dtype == answer.dtype == np.int32
        assert m.all()
        trained = answer != -100
        assert (i[trained] == answer[trained]).all()
        assert tokenizer.detokenize(answer[trained]) == record["output"] + "\n"
        assert f"Say {record['instruction'][4:]}\n{record['input']}\n" in tokenizer.detokenize(i)
    assert report.totals.trained == sum(int((x != -100).sum()) for x in labels)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
def test_conversations_are_byte_identical_for_any_number_of_workers(
    conversations, workers, monkeypatch
):
    monkeypatch.setattr(file_formats, "BLOCK_RECORDS", 17)
    options = dataclasses.replace(conversations, append_eod=True, prompt_type="chatml")
    alone = files(preprocess(options))
    several = dataclasses.replace(options, workers=workers, overwrite=True)
    assert files(preprocess(several)) == alone


def test_a_conversation_that_ends_with_eos_gets_no_second_one(conversations):
    end = f"{{content}}{END_OF_TEXT}"
    file = conversations.inputs[0].with_name("eos.yaml")
    file.write_text(f"user: '{{content}}\\n'\nassistant: '{end}'\nspecial: ['{END_OF_TEXT}']\n")
    options = dataclasses.replace(conversations, prompt_type=str(file), append_eod=True)
    ids, _, labels = map(read, preprocess(options).outputs)
    eod = build_tokenizer(conversations.tokenizer).eod
    assert all(i.tolist().count(eod) == 1 and i[-1] == eod for i in (*ids, *labels))


@pytest.mark.parametrize("boundary", ["exact", "legacy"])
def test_only_the_last_answer_or_everything_can_be_trained(conversations, boundary):
    turns = [("user", "one"), ("assistant", "1"), ("user", "two"), ("assistant", "2")]
    record = {"messages": [{"role": role, "content": text} for role, text in turns]}
    source = conversations.inputs[0].with_name("m.jsonl")
    source.write_text(json.dumps(record))
    options = dataclasses.replace(
        conversations,
        inputs=(source,),
        handler="OpenAIInstructionHandler",
        prompt_type="alpaca",
        overwrite=True,
        label_boundary=boundary,
    )

    def trained(**change) -> str:
        report = preprocess(dataclasses.replace(options, **change))
        labels = read(report.outputs[2])[0]
        return build_tokenizer(options.tokenizer).detokenize(labels[labels != -100])

    assert trained(train_on="last") == "2\n"
    if boundary == "exact":
        assert trained() == "1\n2\n"
        assert trained(train_on_inputs=True).startswith("\nBelow is an instruction")


def test_long_conversations_lose_their_oldest_turns_first(conversations):
    turns = [[f"question {i}", f"answer {i}"] for i in range(9)]
    record = {"instruction": "last", "input": "", "output": "42", "history": turns}
    conversations.inputs[0].write_text(json.dumps([record, CONVERSATIONS[0]]))
    options = dataclasses.replace(conversations, handler="AlpacaStyleInstructionHandler")
    whole = preprocess(options)
    lengths = [len(ids) for ids in read(whole.outputs[0])]
    assert whole.totals.shortened == 0
    short = dataclasses.replace(options, seq_length=int(lengths[0]) - 30, overwrite=True)
    report = preprocess(short)
    assert report.totals.shortened == 1
    ids = read(report.outputs[0])[0]
    text = build_tokenizer(options.tokenizer).detokenize(ids)
    assert text.startswith("\nBelow is an instruction") and "question 0" not in text
    assert "question 8" in text and text.endswith("42\n")
    tiny = preprocess(dataclasses.replace(short, seq_length=8))
    ids, labels = (read(tiny.outputs[i])[0] for i in (0, 2))
    assert len(ids) == 9
    assert build_tokenizer(options.tokenizer).detokenize(labels[labels != -100]) == "42\n"


@pytest.mark.parametrize("prompt_type", templates.names())
@pytest.mark.parametrize("flags", [{}, {"train_on": "last"}, {"train_on_inputs": True}])
def test_an_answer_of_weight_0_is_not_trained(conversations, tmp_path, prompt_type, flags):
    """The mask is proven by decoding it."""
    turns = [("first", 1), ("wrong", 0), ("third", None), ("final", 0)]
    messages = []
    for text, weight in turns:
        messages.append({"role": "user", "content": "please"})
        messages.append({"role": "assistant", "content": text, "weight": weight})
    record = {"messages": messages, "id": 1}
    conversations.inputs[0].write_text(json.dumps(record) + "\n" + json.dumps(record))
    handler = "OpenAIInstructionHandler"
    options = dataclasses.replace(conversations, handler=handler, prompt_type=prompt_type, **flags)
    if "train_on" in flags:  # the last answer has weight 0
        with pytest.raises(DataError, match="2 samples without a label"):
            preprocess(options)
        return
    report = preprocess(options)
    ids, _, labels = map(read, report.outputs)
    tokenizer = build_tokenizer(options.tokenizer)
    text = tokenizer.detokenize(labels[0][labels[0] != -100])
    assert [text.count(said) for said, _ in turns] == [1, 0, 1, 0]
    assert tokenizer.detokenize(ids[0]).count("wrong") == 1
    assert text.count("please") == (4 if flags else 0)
    assert report.totals.remarks == {
        "answers have weight 0 and are not trained": 4,
        "records have a column 'id' that is not used": 2,
    }


def test_columns_and_truncation_are_reported_once_with_their_counts(conversations, capsys):
    records = [{**record, "chosen": "x"} for record in CONVERSATIONS[:1]]
    records += [{**record, "id": 1, "output": "word " * 40} for record in CONVERSATIONS[:3]]
    conversations.inputs[0].write_text("\n".join(map(json.dumps, records)))
    report = preprocess(dataclasses.replace(conversations, seq_length=16))
    totals = report.totals
    assert (totals.broken, totals.shortened, totals.documents) == (1, 3, 3)
    whole = preprocess(dataclasses.replace(conversations, overwrite=True)).totals
    assert totals.lost == whole.trained - totals.trained > 0
    print_report(report, Console(stderr=True))
    said = capsys.readouterr().err
    assert "the column 'chosen' is not read: a preference pair" in said
    assert "3 records have a column 'id' that is not used" in said
    assert f"3 samples were truncated to --seq-length, {totals.lost} tokens of answers" in said


def test_records_without_an_answer_are_counted_by_reason(conversations):
    records = [
        {"instruction": "a", "output": ""},
        {"instruction": "b"},
        {"instruction": "c", "output": "d"},
    ]
    conversations.inputs[0].write_text(json.dumps(records))
    totals = preprocess(conversations).totals
    # An empty answer is one: the model learns to end there.
    assert (totals.documents, totals.empty, totals.broken) == (2, 0, 1)
    assert str(totals.first_broken[0]).endswith(
        "chats.json: record 2: no column 'output' (response); the record has 'instruction'"
    )


def test_a_template_that_the_tokenizer_does_not_know_is_mentioned(conversations):
    report = preprocess(dataclasses.replace(conversations, prompt_type="chatml"))
    assert "the tokenizer has no token <|im_start|>, <|im_end|>" in report.notes[-1]


def test_lists_are_sentences_of_one_document(options):
    options.inputs[0].write_text('{"text": ["lorem", "", "ipsum"]}\n{"text": "document"}\n')
    report = preprocess(dataclasses.replace(options, append_eod=True))
    dataset = IndexedDataset(str(report.outputs[0]))
    assert dataset.document_indices.tolist() == [0, 2, 3]
    eod = build_tokenizer(options.tokenizer).eod
    assert [ids[-1] == eod for ids in dataset[:]] == [False, True, True]


@pytest.mark.parametrize("keep", [False, True])
def test_sentence_splitting_equals_a_list_of_sentences(options, tokenizer_options, keep):
    text, blank = "One lorem. Two ipsum!", "\n" if keep else ""
    options.inputs[0].write_text(json.dumps({"text": text.replace(". ", ".\n")}) + "\n")
    split = dataclasses.replace(options, split_sentences=True, keep_newlines=keep, append_eod=True)
    (output,) = preprocess(split).outputs
    assert output.name == "c_text_sentence"
    dataset, tokenizer = IndexedDataset(str(output)), build_tokenizer(tokenizer_options)
    expected = [tokenizer.tokenize(f"One lorem.{blank}"), tokenizer.tokenize("Two ipsum!")]
    expected[1].append(tokenizer.eod)
    assert [ids.tolist() for ids in dataset[:]] == expected
    assert dataset.document_indices.tolist() == [0, 2]


def test_more_data_sets_and_patterns_are_read_in_order(options, tmp_path, capsys):
    from mindspeed.cli.main import main

    lines = options.inputs[0].read_bytes().splitlines(keepends=True)
    for number in range(3):
        part = lines[50 * number : 50 * (number + 1)]
        (tmp_path / f"part-{number}.jsonl").write_bytes(b"".join(part))
    (tmp_path / "rest.jsonl").write_bytes(b"".join(lines[150:]))
    command = ["preprocess", "--input", str(tmp_path / "part-*.jsonl")]
    command += ["--datasets", str(tmp_path / "rest.jsonl"), "--output-prefix", str(tmp_path / "p")]
    command += ["--tokenizer-model", str(options.tokenizer.tokenizer_model), "--partitions", "2"]
    assert main([*command, "--keep-sequential-samples"]) == 0
    assert capsys.readouterr().err.count("--partitions 2 has no effect: all workers") == 1
    found = [(tmp_path / f"p_text_document{end}").read_bytes() for end in (".bin", ".idx")]
    assert found == files(preprocess(options))


def test_limit_stops_after_n_records(options):
    whole = read(preprocess(options).outputs[0])
    part = preprocess(dataclasses.replace(options, max_samples=7, overwrite=True))
    assert [x.tolist() for x in read(part.outputs[0])] == [x.tolist() for x in whole[:7]]


def killed_at(options: PreprocessOptions, step: int) -> bool:
    """Run in a child that kills itself at its ``step``-th write or rename; whether it did."""
    import multiprocessing

    from mindspeed.data import indexed_writer

    def child() -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        left = [step]

        def counted(function):
            def call(*args, **kwargs):
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)

            return call

        module.CHECKPOINT_SECONDS = 0.0
        indexed_writer.IndexedWriter.add = counted(indexed_writer.IndexedWriter.add)
        indexed_writer.IndexedWriter.checkpoint = counted(indexed_writer.IndexedWriter.checkpoint)
        indexed_writer.atomic_write_text = counted(indexed_writer.atomic_write_text)
        indexed_writer.os.replace = counted(os.replace)
        preprocess(options)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


@pytest.mark.slow
def test_a_killed_run_resumes_to_identical_output(conversations, monkeypatch):
    monkeypatch.setattr(file_formats, "BLOCK_RECORDS", 60)
    expected = files(preprocess(conversations))
    again = dataclasses.replace(
        conversations, output_prefix=conversations.output_prefix.with_name("r"), resume=True
    )
    blocks = []
    for step in range(60):
        if not killed_at(again, step):
            break
        # Progress even if always killed at the same step: the child counts from its own start.
        state = again.output_prefix.with_name(".r.preprocess.json")
        blocks.append(json.loads(state.read_text())["progress"]["blocks"] if state.exists() else 0)
        if step % 3 == 0:  # start from scratch, to be killed at the next step
            for leftover in again.output_prefix.parent.glob("*r_packed*"):
                leftover.unlink()
            state.unlink(missing_ok=True)
    else:
        pytest.fail("the run never completed")
    assert max(blocks) == 5
    outputs = [again.output(key) for key in again.keys]
    found = [o.with_name(o.name + e).read_bytes() for o in outputs for e in (".bin", ".idx")]
    assert found == expected
    assert list(again.output_prefix.parent.glob(".r*")) == []


def test_only_the_same_run_is_continued(options, monkeypatch):
    monkeypatch.setattr(file_formats, "BLOCK_BYTES", 700)
    assert killed_at(options, 10)
    with pytest.raises(DataError, match="had other options or input files"):
        preprocess(dataclasses.replace(options, append_eod=True, resume=True))
    expected = files(preprocess(options))  # without --resume: from the start
    assert killed_at(dataclasses.replace(options, overwrite=True), 10)
    continued = preprocess(dataclasses.replace(options, overwrite=True, resume=True, workers=2))
    assert files(continued) == expected


def test_the_command_and_the_old_script_write_the_same(conversations, tmp_path):
    from mindspeed.cli.main import main

    shared = ["--input", str(conversations.inputs[0]), "--tokenizer-type", "PretrainedFromHF"]
    shared += ["--tokenizer-name-or-path", str(conversations.tokenizer.tokenizer_model)]
    shared += ["--tokenizer-not-use-fast", "--handler-name", "GeneralInstructionHandler"]
    shared += ["--append-eod", "--dataset-impl", "mmap", "--seq-length", "512"]
    assert main(["preprocess", *shared, "--output-prefix", str(tmp_path / "a" / "x")]) == 0
    script = Path(__file__).parents[2] / "tools" / "preprocess_data.py"
    command = [sys.executable, str(script), *shared, "--output-prefix", str(tmp_path / "b" / "x")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "300 documents" in done.stderr and "MB/s" in done.stderr and "tokens/s" in done.stderr
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert len(names) == 6
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--handler-name", "Nobody"], "allowed are GeneralPretrainHandler, "),
        (["--map-keys", "{"], "--map-keys { is no valid JSON"),
        (["--prompt-type", "nobody"], "--prompt-type nobody is unknown; allowed are alpaca, "),
        (["--seq-length", "0"], "--seq-length 0 must be at least 1"),
        (["--split-sentences"], "a sample is a whole conversation"),
        (["--keep-newlines"], "--keep-newlines needs --split-sentences"),
    ],
)
def test_wrong_flags_give_one_error_message(conversations, flags, said, capsys):
    from mindspeed.cli.main import main

    command = ["preprocess", "--input", str(conversations.inputs[0]), "--output-prefix", "x"]
    command += ["--tokenizer-model", str(conversations.tokenizer.tokenizer_model)]
    command += ["--handler-name", "GeneralInstructionHandler", *flags]
    assert main(command) != 0
    assert said in " ".join(capsys.readouterr().err.split())
