"""Other tools for the same job, asked the same questions: docs/comparison.md.

Each cell is the outcome of a run with SmolLM2-135M or its tokenizer, judged by json, jsonschema, re and plain torch, never
by a tool. Tools are used as their documentation says, with their defaults, and a fresh processor for each call. A tool that
is not installed is named and left out. Not compared: speed (see the other benchmarks) and what the tools do elsewhere.

    pip install outlines lm-format-enforcer
    python benchmarks/compare.py [--page docs/comparison.md] [--cells FILE]

It takes some minutes; with --cells, what has been answered is kept in a file and not asked again.
"""

import argparse
import contextlib
import io
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jsonschema
import torch
import transformers
from harness import machine
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessorList

import gd_plugin as gd
from gd_plugin.testing.real_model import smollm2_folder

Guide = tuple[str, Any]  # ("json", schema) or ("regex", pattern)


class NotOffered(Exception):
    """The tool has no call for it."""


@dataclass
class Kit:
    """The model everybody uses."""

    model: Any
    tokenizer: Any

    @classmethod
    def load(cls) -> "Kit":
        """Load SmolLM2."""
        folder = smollm2_folder()
        tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        return cls(AutoModelForCausalLM.from_pretrained(folder).eval(), tokenizer)

    @property
    def width(self) -> int:
        """Columns of the logits."""
        return int(self.model.config.vocab_size)

    def inputs(self, *prompts: str) -> Any:
        """Tokenize prompts, padded on the left."""
        return self.tokenizer(list(prompts), return_tensors="pt", padding=True)


class Tool:
    """One tool: a logits processor for a guide, or for one guide a row."""

    package = ""
    note = ""

    def __init__(self, kit: Kit) -> None:
        self.kit = kit

    def processor(self, guide: Guide) -> Any:
        """Return a fresh processor."""
        raise NotImplementedError

    def processors(self, guides: list[Guide | None]) -> Any:
        """Return a fresh processor with one guide a row."""
        raise NotOffered("one guide for all rows")

    def told(self, processor: Any, output: Any) -> str | None:
        """Return what the tool says about a row that went wrong, if it says anything."""
        return None

    def between_calls(self, processor: Any) -> None:
        """Do what the tool does by itself between two calls."""


class GdPlugin(Tool):
    """This package."""

    package = "gd_plugin"

    @staticmethod
    def guide(guide: Guide | None) -> gd.Guide | None:
        """Return a guide of ours."""
        if guide is None:
            return None
        return gd.Guide.json_schema(guide[1]) if guide[0] == "json" else gd.Guide.regex(guide[1])

    def processor(self, guide: Guide) -> Any:
        """See `Tool.processor`."""
        return gd.GuidedLogitsProcessor(self.guide(guide), tokenizer=self.kit.tokenizer, model=self.kit.model)

    def processors(self, guides: list[Guide | None]) -> Any:
        """See `Tool.processors`."""
        ours = [self.guide(guide) for guide in guides]
        return gd.GuidedLogitsProcessor(ours, tokenizer=self.kit.tokenizer, model=self.kit.model)

    def told(self, processor: Any, output: Any) -> str | None:
        """See `Tool.told`."""
        result = processor.results(output)[0]
        return type(result.error).__name__ if result.error else None


class XGrammar(Tool):
    """`xgrammar.contrib.hf.LogitsProcessor`."""

    package = "xgrammar"

    @cached_property
    def compiler(self) -> Any:
        """One compiler, as its documentation says."""
        import xgrammar

        return xgrammar.GrammarCompiler(
            xgrammar.TokenizerInfo.from_huggingface(self.kit.tokenizer, vocab_size=self.kit.width)
        )

    def compiled(self, guide: Guide) -> Any:
        """Compile a guide with defaults."""
        if guide[0] == "json":
            return self.compiler.compile_json_schema(json.dumps(guide[1]))
        return self.compiler.compile_regex(guide[1])

    def processor(self, guide: Guide) -> Any:
        """See `Tool.processor`."""
        from xgrammar.contrib.hf import LogitsProcessor

        return LogitsProcessor(self.compiled(guide))

    def processors(self, guides: list[Guide | None]) -> Any:
        """See `Tool.processors`."""
        from xgrammar.contrib.hf import LogitsProcessor

        if None in guides:
            raise NotOffered("every row has a grammar")
        return LogitsProcessor([self.compiled(guide) for guide in guides if guide is not None])


