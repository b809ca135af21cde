"""Masks that push a model off its course: tokens that are provably wrongly banned or allowed, for us and for our peers.

    python benchmarks/mask_errors.py FILE [--backend auto ...] [--seconds 60] [--seed 0]

FILE is as in conformance.py. Every schema that a contender accepts is walked along its valid instances, in several
spellings (compact, `json.dumps`, indented) and tokenisations (longest tokens, random ones), and along random legal
tokens. A token is wrongly banned if it is the next one of a valid instance whose keys stand in declared order; wrongly
allowed if it is a stop token behind a text that the judge, `jsonschema`, refuses, or leads to a row without a legal token.
"peer: NAME" is the engine's own JSON Schema support, without our normal form. The walk is a sample: `--seconds` a contender.
Masks are timed in CPU time. The vocabulary is made of bytes and of frequent pieces of the instances.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter

import jsonschema
import numpy as np

import gd_plugin as gd
from gd_plugin.masks.bitmask import legal_columns

PIECES = 4000
LONGEST_WALK = 200
LONGEST_TEXT = 1500


def spellings(instance):
    return {
        json.dumps(instance),
        json.dumps(instance, separators=(",", ":"), ensure_ascii=False),
        json.dumps(instance, indent=2),
    }


def in_declared_order(schema, instance):
    """Whether the keys stand in the order of `properties`, as far as that can be read without references."""
    if isinstance(instance, list):
        items = schema.get("items") if isinstance(schema, dict) else None
        return all(in_declared_order(items, item) for item in instance)
    if not isinstance(instance, dict) or not isinstance(schema, dict):
        return True
    properties = schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    found = [key for key in instance if key in properties]
    return found == [key for key in properties if key in instance] and all(
        in_declared_order(properties.get(key), value) for key, value in instance.items()
    )


def make_vocabulary(rows):
    """Single bytes, frequent pieces of the instances' texts, and a stop token."""
    pieces = Counter()
    for row in rows:
        for test in row["tests"]:
            text = json.dumps(test["data"])[:2000].encode()
            for length in (2, 3, 5, 8):
                pieces.update(text[start : start + length] for start in range(0, len(text) - length, 3))
    tokens = [bytes([value]) for value in range(256)] + [piece for piece, _ in pieces.most_common(PIECES)]
    return gd.Vocabulary.from_bytes([*tokens, None], stop_token_ids=[len(tokens)]), {t: i for i, t in enumerate(tokens)}


def tokenise(text, ids, rng, choose):
    found, start = [], 0
    while start < len(text):
        sizes = [size for size in (8, 5, 3, 2, 1) if text[start : start + size] in ids and start + size <= len(text)]
        size = sizes[0] if choose == "longest" else rng.choice(sizes)
        found.append(ids[text[start : start + size]])
        start += size
    return found


class PeerMatcher:
    """llguidance's own schema support, in the few calls that the walk needs."""

    def __init__(self, tokenizer, schema, vocabulary):
        import llguidance

        grammar = llguidance.LLMatcher.grammar_from_json_schema(
            json.dumps(schema), defaults={"whitespace_flexible": True}
        )
        self.engine = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
        if self.engine.is_error():
            raise gd.UnsupportedGuideError(self.engine.get_error())
        self.stop = vocabulary.stop_token_ids[0]

    def reset(self):
        self.engine.reset()

    def accept_token(self, token):
        return bool(self.engine.try_consume_tokens([token]))

    def fill_next_token_bitmask(self, bitmask, index):
        self.engine.unsafe_compute_mask_ptr(bitmask[index].data_ptr(), bitmask.shape[1] * 4)


def contender(name, vocabulary):
    """A function from a schema to a matcher."""
    if name == "peer: llguidance":
        from gd_plugin.grammars.backends.llguidance import _engine_tokenizer

        tokenizer = _engine_tokenizer(vocabulary)
        return lambda schema: PeerMatcher(tokenizer, schema, vocabulary)
    config = gd.GuidedDecodingConfig(whitespace="any", additional_properties=True)
    factory = gd.GrammarMatcherFactory(vocabulary, backend=name, config=config)
    return lambda schema: factory.create(gd.Guide.json_schema(schema))


