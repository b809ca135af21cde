"""Masks that push a model off its course: tokens that are provably wrongly banned or allowed, for us and for our peers.

    python benchmarks/mask_errors.py FILE [--backend auto ...] [--limit N] [--seconds 60] [--seed 0]

FILE is as in conformance.py. Every schema is walked, by every contender that takes it, along its valid instances and along
those that a contender's random walk has ended in, in several spellings (compact, `json.dumps`, indented) and
tokenisations (longest tokens, random ones); and along random legal tokens, which lead to an end after a while. A token is
wrongly banned if it is the next one of such an instance; wrongly allowed if it is a stop token behind a text that the
judge, `jsonschema`, refuses, or leads to a row without a legal token. Instances whose keys are out of declared order are
left out: those that "auto" takes under `property_order="any"` alone.
"peer: NAME" is the engine's own JSON Schema support, given the schema as it is, without our normal form.
Masks are timed in CPU time, contenders in turns; the last line compares them on the schemas that both take, along the same
tokens. The vocabulary is made of bytes and of frequent pieces of the instances. The walk stops after `--seconds`.
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
# tokens from which a random walk looks for an end
FREE_WALK = 60
CLOSERS = b'"}]0123456789ntf'
RANDOM_WALKS = 3
LONGEST_TEXT = 1500


def spellings(instance):
    return {
        json.dumps(instance),
        json.dumps(instance, separators=(",", ":"), ensure_ascii=False),
        json.dumps(instance, indent=2),
    }


def can_be_written(instance):
    """Whether programs write an instance again: no number past binary floats, no half of a surrogate pair."""
    try:
        json.dumps(instance, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return False
    return True


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


class LLGuidancePeer:
    """llguidance's own schema support, in the few calls that the walk needs."""

    def __init__(self, tokenizer, schema):
        import llguidance

        options = {"x-guidance": {"whitespace_flexible": True}}
        text = json.dumps({**schema, **options} if isinstance(schema, dict) else schema)
        # otherwise masks hold the tokenizer's own spelling of forced text alone
        grammar = f'%llguidance {{"no_forcing": true}}\nstart: %json {text}'
        self.engine = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
        if self.engine.is_error():
            raise gd.UnsupportedGuideError(self.engine.get_error())

    def reset(self):
        self.engine.reset()

    def accept_token(self, token):
        return bool(self.engine.try_consume_tokens([token]))

    def fill_next_token_bitmask(self, bitmask, index):
        self.engine.unsafe_compute_mask_ptr(bitmask[index].data_ptr(), bitmask.shape[1] * 4)


def xgrammar_peer(vocabulary):
    """xgrammar's own schema support, masks built when they are needed: built at once, some take minutes."""
    import xgrammar

    from gd_plugin.grammars.backends.xgrammar import _tokenizer_info

    compiler = xgrammar.GrammarCompiler(_tokenizer_info(vocabulary), max_threads=1, enable_dynamic_compilation=True)

    def create(schema):
        try:
            compiled = compiler.compile_json_schema(json.dumps(schema), strict_mode=False)
        except RuntimeError as error:
            raise gd.UnsupportedGuideError(str(error)) from error
        return xgrammar.GrammarMatcher(compiled)

    return create


def contender(name, vocabulary, order="declared"):
    """A function from a schema to a matcher."""
    if name == "peer: llguidance":
        from gd_plugin.grammars.backends.llguidance import _engine_tokenizer

        tokenizer = _engine_tokenizer(vocabulary)
        return lambda schema: LLGuidancePeer(tokenizer, schema)
    if name == "peer: xgrammar":
        return xgrammar_peer(vocabulary)
    config = gd.GuidedDecodingConfig(whitespace="any", additional_properties=True, property_order=order)
    factory = gd.GrammarMatcherFactory(vocabulary, backend=name, config=config)
    return lambda schema: factory.create(gd.Guide.json_schema(schema))