class Outlines(Tool):
    """The processors that `outlines.Generator` uses, with its default backends."""

    package = "outlines"

    @cached_property
    def wrapped(self) -> Any:
        """The model as outlines wants it."""
        import outlines

        return outlines.from_transformers(self.kit.model, self.kit.tokenizer)

    def processor(self, guide: Guide) -> Any:
        """See `Tool.processor`."""
        from outlines.backends import get_json_schema_logits_processor, get_regex_logits_processor

        if guide[0] == "json":
            return get_json_schema_logits_processor(None, self.wrapped, json.dumps(guide[1]))
        return get_regex_logits_processor(None, self.wrapped, guide[1])

    def between_calls(self, processor: Any) -> None:
        """See `Tool.between_calls`: its Generator does so."""
        processor.reset()


class FormatEnforcer(Tool):
    """`lmformatenforcer.integrations.transformers`."""

    package = "lm-format-enforcer"
    note = (
        "its `transformers` integration imports a class from where transformers 4 had it; here the class is put there"
    )

    @cached_property
    def data(self) -> Any:
        """The tokenizer, analysed once as its documentation says."""
        module = transformers.tokenization_utils  # type: ignore[attr-defined]
        if not hasattr(module, "PreTrainedTokenizerBase"):
            module.PreTrainedTokenizerBase = transformers.PreTrainedTokenizerBase
        from lmformatenforcer.integrations.transformers import build_token_enforcer_tokenizer_data

        return build_token_enforcer_tokenizer_data(self.kit.tokenizer)

    def function(self, guide: Guide) -> Any:
        """Return what `generate(prefix_allowed_tokens_fn=...)` takes."""
        data = self.data
        from lmformatenforcer import JsonSchemaParser, RegexParser
        from lmformatenforcer.integrations.transformers import build_transformers_prefix_allowed_tokens_fn

        parser = JsonSchemaParser(guide[1]) if guide[0] == "json" else RegexParser(guide[1])
        return build_transformers_prefix_allowed_tokens_fn(data, parser)

    def processor(self, guide: Guide) -> Any:
        """See `Tool.processor`."""
        return transformers.PrefixConstrainedLogitsProcessor(self.function(guide), 1)

    def processors(self, guides: list[Guide | None]) -> Any:
        """See `Tool.processors`."""
        # the function is told the row, so a function a row is a few lines of a user's own
        if None in guides:
            everything = list(range(self.kit.width))
        functions = [None if guide is None else self.function(guide) for guide in guides]

        def allowed(row: int, ids: torch.Tensor) -> list[int]:
            function = functions[row]
            return everything if function is None else function(row, ids)

        return transformers.PrefixConstrainedLogitsProcessor(allowed, 1)


TOOLS: dict[str, type[Tool]] = {
    "gd_plugin": GdPlugin,
    "xgrammar.contrib.hf": XGrammar,
    "outlines": Outlines,
    "lm-format-enforcer": FormatEnforcer,
}

# questions ----------------------------------------------------------------------------------------------------------

RECORD: Guide = (
    "json",
    {
        "type": "object",
        "properties": {"n": {"enum": [1, 22, 333]}, "ok": {"type": "boolean"}},
        "required": ["n", "ok"],
        "additionalProperties": False,
    },
)
YEAR: Guide = ("regex", "(19|20)[0-9]{2}")
SHORT, LONGER = "As JSON: ", "Give me one number and whether it is fine, as JSON, please: "
LIMIT = 40


def generate(tool: Tool, processor: Any, prompts: tuple[str, ...], **options: Any) -> tuple[list[str], Any]:
    """Return the texts of the rows, and the output."""
    inputs = tool.kit.inputs(*prompts)
    output = tool.kit.model.generate(
        **inputs,
        **{"max_new_tokens": LIMIT, "do_sample": False, "pad_token_id": tool.kit.tokenizer.eos_token_id} | options,
        logits_processor=LogitsProcessorList([processor] if processor is not None else []),
    )
    start = inputs["input_ids"].shape[1]
    return [tool.kit.tokenizer.decode(row[start:], skip_special_tokens=True) for row in output], output


