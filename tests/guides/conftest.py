"""A byte vocabulary with a few longer tokens, and one question about every backend that is installed: is this text legal?

The texts are spelled in several ways, so that tokens cross the borders between the parts of a guide.
"""

import random

import pytest
import torch

import gd_plugin as gd
from gd_plugin.grammars.backends.registry import backend_names, create_backend

_LONGER = [
    b"ab",
    b"aa",
    b"ba",
    "é".encode(),
    "日本".encode(),
    b"a1",
    "😀x".encode(),
    b"\n\n",
    b"b\n",
    b"((",
    b"))",
    b"1+1",
    b'"a',
]


def installed_backends():
    names = []
    for name in backend_names():
        try:
            create_backend(name, gd.Vocabulary.from_bytes([b"a", None], stop_token_ids=[1]), gd.GuidedDecodingConfig())
        except gd.BackendNotInstalledError:
            continue
        names.append(name)
    return names


@pytest.fixture(scope="session")
def vocabulary():
    tokens = [bytes([value]) for value in range(256)] + _LONGER + [None]
    return gd.Vocabulary.from_bytes(tokens, stop_token_ids=[len(tokens) - 1])


@pytest.fixture(scope="session", params=installed_backends())
def backend(request, vocabulary):
    return create_backend(request.param, vocabulary, gd.GuidedDecodingConfig())


class Judge:
    """Asks one compiled guide about texts."""

    def __init__(self, compiled, vocabulary, seed=0):
        self.matcher = compiled.create_matcher()
        self.vocabulary = vocabulary
        self.random = random.Random(seed)

    def spell(self, text):
        data = text.encode() if isinstance(text, str) else text
        ids = []
        while data:
            fitting = [i for i, token in enumerate(self.vocabulary.tokens) if token and data.startswith(token)]
            ids.append(self.random.choice(fitting))
            data = data[len(self.vocabulary.tokens[ids[-1]]) :]
        return ids

    def accepts(self, text):
        self.matcher.reset()
        return all(self.matcher.accept_token(i) for i in self.spell(text)) and self.matcher.is_accepting()

    def mask_differs(self, text):
        """Return a prefix of `text` where the mask is not the accept set, or None."""
        self.matcher.reset()
        ids = self.spell(text)
        row = torch.full((1, (self.vocabulary.vocab_size + 31) // 32), -1, dtype=torch.int32)
        for count in range(len(ids) + 1):
            self.matcher.fill_next_token_bitmask(row, 0)
            for token_id in range(self.vocabulary.vocab_size):
                accepted = self.matcher.accept_token(token_id)
                if accepted:
                    self.matcher.rollback(1)
                if accepted != bool(row[0, token_id >> 5].item() >> (token_id & 31) & 1):
                    return self.vocabulary.decode(ids[:count]), self.vocabulary.token_bytes(token_id), accepted
            if count == len(ids) or not self.matcher.accept_token(ids[count]):
                return None
        return None


@pytest.fixture
def judge(backend, vocabulary):
    return lambda guide, seed=0: Judge(backend.compile(guide), vocabulary, seed)
