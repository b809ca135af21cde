"""The judges themselves, on texts whose answer is plain."""

import json

import pytest

from tests.judges import CASES, is_json_prefix

DOCUMENTS = [
    '{"a":[1,-2.5e+3,true,false,null,"x\\n\\u00e9\\"y"],"b":{"c":"\\ud83d\\ude00"}}',
    "[ 1 , [ ] , { } ]",
    "-0.5",
    '"é😀"',
    "null",
]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_prefix_of_a_document_is_one(document: str) -> None:
    json.loads(document)
    for length in range(len(document) + 1):
        assert is_json_prefix(document[:length]), document[:length]


@pytest.mark.parametrize(
    "text",
    ["]", "[}", "{1", "01", "tru3", "[1,]", '{"a" "b"', '{"a":1,}', "1 2", '"\\x', '"a"b', " 1", "--", "nul0", "{}x"],
)
def test_other_text_is_no_prefix(text: str) -> None:
    assert not is_json_prefix(text)


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_garbage_is_neither_complete_nor_a_prefix(case: object) -> None:
    for text in ("<|im_end|>", "~", "yess", "]"):
        assert not case.is_complete(text)
        assert not case.is_prefix(text)
    assert case.is_prefix("")