def fits(text: str, guide: Guide) -> bool:
    """Judge a text."""
    if guide[0] == "regex":
        return re.fullmatch(guide[1], text) is not None
    try:
        jsonschema.validate(json.loads(text), guide[1], format_checker=jsonschema.FormatChecker())
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def verdict(texts: list[str], guides: list[Guide]) -> str:
    """Return "yes", or how many rows are valid."""
    valid = sum(fits(text, guide) for text, guide in zip(texts, guides, strict=True))
    return "yes" if valid == len(texts) else f"no: {valid} of {len(texts)} rows valid"


def greedy(tool: Tool) -> str:
    texts, _ = generate(tool, tool.processor(RECORD), (SHORT,))
    return verdict(texts, [RECORD])


def sampling(tool: Tool) -> str:
    torch.manual_seed(0)
    texts, _ = generate(tool, tool.processor(RECORD), (SHORT,), do_sample=True, num_return_sequences=4, temperature=1.5)
    return verdict(texts, [RECORD] * 4)


def left_padding(tool: Tool) -> str:
    texts, _ = generate(tool, tool.processor(RECORD), (SHORT, LONGER))
    return verdict(texts, [RECORD] * 2)


def guide_per_row(tool: Tool) -> str:
    texts, _ = generate(tool, tool.processors([RECORD, YEAR]), (SHORT, LONGER))
    return verdict(texts, [RECORD, YEAR])


def unguided_row(tool: Tool) -> str:
    texts, _ = generate(tool, tool.processors([RECORD, None]), (SHORT, LONGER), max_new_tokens=24)
    plain, _ = generate(tool, None, (SHORT, LONGER), max_new_tokens=24)
    return "yes" if texts[1] == plain[1] and fits(texts[0], RECORD) else "no: another text"


def beams(tool: Tool) -> str:
    texts, _ = generate(tool, tool.processor(RECORD), (SHORT,), num_beams=3, num_return_sequences=3)
    return verdict(texts, [RECORD] * 3)


def prompt_lookup(tool: Tool) -> str:
    texts, _ = generate(tool, tool.processor(RECORD), ('{"n":22,"ok":true} As JSON: ',), prompt_lookup_num_tokens=3)
    return verdict(texts, [RECORD])


def assisted(tool: Tool) -> str:
    texts, _ = generate(tool, tool.processor(RECORD), (SHORT,), assistant_model=tool.kit.model)
    return verdict(texts, [RECORD])


def second_call(tool: Tool) -> str:
    processor = tool.processor(RECORD)
    first, _ = generate(tool, processor, (SHORT,))
    tool.between_calls(processor)
    second, _ = generate(tool, processor, (LONGER,))
    return verdict([*first, *second], [RECORD] * 2)


def goes_on(tool: Tool) -> str:
    processor = tool.processor(RECORD)
    _, cut = generate(tool, processor, (SHORT,), max_new_tokens=4)
    prompt = tool.kit.inputs(SHORT)["input_ids"].shape[1]
    output = tool.kit.model.generate(
        cut,
        attention_mask=torch.ones_like(cut),
        max_new_tokens=LIMIT,
        do_sample=False,
        pad_token_id=2,
        logits_processor=LogitsProcessorList([processor]),
    )
    return verdict([tool.kit.tokenizer.decode(output[0, prompt:], skip_special_tokens=True)], [RECORD])


def conflict(tool: Tool) -> str:
    """min_new_tokens wants more than the guide has."""
    torch.manual_seed(0)
    try:
        texts, _ = generate(tool, tool.processor(YEAR), (SHORT,), do_sample=True, min_new_tokens=20, max_new_tokens=24)
    except Exception as error:
        return f"no: {type(error).__name__}"
    return "yes" if fits(texts[0], YEAR) else f"no: {texts[0][:12]!r}..."


