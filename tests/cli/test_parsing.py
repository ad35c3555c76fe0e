"""YAML and JSON of users: exactly the written value, or one error with file and line."""

from __future__ import annotations

import json

import pytest

from mindspeed.errors import ConfigError, DataError
from mindspeed.parsing import decode_json, parse_json, parse_yaml, read_text
from tests.architecture.source import PACKAGE, sources

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefg", "bcdefgh", strict=True)
)
BAD_YAML = {
    "key twice": ("a: 1\nb: 2\na: 3", "line 3: a is given twice"),
    "key twice inside": ("m: {x: 1, x: 1}", "line 1: x is given twice"),
    "octal": ("a: 010", "line 1: 010 may be read as a number of octal"),
    "signed octal": ("a: [-0777]", "-0777 may be read as a number of octal"),
    "base 60": ("a: 1:30", "1:30 may be read as a number of base 60"),
    "base 60 float": ("a: 1:30.5", "1:30.5 may be read as a number of base 60"),
    "no YAML": ("a: [1", "is no valid YAML, line 1"),
    "tag": ("a: !!python/object/apply:os.system [ls]", "is no valid YAML, line 1"),
    "tab": ("a:\n\tb: 1", "is no valid YAML, line 2"),
    "null byte": ("a: \0", "is no valid YAML"),
    "deep": ("[" * 5000, "is nested too deep"),
    "bomb": (BOMB, "more than 200000 values"),
    "merged into itself": ("a: &a {<<: *a}", "is nested too deep"),
    "endless": ("a: &a [*a]", "is nested too deep"),
    "no date": ("a: 2024-13-45", "is no valid YAML"),
    "long number": ("a: " + "9" * 5000, "is no valid YAML"),
    "list as key": ("? [1, 2]\n: 3", "is no valid YAML"),
}
BAD_JSON = {
    "key twice": ('{"a": 1, "a": 2}', "'a' is given twice"),
    "no JSON": ("{\n'a': 1}", "is no valid JSON, line 2"),
    "deep": ("[" * 100_000, "is nested too deep"),
    "long number": ("9" * 5000, "is no valid JSON"),
    "half a character": (r'["\ud800"]', "half of a character"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", BAD_YAML)
def test_yaml_that_would_be_read_as_something_else_is_refused(case):
    text, said = BAD_YAML[case]
    with pytest.raises(ConfigError) as error:
        parse_yaml(text, "--config x.yaml")
    assert str(error.value).startswith("--config x.yaml ")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("case", BAD_JSON)
def test_json_that_would_be_read_as_something_else_is_refused(case):
    text, said = BAD_JSON[case]
    with pytest.raises(DataError) as error:
        parse_json(text, "x.json", DataError)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["[" * 100_000, b'{"a":' * 100_000])
def test_deep_nesting_is_damage_like_any_other(text):
    with pytest.raises(json.JSONDecodeError, match="it is nested too deep"):
        decode_json(text)


def test_files_are_decoded_through_this_module():
    """Elsewhere ``json.loads`` reads what another process of this library wrote just now."""
    own = {"parsing.py", "evaluation/sandbox.py", "evaluation/samples.py"}
    own |= {"data/jinja_renderer.py", "data/jinja_process.py", "training/fail_together.py"}
    found = {str(p.relative_to(PACKAGE)) for p in sources() if "json.load" in p.read_text()}
    assert found == own


def test_good_values_are_what_they_say():
    text = "{base: &b {x: 1, y: 0}, two: {<<: *b, x: 2}, z: 0o10, h: 0x10, s: '010', f: 0.5, n: -7}"
    assert parse_yaml(text, "") == {
        "base": {"x": 1, "y": 0},
        "two": {"x": 2, "y": 0},
        "z": "0o10",
        "h": 16,
        "s": "010",
        "f": 0.5,
        "n": -7,
    }
    assert parse_json(r'{"a": ["\ud83d\ude00", 1e3]}', "") == {"a": ["😀", 1000.0]}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{<<: [*tied, *other]}", {"tied": True, "size": 1}),
        ("{<<: [*other, *tied]}", {"tied": False, "size": 1}),
        ("{<<: [*other, *tied], tied: 3}", {"tied": 3, "size": 1}),
        ("{tied: 3, <<: *other}", {"tied": 3, "size": 1}),
        ("{<<: [{<<: [*tied, *other], size: 2}, *other]}", {"tied": True, "size": 2}),
        ("{<<: {a: 1}, =: 2}", {"a": 1, "=": 2}),
    ],
)
def test_of_what_is_merged_the_first_wins_with_every_release_of_pyyaml(text, expected):
    before = "tied: &tied {tied: true}\nother: &other {tied: false, size: 1}\n"
    found = parse_yaml(f"{before}found: {text}", "")
    assert found["found"] == expected
    assert (found["tied"], found["other"]) == ({"tied": True}, {"tied": False, "size": 1})


def test_only_mappings_are_merged():
    for text in ("{<<: 3}", "{<<: [{a: 1}, 3]}"):
        with pytest.raises(ConfigError, match="<< merges mappings, and this is a scalar"):
            parse_yaml(text, "")


def test_yaml_is_read_through_this_module():
    found = {
        str(path.relative_to(PACKAGE)) for path in sources() if "yaml.safe_load" in path.read_text()
    }
    assert found == set()


def test_files_that_cannot_be_read_say_why(tmp_path):
    (tmp_path / "binary").write_bytes(b"a: \xff")
    cases = {"nope": "no such file", "binary": r"no text in UTF-8 \(byte 3\)", "": "is no file"}
    for name, said in cases.items():
        with pytest.raises(ConfigError, match=f"^--config F.*{said}"):
            read_text(tmp_path / name, "--config F")
    with pytest.raises(ConfigError, match=r"^--config F: "):
        read_text("a\0b", "--config F")


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path):
    file = tmp_path / "x.json"
    file.write_text('{"a": 1}', "utf-8-sig")
    assert read_text(file, "x.json") == '{"a": 1}'


def test_integers_that_python_does_not_convert_stay_texts():
    digits = "9" * 5000
    assert decode_json(f'{{"n": {digits}, "m": 7}}') == {"n": digits, "m": 7}