class Walker:
    """Walks one contender's matchers and counts."""

    def __init__(self, vocabulary, rng):
        self.vocabulary, self.rng = vocabulary, rng
        self.row = gd.allocate_token_bitmask(1, vocabulary.vocab_size)
        self.stop = vocabulary.stop_token_ids[0]
        self.banned = self.allowed = self.tokens = 0
        self.times = []

    def legal(self, matcher):
        start = time.process_time()
        matcher.fill_next_token_bitmask(self.row, 0)
        self.times.append(time.process_time() - start)
        self.tokens += 1
        return legal_columns(self.row[0], self.vocabulary.vocab_size)

    def along(self, matcher, tokens):
        matcher.reset()
        for token in [*tokens, self.stop]:
            if not self.legal(matcher)[token]:
                self.banned += 1
                return
            if token != self.stop and not matcher.accept_token(token):
                self.banned += 1
                return

    def at_random(self, matcher, is_valid):
        matcher.reset()
        text = b""
        for step in range(LONGEST_WALK):
            legal = np.flatnonzero(self.legal(matcher))
            if not len(legal):
                self.allowed += 1
                return
            if self.stop in legal and (len(legal) == 1 or step % 3 == 0):
                self.allowed += not is_valid(text)
                return
            single = legal[legal < 256]
            choices = single if len(single) and self.rng.random() < 0.5 else legal[legal != self.stop]
            token = int(choices[self.rng.randrange(len(choices))])
            if not matcher.accept_token(token):
                self.allowed += 1
                return
            text += self.vocabulary.token_bytes(token)


def judge(schema):
    cls = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    validator = cls(schema, format_checker=cls.FORMAT_CHECKER)

    def is_valid(text):
        try:
            return validator.is_valid(json.loads(text))
        except ValueError:
            return False

    return is_valid


def measure(name, rows, vocabulary, ids, seconds, seed):
    rng = random.Random(seed)
    create, walker, taken = contender(name, vocabulary), Walker(vocabulary, rng), 0
    order = list(rows)
    rng.shuffle(order)
    end = time.perf_counter() + seconds
    for row in order:
        if time.perf_counter() > end:
            break
        try:
            matcher = create(row["schema"])
        except gd.GuidedDecodingError:
            continue
        taken += 1
        for test in row["tests"]:
            if test["valid"] and in_declared_order(row["schema"], test["data"]):
                for text in spellings(test["data"]):
                    # long texts repeat what short ones show
                    for choose in ("longest", "random") if len(text) < LONGEST_TEXT else ():
                        walker.along(matcher, tokenise(text.encode(), ids, rng, choose))
        for _ in range(3):
            walker.at_random(matcher, judge(row["schema"]))
    return taken, walker


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--backend", action="append", help='a backend of ours, "auto", or "peer: llguidance"')
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with open(options.file, encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    vocabulary, ids = make_vocabulary(rows)
    print("| masks | schemas walked | tokens | wrongly banned | wrongly allowed | mask p50 / p99 / max, CPU |")
    print("|---|---|---|---|---|---|")
    ours = 0
    for name in options.backend or ["auto", "peer: llguidance"]:
        taken, walker = measure(name, rows, vocabulary, ids, options.seconds, options.seed)
        times = sorted(walker.times) or [0.0]
        p50, p99, most = (times[min(int(len(times) * share), len(times) - 1)] * 1e3 for share in (0.5, 0.99, 1))
        print(
            f"| {name} | {taken} | {walker.tokens} | {walker.banned} | {walker.allowed} "
            f"| {p50:.3f} / {p99:.2f} / {most:.1f} ms |",
            flush=True,
        )
        ours += 0 if name.startswith("peer") else walker.banned + walker.allowed
    return 1 if ours else 0


if __name__ == "__main__":
    sys.exit(main())