def cannot_spell(tool: Tool) -> str:
    """A byte that the tokenizer has no token for is needed."""
    guide: Guide = ("regex", "a\x04b")
    try:
        processor = tool.processor(guide)
    except Exception as error:
        return f"yes, when it is built: {type(error).__name__}"
    try:
        texts, output = generate(tool, processor, (SHORT,), max_new_tokens=6)
    except Exception as error:
        return f"the call ends: {type(error).__name__}, {str(error)[:50] or 'without a message'}"
    told = tool.told(processor, output)
    return f"yes: {told}" if told else f"no: it returns {texts[0][:10]!r}"


WRONG = (
    {"type": "objekt"},
    {"type": "object", "properties": {"a": {"type": "strin"}}},
    {"type": "string", "pattern": "("},
    {"$ref": "#/$defs/missing"},
    {"type": "integer", "minimum": 9, "maximum": 3},
    {"type": "object", "properties": {"a": {"type": "string"}}, "required": "a"},
)


def wrong_schemas(tool: Tool) -> str:
    refused = 0
    for schema in WRONG:
        try:
            tool.processor(("json", schema))
        except NotOffered:
            raise
        except Exception:
            refused += 1
    return f"{'yes: ' if refused == len(WRONG) else 'no: '}{refused} of {len(WRONG)}"


