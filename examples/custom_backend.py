"""A backend of one's own: a grammar engine of forty lines behind the contract.

It enforces choices alone. An engine for the rest of the guides differs in its hooks, not in what stands around them.
"""

import random
from typing import Any

import gd_plugin as gd
from gd_plugin.testing import CONTRACT_CHECKS


class ChoiceMatcher(gd.EngineMatcher):
    """One request: the text so far, and the options that begin with it. `EngineMatcher` keeps the rest of the contract."""

    engine = "the choice engine"

    def __init__(self, vocabulary: gd.Vocabulary, options: frozenset[bytes]) -> None:
        super().__init__(vocabulary)
        self._options = options
        self._tokens: list[bytes] = []

    def _fits(self, text: bytes) -> bool:
        return any(option.startswith(text) for option in self._options)

    def _engine_accept(self, token_id: int) -> bool:
        token = self._vocabulary.token_bytes(token_id)
        if not self._fits(b"".join(self._tokens) + token):
            return False
        self._tokens.append(token)
        return True

    def _engine_rollback(self, num_tokens: int) -> None:
        del self._tokens[len(self._tokens) - num_tokens :]

    def _engine_fill(self, rows: Any, index: int, address: int) -> None:
        rows[index] = 0
        text = b"".join(self._tokens)
        for token_id in range(self._vocabulary.vocab_size):
            if token_id not in self._vocabulary.not_text and self._fits(text + self._vocabulary.token_bytes(token_id)):
                rows[index].view("uint32")[token_id // 32] |= 1 << (token_id % 32)

    def _engine_accepting(self) -> bool:
        return b"".join(self._tokens) in self._options

    def _engine_fork(self) -> "ChoiceMatcher":
        twin = ChoiceMatcher(self._vocabulary, self._options)
        twin._tokens = list(self._tokens)
        return twin

    def _engine_reset(self) -> None:
        self._tokens.clear()


class ChoiceGrammar(gd.CompiledGrammar):
    """A guide compiled for one vocabulary."""

    backend = "choices"

    def __init__(self, guide: gd.Guide, vocabulary: gd.Vocabulary) -> None:
        self.guide = guide
        self.nbytes = len(guide.guide)  # what the cache counts
        self._vocabulary = vocabulary

    def create_matcher(self) -> ChoiceMatcher:
        return ChoiceMatcher(self._vocabulary, frozenset(option.encode() for option in self.guide.options()))


class ChoiceBackend(gd.Backend):
    """The engine for one vocabulary."""

    name = "choices"

    def __init__(self, vocabulary: gd.Vocabulary, config: gd.GuidedDecodingConfig) -> None:
        self._vocabulary = vocabulary

    def problems(self, guide: gd.Guide) -> list[gd.Problem]:
        if guide.guide_type is gd.GuideType.CHOICE:
            return []
        return [gd.Problem("#", guide.guide_type.value, self.name, "only choices are enforced")]

    def compile(self, guide: gd.Guide) -> ChoiceGrammar:
        for problem in self.problems(guide):
            raise gd.UnsupportedGuideError(f"#: {problem.message}", reasons={self.name: problem.message})
        return ChoiceGrammar(guide, self._vocabulary)


def main() -> None:
    gd.register_backend("choices", ChoiceBackend)
    tokens = [bytes([byte]) for byte in range(256)] + [b"yes", b"no", None]
    vocabulary = gd.Vocabulary.from_bytes(tokens, stop_token_ids=[258])
    factory = gd.GrammarMatcherFactory(vocabulary, backend="choices")

    guide = gd.Guide.choice(["yes", "no", "now"])
    for check in CONTRACT_CHECKS:  # the published contract, as plain functions
        check(lambda: factory.create(guide), vocabulary, random.Random(0))
    print(f"{len(CONTRACT_CHECKS)} checks of the contract hold")

    matcher = factory.create(guide)
    bitmask = gd.allocate_token_bitmask(1, vocabulary.vocab_size)
    matcher.fill_next_token_bitmask(bitmask, 0)
    legal = [i for i in range(vocabulary.vocab_size) if bitmask[0, i // 32] >> (i % 32) & 1]
    print([vocabulary.token_bytes(i) for i in legal])
    try:
        factory.create(gd.Guide.regex("a+"))
    except gd.UnsupportedGuideError as error:
        print(error)


if __name__ == "__main__":
    main()