class Walker:
    """Walks one contender's matchers and counts."""

    def __init__(self, name, vocabulary, seed):
        self.name, self.vocabulary, self.rng = name, vocabulary, random.Random(seed)
        self.create = contender(name, vocabulary)
        self.row = gd.allocate_token_bitmask(1, vocabulary.vocab_size)
        self.words = self.row.numpy()[0]
        self.stop = vocabulary.stop_token_ids[0]
        self.taken = self.banned = self.allowed = self.tokens = 0
        self.times = []
        self.matcher = None

    def take(self, schema):
        """Compile a schema; whether it was taken."""
        try:
            self.matcher = self.create(schema)
        except gd.GuidedDecodingError:
            self.matcher = None
        self.taken += self.matcher is not None
        return self.matcher is not None

    def fill(self):
        start = time.process_time()
        self.matcher.fill_next_token_bitmask(self.row, 0)
        elapsed = time.process_time() - start
        self.times.append(elapsed)
        self.tokens += 1
        return elapsed

    def along(self, tokens):
        """Walk a valid text; the times of its masks. A ban ends it."""
        self.matcher.reset()
        times = []
        for token in [*tokens, self.stop]:
            times.append(self.fill())
            if not self.words[token // 32] >> (token % 32) & 1:
                self.banned += 1
                return times
            if token != self.stop and not self.matcher.accept_token(token):
                self.banned += 1
                return times
        return times

    def at_random(self, is_valid):
        """Walk legal tokens; the text that it ended in, if that is valid."""
        self.matcher.reset()
        text = b""
        for step in range(LONGEST_WALK):
            self.fill()
            legal = np.flatnonzero(legal_columns(self.row[0], self.vocabulary.vocab_size))
            if not len(legal):
                self.allowed += 1
                return None
            if self.stop in legal and (len(legal) == 1 or step % 3 == 0 or step > FREE_WALK):
                valid = is_valid(text)
                self.allowed += not valid
                return text if valid else None
            closing = [byte for byte in CLOSERS if byte in legal] if step > FREE_WALK else []
            single = legal[legal < 256]
            choices = single if len(single) and self.rng.random() < 0.5 else legal[legal != self.stop]
            token = closing[0] if closing and self.rng.random() < 0.7 else int(self.rng.choice(choices))
            if not self.matcher.accept_token(token):
                self.allowed += 1
                return None
            text += self.vocabulary.token_bytes(token)
        return None


def judge(schema):
    cls = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    validator = cls(schema, format_checker=cls.FORMAT_CHECKER)

    def is_valid(text):
        try:
            return validator.is_valid(json.loads(text))
        except ValueError:
            return False

    return is_valid


def admits(matcher, tokens):
    matcher.reset()
    return all(matcher.accept_token(token) for token in tokens) and matcher.is_accepting()


def out_of_order(schema, orders, text):
    """Whether only the policy on key order forbids a text."""
    try:
        declared, free = (create(schema) for create in orders)
    except gd.GuidedDecodingError:
        return False
    tokens = list(text.encode())
    return admits(free, tokens) and not admits(declared, tokens)


def walk_row(row, walkers, orders, ids, rng):
    """Walk one schema with every contender that takes it; contender -> times along the same tokens."""
    schema = row["schema"]
    takers = [walker for walker in walkers if walker.take(schema)]
    is_valid = judge(schema)
    instances = [test["data"] for test in row["tests"] if test["valid"]]
    for walker in takers:
        for _ in range(RANDOM_WALKS):
            text = walker.at_random(is_valid)
            if text and can_be_written(json.loads(text)):
                instances.append(json.loads(text))
    shared = {walker.name: [] for walker in takers}
    for instance in instances:
        texts = [text for text in spellings(instance) if len(text) < LONGEST_TEXT]
        if not texts or not is_valid(texts[0]) or out_of_order(schema, orders, texts[0]):
            continue
        for text in texts:
            for choose in ("longest", "random"):
                tokens = tokenise(text.encode(), ids, rng, choose)
                for walker in takers:
                    shared[walker.name].append(walker.along(tokens))
    return shared


def same_tokens(first, second):
    """The times of two contenders at the places that both reached."""
    pairs = [list(zip(a, b, strict=False)) for a, b in zip(first, second, strict=True)]
    return [[pair[side] for walk in pairs for pair in walk] for side in (0, 1)]


def percentile(times, share):
    times = sorted(times) or [0.0]
    return times[min(int(len(times) * share), len(times) - 1)] * 1e3


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--backend", action="append", help='a backend of ours, "auto", or "peer: NAME"')
    parser.add_argument("--limit", type=int, help="schemas to walk, drawn by the seed; all without it")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with open(options.file, encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    vocabulary, ids = make_vocabulary(rows)
    names = options.backend or ["auto", "peer: llguidance", "peer: xgrammar"]
    walkers = [Walker(name, vocabulary, options.seed) for name in names]
    orders = [contender("auto", vocabulary, order) for order in ("declared", "any")]
    rng = random.Random(options.seed)
    rng.shuffle(rows)
    end, done, both = time.perf_counter() + options.seconds, 0, {name: ([], []) for name in names[1:]}
    for row in rows[: options.limit]:
        if time.perf_counter() > end:
            break
        done += 1
        shared = walk_row(row, walkers, orders, ids, rng)
        for name, times in both.items():
            if names[0] in shared and name in shared:
                for kept, new in zip(times, same_tokens(shared[names[0]], shared[name]), strict=True):
                    kept.extend(new)
    print(f"{done} of {len(rows)} schemas")
    print("| masks | schemas taken | tokens | wrongly banned | wrongly allowed | mask p50 / p99 / max, CPU |")
    print("|---|---|---|---|---|---|")
    for walker in walkers:
        p50, p99, most = (percentile(walker.times, share) for share in (0.5, 0.99, 1))
        print(
            f"| {walker.name} | {walker.taken} | {walker.tokens} | {walker.banned} | {walker.allowed} "
            f"| {p50:.3f} / {p99:.2f} / {most:.1f} ms |"
        )
    for name, (ours, theirs) in both.items():
        if ours:
            ratios = " / ".join(f"{percentile(ours, s) / percentile(theirs, s):.2f}" for s in (0.5, 0.99))
            print(f"where both take it, the same {len(ours)} masks: {names[0]} / {name}, p50 / p99: {ratios}")
    return 1 if any(not w.name.startswith("peer") and w.banned + w.allowed for w in walkers) else 0


if __name__ == "__main__":
    sys.exit(main())