def allows(tool: Tool, guide: Guide, text: str) -> bool:
    """Feed the text's tokens and the stop token; True if each was allowed."""
    processor, tokenizer = tool.processor(guide), tool.kit.tokenizer
    ids = [1, *tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    for position in range(1, len(ids)):
        scores = processor(torch.tensor([ids[:position]]), torch.zeros(1, tool.kit.width))
        if scores[0, ids[position]] == float("-inf"):
            return False
    return True


def closed(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


NUMBERS = {"type": "array", "items": {"type": "integer"}}
# schema, a text that satisfies it, one that does not
KEYWORDS: dict[str, tuple[Any, str, str]] = {
    "minimum": ({"type": "integer", "minimum": 5}, "7", "3"),
    "multipleOf": ({"type": "integer", "multipleOf": 5}, "10", "12"),
    "maxLength": ({"type": "string", "maxLength": 3}, '"abc"', '"abcd"'),
    "pattern": ({"type": "string", "pattern": "^[bc]+$"}, '"bcb"', '"bad"'),
    "pattern and maxLength": ({"type": "string", "pattern": "^[bc]+$", "maxLength": 3}, '"bcb"', '"bcbcb"'),
    "format": ({"type": "string", "format": "date"}, '"2024-05-17"', '"2024-19-17"'),
    "minItems": ({**NUMBERS, "minItems": 2}, "[1,2]", "[1]"),
    "maxItems": ({**NUMBERS, "maxItems": 2}, "[1,2]", "[1,2,3]"),
    "uniqueItems": ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}, "[1,2]", "[1,1]"),
    "contains": ({**NUMBERS, "contains": {"const": 5}}, "[5]", "[4]"),
    "enum": (closed(a={"enum": ["x", "y"]}), '{"a":"x"}', '{"a":"z"}'),
    "required": ({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, '{"a":1}', "{}"),
    "required, nothing else said": ({"type": "object", "required": ["sku"]}, '{"sku":1}', "{}"),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^n_": {"type": "integer"}}, "additionalProperties": False},
        '{"n_a":1}',
        '{"n_a":"x"}',
    ),
    "minProperties": ({"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1}, '{"a":1}', "{}"),
    "oneOf": ({"oneOf": [{"enum": [1, 2]}, {"enum": [2, 3]}]}, "3", "2"),
    "not": ({"type": "integer", "not": {"const": 5}}, "4", "5"),
    "if, then": (
        {**closed(a={"type": "boolean"}, b={"type": "integer"}),
         "if": {"properties": {"a": {"const": True}}}, "then": {"properties": {"b": {"const": 1}}}},
        '{"a":true,"b":1}',
        '{"a":true,"b":2}',
    ),
    "dependentRequired": (
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
         "additionalProperties": False, "dependentRequired": {"a": ["b"]}},
        '{"a":1,"b":1}',
        '{"a":1}',
    ),
}  # fmt: skip


def keywords(tool: Tool) -> str:
    kept, refused, ignored, narrowed = [], [], [], []
    for name, (schema, good, bad) in KEYWORDS.items():
        guide = ("json", schema)
        assert fits(good, guide) and not fits(bad, guide), name
        try:
            takes_good, takes_bad = allows(tool, guide, good), allows(tool, guide, bad)
        except Exception:
            refused.append(name)
            continue
        (ignored if takes_bad else kept if takes_good else narrowed).append(name)
    text = f"{len(kept)} enforced, {len(refused)} refused, {len(ignored)} ignored, {len(narrowed)} good text banned"
    tool.details = {"ignored": ignored, "good text banned": narrowed, "refused": refused}  # type: ignore[attr-defined]
    return text


DIALECT = (
    (r"\d", "٤"), (r"\d", "4"), (r"\w+", "été"), (r"\w+", "e1_"), (r".", "\n"), (r".", "a"), (r"(?i)yes", "YES"),
    (r"^on$|^off$", "off"), (r"(?P<y>\d)", "1"), (r"[^a]", "é"), (r"\s", "\u00a0"), (r"a{2,3}", "aaaa"),
    (r"(a|ab)(c|bcd)", "abcd"), (r"x*?y", "xxy"), (r"[\w-]+", "a-b"), (r"(?s).", "\n"),
)  # fmt: skip


def dialect(tool: Tool) -> str:
    agreed = refused = 0
    for pattern, text in DIALECT:
        try:
            agreed += allows(tool, ("regex", pattern), text) == (re.fullmatch(pattern, text) is not None)
        except Exception:
            refused += 1
    return f"{agreed} of {len(DIALECT)} agree, {refused} refused"


def lossless(tool: Tool) -> str:
    processor = tool.processor(YEAR)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        torch.manual_seed(0)
        scores = torch.randn(1, tool.kit.width).to(dtype)
        out = processor(torch.tensor([[1]]), scores.clone())
        legal = out > float("-inf")
        if not legal.any() or out.dtype != dtype or not torch.equal(out[legal], scores[legal]):
            return f"no: {dtype}"
        processor = tool.processor(YEAR)
    return "yes"


def wide_logits(tool: Tool) -> str:
    width = tool.kit.width + 79
    if isinstance(tool, GdPlugin):
        # as a user would: the model that generates is not given, so nothing is known of its width
        processor = gd.GuidedLogitsProcessor(tool.guide(YEAR), tokenizer=tool.kit.tokenizer)
    else:
        processor = tool.processor(YEAR)
    out = processor(torch.tensor([[1]]), torch.zeros(1, width))
    return "yes" if bool((out[0, tool.kit.width :] == float("-inf")).all()) and (out > float("-inf")).any() else "no"


def special_tokens(tool: Tool) -> str:
    tokenizer = tool.kit.tokenizer
    processor = tool.processor(("json", {"type": "string"}))
    ids = [1]
    for token in tokenizer('"a', add_special_tokens=False)["input_ids"]:
        processor(torch.tensor([ids]), torch.zeros(1, tool.kit.width))
        ids.append(token)
    scores = processor(torch.tensor([ids]), torch.zeros(1, tool.kit.width))
    allowed = [i for i in tokenizer.all_special_ids if scores[0, i] > float("-inf")]
    return "yes" if not allowed else f"no: {len(allowed)} of {len(set(tokenizer.all_special_ids))} allowed"


def whitespace_loop(tool: Tool) -> str:
    """A random model that likes blanks best, at each of at most 250 steps."""
    tokenizer = tool.kit.tokenizer
    texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
    blanks = [i for i, text in enumerate(texts) if text and not text.strip()]
    processor, ids, rng = tool.processor(RECORD), [1], torch.Generator().manual_seed(0)
    for _ in range(250):
        scores = torch.randn(1, tool.kit.width, generator=rng)
        scores[:, blanks] += 50
        ids.append(int(processor(torch.tensor([ids]), scores).argmax()))
        if ids[-1] == tokenizer.eos_token_id:
            break
    return verdict([tokenizer.decode(ids[1:], skip_special_tokens=True)], [RECORD])


QUESTIONS: dict[str, Callable[[Tool], str]] = {
    "greedy search: a valid record": greedy,
    "sampling, 4 rows: all valid": sampling,
    "batch, left padding: all valid": left_padding,
    "batch, one guide a row": guide_per_row,
    "batch, an unguided row: as without a processor": unguided_row,
    "beams, 3 returned: all valid": beams,
    "prompt lookup: valid": prompt_lookup,
    "assisted decoding: valid": assisted,
    "the same processor in a second call": second_call,
    "a call cut short goes on in the next": goes_on,
    "legal scores keep their bits (float32, bfloat16, float16)": lossless,
    "logits wider than the tokenizer: the rest is banned": wide_logits,
    "special tokens are banned inside a string": special_tokens,
    "a model that likes blanks best still finishes": whitespace_loop,
    "`min_new_tokens` against the guide: a valid text": conflict,
    "a text the tokenizer cannot spell: told": cannot_spell,
    "wrong schemas are refused when built": wrong_schemas,
    "19 keywords of JSON Schema": keywords,
    "16 patterns and texts, judged by `re.fullmatch`": dialect,
}


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Keep what tools print out of the table."""
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def ask(tool: Tool, question: Callable[[Tool], str]) -> str:
    """Return one cell."""
    try:
        with silence():
            return question(tool)
    except NotOffered as reason:
        return f"not offered: {reason}"
    except Exception as error:  # whatever a tool raises is its answer
        message = str(error).strip().splitlines()
        return f"no: {type(error).__name__}" + (f" ({message[0][:60]})" if message and message[0] else "")


def main() -> None:
    """Ask everybody everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, help="write the documentation's page here")
    parser.add_argument("--cells", type=Path, help="file that keeps answers; those in it are not asked again")
    arguments = parser.parse_args()
    assert len(KEYWORDS) == 19 and len(DIALECT) == 16

    kit = Kit.load()
    modules = {
        "gd_plugin": "gd_plugin",
        "xgrammar": "xgrammar",
        "outlines": "outlines",
        "lm-format-enforcer": "lmformatenforcer",
    }
    present = {name: tool for name, tool in TOOLS.items() if find_spec(modules[tool.package])}
    missing = [name for name in TOOLS if name not in present]
    tools = {name: tool(kit) for name, tool in present.items()}
    lines = ["| | " + " | ".join(f"{name} {version(tool.package)}" for name, tool in tools.items()) + " |"]
    lines.append("|---|" + "---|" * len(tools))
    known: dict[str, Any] = {}
    if arguments.cells and arguments.cells.exists():
        known = json.loads(arguments.cells.read_text())
    details = known.setdefault("details", {})
    for title, question in QUESTIONS.items():
        answers = known.setdefault(title, {})
        for name, tool in tools.items():
            if name not in answers:
                answers[name] = ask(tool, question).replace("|", "\\|")
                details[name] = details.get(name, {}) | getattr(tool, "details", {})
                if arguments.cells:
                    arguments.cells.write_text(json.dumps(known, indent=1))
        cells = [answers[name] for name in tools]
        lines.append(f"| {title} | {' | '.join(cells)} |")
        print(lines[-1], file=sys.stderr, flush=True)
    notes = [f"- {name} is not installed here and left out." for name in missing]
    notes += [f"- {name}: {tool.note}." for name, tool in tools.items() if tool.note]
    for name in tools:
        for kind, found in details[name].items():
            if found:
                notes.append(f"- {name}, keywords {kind}: {', '.join(found)}.")
    table = "\n".join(lines) + "\n\n" + "\n".join(notes) + "\n\n" + machine(["transformers", "torch"]) + "\n"
    print(table)
    if arguments.page:
        text = arguments.page.read_text()
        start, end = "<!-- table -->\n", "<!-- end -->\n"
        head, tail = text.partition(start)[0], text.partition(end)[2]
        arguments.page.write_text(f"{head}{start}\n{table}\n{end}{tail}")


if __name__ == "__main__":
    main()
