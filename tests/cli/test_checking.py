"""gd-plugin check: verdicts judged by `re` and by jsonschema, and the place that is underlined."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest

from tests.cli.conftest import SCHEMA, Answer

Run = Callable[..., Answer]


@pytest.mark.parametrize("text", ["ab", "abcd", "a", "abcde", "aB", "", "ab\n"])
def test_a_regex_file_means_what_re_says(gd_plugin_command: Run, text: str) -> None:
    answer = gd_plugin_command("check", "word.regex", text)
    assert answer.code == (0 if re.fullmatch("[a-z]{2,4}", text) else 1)


@pytest.mark.parametrize("text", ['{"age": 3}', '{"age": 3.5}', '{"age": "3"}', "{}", '{"age": 3, "b": 1}'])
def test_a_schema_file_means_what_jsonschema_says(gd_plugin_command: Run, text: str) -> None:
    # properties that a schema does not name are left out by default
    schema = {**json.loads(SCHEMA), "additionalProperties": False}
    valid = jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
    assert gd_plugin_command("check", "age.json", text).code == (0 if valid else 1)


@pytest.mark.parametrize("guide", ["sum.ebnf", "sum.gbnf", "sum.lark"])
def test_grammar_files(gd_plugin_command: Run, guide: str) -> None:
    assert gd_plugin_command("check", guide, "1+2+3").code == 0
    assert gd_plugin_command("check", guide, "1+").code == 1


def test_the_shape_that_to_json_writes(gd_plugin_command: Run) -> None:
    assert gd_plugin_command("check", "choice.json", "yes").code == 0
    assert gd_plugin_command("check", "choice.json", "maybe").code == 1


def test_types_are_imported_from_the_current_folder(gd_plugin_command: Run, files: Path) -> None:
    (files / "my_types.py").write_text(
        "from dataclasses import dataclass\nfrom typing import TypedDict\nimport gd_plugin as gd\n"
        "from pydantic import BaseModel\n"
        "class Model(BaseModel):\n    n: int\n    class Inner(BaseModel):\n        m: bool\n"
        "@dataclass\nclass Plain:\n    n: int\n"
        "class Typed(TypedDict):\n    n: int\n"
        "ready = gd.Guide.regex('[0-9]+')\n"
    )
    for name in ("Model", "Plain", "Typed"):
        assert gd_plugin_command("check", f"my_types:{name}", '{"n": 1}').code == 0
        assert gd_plugin_command("check", f"my_types:{name}", '{"n": true}').code == 1
    assert gd_plugin_command("check", "my_types:Model.Inner", '{"m": true}').code == 0
    assert gd_plugin_command("check", "my_types:ready", "12").code == 0


def test_texts_files_and_several_at_once(gd_plugin_command: Run) -> None:
    answer = gd_plugin_command("check", "age.json", "good.txt", '{"age": 1}', "bad.txt")
    assert answer.code == 1
    lines = answer.out.splitlines()
    assert lines[:2] == ["good.txt: matches", "text 2: matches"]
    assert lines[2].startswith("bad.txt:2:10: ")


def test_the_bad_position_is_underlined(gd_plugin_command: Run) -> None:
    lines = gd_plugin_command("check", "age.json", "bad.txt").out.splitlines()
    assert lines[1][lines[2].index("^")] == '"'
    assert "0-9" in lines[3] and "#/age" in lines[3]


def test_wide_and_hostile_characters_keep_the_mark_in_its_place(gd_plugin_command: Run, files: Path) -> None:
    (files / "text.regex").write_text(".{0,20}\n")
    text = "\x1b[31m\u202e日本\x07" + "y" * 40
    answer = gd_plugin_command("check", "text.regex", text)
    assert answer.code == 1
    assert "\x1b" not in answer.out and "\u202e" not in answer.out and "\x07" not in answer.out
    line, mark = answer.out.splitlines()[1:3]
    # 20 characters are legal: 5 of the colour, 4 others, so 11 letters come before; each wide one takes two cells
    before = r"\x1b[31m\u202e日本\x07" + "y" * 11
    assert line.startswith("  " + before)
    assert mark.index("^") == 2 + len(before) + 2


def test_a_text_that_breaks_off_is_marked_behind_its_end(gd_plugin_command: Run) -> None:
    answer = gd_plugin_command("check", "age.json", '{"age": ')
    assert "breaks off too early" in answer.out
    line, mark = answer.out.splitlines()[1:3]
    assert mark.index("^") == len(line)


def test_json_for_machines(gd_plugin_command: Run) -> None:
    answer = gd_plugin_command("check", "age.json", "good.txt", "bad.txt", "--json")
    record = json.loads(answer.out)
    assert answer.code == 1
    assert record["ok"] is False
    good, bad = record["texts"]
    assert good == {"name": "good.txt", "ok": True, "complete": True}
    assert (bad["position"], bad["line"], bad["column"], bad["pointer"]) == (11, 2, 10, "#/age")


def test_without_texts_the_guide_itself_is_checked(gd_plugin_command: Run, files: Path) -> None:
    assert gd_plugin_command("check", "age.json").code == 0
    (files / "never.json").write_text('{"type": "string", "minLength": 3, "maxLength": 1}')
    assert gd_plugin_command("check", "never.json").code in (1, 2)


def test_keep_newline(gd_plugin_command: Run, files: Path) -> None:
    (files / "word.txt").write_text("abc\n")
    assert gd_plugin_command("check", "word.regex", "word.txt").code == 0
    assert gd_plugin_command("check", "word.regex", "word.txt", "--keep-newline").code == 1


def test_the_tokenizer_can_be_asked_too(gd_plugin_command: Run, model_folder: str) -> None:
    answer = gd_plugin_command("check", "word.regex", "abc", "--tokenizer", model_folder)
    assert answer.code == 0


NOT_SOUND = [
    # guide, what the first line names, how many lines there may be
    ("false", "no value satisfies", 1),
    ('{"type": "integer", "minimum": 5, "maximum": 3}', "no value satisfies", 1),
    ('{"type": "strnig"}', "#/type", 1),
    ('{"type": "array", "uniqueItems": true, "items": {"type": "object"}}', "#/uniqueItems", 1),
]


@pytest.mark.parametrize(("guide", "words", "lines"), NOT_SOUND)
def test_an_unsound_guide_gets_the_reason_that_decides_alone(
    gd_plugin_command: Run, files: Path, guide: str, words: str, lines: int
) -> None:
    (files / "wrong.json").write_text(guide)
    answer = gd_plugin_command("check", "wrong.json")
    assert answer.code == 1
    assert words in answer.out.splitlines()[0] and len(answer.out.splitlines()) == lines
    told = json.loads(gd_plugin_command("check", "wrong.json", "--json").out)
    assert not told["ok"] and words in told["problems"][0] and len(told["problems"]) == lines
    assert "outlines" not in answer.out
