"""`gd-plugin explain`: what may come next behind a prefix.

In:  a guide, a prefix, a tokenizer or none.      Out: what may follow, as text and as tokens, and an exit code.
"""

from dataclasses import replace
from typing import Any

from rich.table import Table
from rich.text import Text

from gd_plugin.cli.checking import expected_text, print_verdict, verdict_record
from gd_plugin.cli.inputs import NamedText, load_tokenizer, read_text
from gd_plugin.cli.output import print_json, printable, stdout
from gd_plugin.grammars.compiler import GrammarMatcherFactory
from gd_plugin.grammars.matcher import GrammarMatcher
from gd_plugin.grammars.spelling import spell_text
from gd_plugin.grammars.validation import Verdict, byte_vocabulary, expected_next, validate
from gd_plugin.grammars.vocabulary import Vocabulary
from gd_plugin.guides.guide import Guide
from gd_plugin.masks.bitmask import allocate_token_bitmask, legal_columns

__all__ = ["explain_prefix"]


def explain_prefix(
    guide: Guide,
    guide_name: str,
    prefix_argument: str,
    tokenizer_name: str | None,
    *,
    limit: int,
    backend: str,
    as_json: bool,
) -> int:
    """Print what may follow the prefix and return the exit code.

    Raises:
        UserError: the prefix or the tokenizer cannot be read.
        GuideError: no backend can enforce the guide.
    """
    prefix = read_text("-", 1) if prefix_argument == "-" else NamedText("prefix", prefix_argument)
    verdict = validate(guide, prefix.text)
    if verdict.position is not None and verdict.position < len(prefix.text):
        if as_json:
            print_json({"guide": guide_name, "ok": False, **verdict_record(prefix, verdict)})
        else:
            print_verdict(prefix, verdict)
        return 1
    bytes_matcher = GrammarMatcherFactory(byte_vocabulary(), backend=backend).create(_unlimited(guide))
    for byte in prefix.text.encode():
        bytes_matcher.accept_token(byte)
    record: dict[str, Any] = {
        "guide": guide_name,
        "ok": True,
        "may_end": bytes_matcher.is_accepting(),
        "expected": list(expected_next(bytes_matcher)),
        "forced": bytes_matcher.forced_text().decode(errors="replace"),
        "pointer": verdict.pointer,
    }
    if tokenizer_name is not None:
        vocabulary = Vocabulary.from_tokenizer(load_tokenizer(tokenizer_name))
        record |= _tokens(guide, prefix.text, vocabulary, backend, limit)
    if as_json:
        print_json(record)
    else:
        _print_record(record, verdict)
    return 0


def _unlimited(guide: Guide) -> Guide:
    """Return the guide without its budget of reasoning tokens: bytes are no tokens."""
    return guide if guide.reasoning is None else replace(guide, reasoning=replace(guide.reasoning, max_tokens=None))


def _tokens(guide: Guide, prefix: str, vocabulary: Vocabulary, backend: str, limit: int) -> dict[str, Any]:
    """Return the tokens that may follow: how many there are, and the longest of them."""
    matcher = GrammarMatcherFactory(vocabulary, backend=backend).create(guide)
    ids = spell_text(vocabulary, prefix.encode())
    if ids is None or not _accepts(matcher, ids):
        return {"prefix_tokens": None, "num_legal": 0, "vocab_size": vocabulary.vocab_size, "tokens": []}
    bitmask = allocate_token_bitmask(1, vocabulary.vocab_size)
    matcher.fill_next_token_bitmask(bitmask, 0)
    legal: list[int] = legal_columns(bitmask[0], vocabulary.vocab_size).nonzero()[0].tolist()
    names = {token_id: name for name, token_id in vocabulary.special_token_names.items()}
    # tokens that end the text first, then long ones: they show most of what is ahead
    order = sorted(legal, key=lambda i: (i not in vocabulary.stop_token_set, -len(vocabulary.tokens[i]), i))
    shown = [
        {
            "id": token_id,
            "text": names.get(token_id) or vocabulary.tokens[token_id].decode(errors="backslashreplace"),
            "stops": token_id in vocabulary.stop_token_set,
        }
        for token_id in order[:limit]
    ]
    return {"prefix_tokens": ids, "num_legal": len(legal), "vocab_size": vocabulary.vocab_size, "tokens": shown}


def _accepts(matcher: GrammarMatcher, token_ids: list[int]) -> bool:
    return all(matcher.accept_token(token_id) for token_id in token_ids)


def _print_record(record: dict[str, Any], verdict: Verdict) -> None:
    console = stdout()
    where = f"  (in {printable(verdict.pointer)})" if verdict.pointer else ""
    console.print(f"next: {expected_text(record['expected']) or 'nothing'}{where}", markup=False)
    if record["forced"]:
        console.print(f"every continuation begins with: {printable(record['forced'])}", markup=False)
    console.print(f"may end here: {'yes' if record['may_end'] else 'no'}")
    if "tokens" not in record:
        console.print("(over single bytes; --tokenizer shows tokens)", style="dim")
        return
    if record["prefix_tokens"] is None:
        console.print("this tokenizer's tokens cannot spell the prefix", style="red")
        return
    console.print(f"legal tokens: {record['num_legal']} of {record['vocab_size']}")
    table = Table("id", "token", box=None, pad_edge=False)
    for token in record["tokens"]:
        table.add_row(
            str(token["id"]), Text(printable(token["text"]) + ("  (ends the text)" if token["stops"] else ""))
        )
    console.print(table)
    if record["num_legal"] > len(record["tokens"]):
        console.print(f"and {record['num_legal'] - len(record['tokens'])} more (--limit)", style="dim")
