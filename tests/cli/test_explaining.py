"""gd-plugin explain: what may come next, judged by trying every continuation."""

import json
import re
from collections.abc import Callable
from typing import Any

from tests.cli.conftest import Answer

Run = Callable[..., Answer]


def test_characters_that_may_follow(gd_plugin_command: Run) -> None:
    record = json.loads(gd_plugin_command("explain", "sum.ebnf", "--prefix", "1", "--json").out)
    assert record["expected"] == ["+", "end of text"]
    assert record["may_end"] is True
    record = json.loads(gd_plugin_command("explain", "age.json", "--prefix", '{"a', "--json").out)
    assert record["forced"].startswith("ge") or record["expected"]
    assert record["may_end"] is False


def test_tokens_that_may_follow(gd_plugin_command: Run, smollm2_tokenizer: Any) -> None:
    answer = gd_plugin_command(
        "explain", "word.regex", "--prefix", "ab", "--tokenizer", "smollm2", "--limit", "100000", "--json"
    )
    record = json.loads(answer.out)
    expected = {
        token_id
        for token_id in range(len(smollm2_tokenizer))
        if re.fullmatch("[a-z]{1,2}", smollm2_tokenizer.decode([token_id]))
    }
    shown = {token["id"] for token in record["tokens"] if not token["stops"]}
    assert shown == expected
    assert record["num_legal"] == len(expected) + 1, "and the stop token"
    assert record["tokens"][0]["stops"]


def test_the_list_is_cut_and_says_so(gd_plugin_command: Run, model_folder: str) -> None:
    answer = gd_plugin_command("explain", "word.regex", "--tokenizer", model_folder, "--limit", "3")
    assert answer.code == 0
    assert "more (--limit)" in answer.out


def test_an_illegal_prefix_is_shown_like_a_wrong_text(gd_plugin_command: Run) -> None:
    answer = gd_plugin_command("explain", "word.regex", "--prefix", "a1")
    assert answer.code == 1
    assert "^" in answer.out and "expected: a-z" in answer.out
