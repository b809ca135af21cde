"""Guides that strangers may send: each ends in a result or in a typed refusal, on every backend, and in a bounded time.

Here all of them are sent to "auto", and those to a single backend that reach its engine and end in it in a way of their
own; GD_PLUGIN_FUZZ=long sends all to every backend.
"""

import os

import pytest

import gd_plugin as gd
from gd_plugin.grammars.backends.registry import backend_names

LONG = os.environ.get("GD_PLUGIN_FUZZ") == "long"
TIMEOUT_S = 2.0 if LONG else 0.7
# far over anything but a hang: the machine may be busy, and a worker's start counts here
HANG_S = 120.0


def chain(body, length=3000):
    """Rules that each refer to the next one; `{n}` is its number, `{i}` the rule's own."""
    rules = [f"r{i} ::= {body.format(i=i, n=i + 1)}" for i in range(length)]
    return lambda: gd.Guide.ebnf("\n".join(["root ::= r0", *rules, f'r{length} ::= "c"']))


def fields(count, schema):
    return {"type": "object", "properties": {f"key{i}": schema for i in range(count)}, "additionalProperties": False}


HOSTILE = {
    "nest of 20,000 arrays": lambda: gd.Guide.json_schema('{"items":' * 20_000 + "{}" + "}" * 20_000),
    "nest of 20,000 groups": lambda: gd.Guide.regex("(" * 20_000 + "a" + ")" * 20_000),
    "nest of 20,000 EBNF groups": lambda: gd.Guide.ebnf("root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "schema of 2 MB": lambda: gd.Guide.json_schema(fields(16_000, {"type": "string", "description": "x" * 90})),
    "maxLength 10**9": lambda: gd.Guide.json_schema({"type": "string", "maxLength": 10**9}),
    "minLength 10**9": lambda: gd.Guide.json_schema({"type": "string", "minLength": 10**9}),
    "maxItems 10**9": lambda: gd.Guide.json_schema({"items": {"type": "integer"}, "type": "array", "maxItems": 10**9}),
    "enum of 5,000": lambda: gd.Guide.json_schema({"enum": [f"value number {i}" for i in range(5000)]}),
    "choice of 5,000": lambda: gd.Guide.choice([f"value number {i}" for i in range(5000)]),
    "2,000 optional keys": lambda: gd.Guide.json_schema(fields(2000, {"type": "integer"})),
    "regex repeated 30,000 times": lambda: gd.Guide.regex(r"\w{30000}"),
    "text repeated 30,000 times": lambda: gd.Guide.regex(r"(ab|[^c]){30000}x"),
    "up to 800,000 times": lambda: gd.Guide.regex(r"[ab]{0,800000}x"),
    "repeat in a repeat": lambda: gd.Guide.regex("((a{1000}){1000})"),
    "repeat in a repeat, over a million": lambda: gd.Guide.regex("((a{1000}){1001})"),
    "repeats of repeats of repeats": lambda: gd.Guide.regex("(((a|b){0,30}){0,30}){0,30}"),
    "exponential automaton": lambda: gd.Guide.regex(r"(a|b)*a(a|b){2000}"),
    "20,000 optional characters": lambda: gd.Guide.regex("a?" * 20_000),
    "alternation of 5,000": lambda: gd.Guide.regex("|".join(f"{i}[a-z]+{i * 31}" for i in range(5000))),
    "EBNF alternation of 5,000": lambda: gd.Guide.ebnf("root ::= " + " | ".join(f'"{i}x" [a-z]+' for i in range(5000))),
    "3,000 chained rules": chain('"a" r{n} | "b"'),
    "3,000 chained rules back to the root": chain('"a" r{n} | "b" root'),
    "3,000 chained alternatives": chain('r{n} | "x{i}"'),
    "3,000 chained optional rules": chain("r{n}? [a-z]"),
    "30 doubled rules": chain("r{n} r{n}", 30),
    "ambiguous recursion": lambda: gd.Guide.ebnf('root ::= root root | root root root | "a" | ""'),
    "terminal repeated 30,000 times": lambda: gd.Guide.lark('start: A~30000\nA: "a" | "b"'),
    "a large regex in a tag": lambda: gd.Guide.structural_tag({"format": {"type": "regex", "pattern": r"\w{30000}"}}),
    "1,000 tools": lambda: gd.Guide.tools([{"type": "function", "function": {"name": f"f{i}"}} for i in range(1000)]),
}


# texts of which a reader that starts anew at every character would read each rest
UNCLOSED = {
    "a text of JSON that nothing ends": lambda size: gd.Guide.json_schema('{"a": "' + '\\"' * size),
    "the same, with half an escape": lambda size: gd.Guide.from_json('"' + '\\"' * size + "\\"),
    "sets that nothing closes": lambda size: gd.Guide.regex("()" * 101 + "[" * size),
    "comments that nothing closes": lambda size: gd.Guide.regex("()" * 101 + "(?#" * size),
    "triggers": lambda size: gd.Guide.structural_tag(
        {"format": {"type": "triggered_tags", "triggers": [f"<{i}>" for i in range(size)], "tags": []}}
    ),
}


@pytest.mark.timeout(HANG_S)
@pytest.mark.parametrize("name", UNCLOSED)
def test_no_text_is_read_again_and_again(name):
    # read once it takes milliseconds; read from every place to the end, hours
    with pytest.raises(gd.GuideError):
        UNCLOSED[name](60_000)


@pytest.fixture(scope="module")
def vocabulary():
    tokens = [bytes([value]) for value in range(256)] + [b"ab", b"aa", None]
    return gd.Vocabulary.from_bytes(tokens, stop_token_ids=[258])


ALONE = {
    "xgrammar": [
        "text repeated 30,000 times",
        "3,000 chained alternatives",
        "EBNF alternation of 5,000",
        "enum of 5,000",
    ],
    "llguidance": ["20,000 optional characters", "up to 800,000 times", "3,000 chained rules", "2,000 optional keys"],
    "outlines_core": ["exponential automaton", "regex repeated 30,000 times", "choice of 5,000", "30 doubled rules"],
}
CASES = [("auto", name) for name in HOSTILE]
CASES += [(backend, name) for backend in backend_names() for name in (HOSTILE if LONG else ALONE.get(backend, ()))]


@pytest.fixture(scope="module")
def factory(request, vocabulary):
    config = gd.GuidedDecodingConfig(compile_timeout_s=TIMEOUT_S)
    try:
        factory = gd.GrammarMatcherFactory(vocabulary, backend=request.param, config=config)
    except gd.BackendNotInstalledError as error:
        pytest.skip(str(error))
    yield factory
    factory._worker.close()


@pytest.mark.timeout(HANG_S)
@pytest.mark.parametrize(("factory", "name"), CASES, indirect=["factory"])
def test_ends_in_a_result_or_a_refusal(factory, name):
    try:
        matcher = factory.create(HOSTILE[name]())
    except (gd.GuideError, gd.CompileTimeoutError) as error:
        assert str(error)
        if isinstance(error, gd.CompileTimeoutError):
            assert error.seconds == TIMEOUT_S
        elif not isinstance(error, gd.UnsupportedGuideError):
            # nothing here is malformed or without a text
            assert isinstance(error, gd.GuideTooLargeError) and error.limit
        return
    row = gd.allocate_token_bitmask(1, 259)
    matcher.fill_next_token_bitmask(row, 0)
    assert gd.row_has_valid_token(row[0], 259)
