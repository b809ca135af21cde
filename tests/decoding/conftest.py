"""A small vocabulary, real matchers over it, and a matcher that follows a table, for dead ends and faults."""

import shutil

import pytest
import torch

import gd_plugin as gd
from gd_plugin.decoding.hostfunc import load_driver
from gd_plugin.grammars.backends.registry import create_backend
from gd_plugin.testing import build_fake_driver

# the JSON characters and three letters, then the stop token; logits are padded to 64 columns
STRINGS = ["{", "}", "[", "]", '"', ":", ",", " ", "a", "b", "c", "1", "2", "true", "null", "</s>"]
STOP = 15
PADDED = 64


def ids(text: str) -> list[int]:
    """One id a character; `$` is the stop token."""
    return [STOP if character == "$" else STRINGS.index(character) for character in text]


class RealFactory:
    """Matchers of one backend over the small vocabulary."""

    def __init__(self, backend: str):
        self.vocabulary = gd.Vocabulary.from_bytes(
            [text.encode() for text in STRINGS[:-1]] + [None], stop_token_ids=[STOP]
        )
        self._backend = create_backend(backend, self.vocabulary, gd.GuidedDecodingConfig())
        self._compiled = {}

    def create(self, guide):
        if guide not in self._compiled:
            self._compiled[guide] = self._backend.compile(guide)
        return self._compiled[guide].create_matcher()


class TableMatcher(gd.GrammarMatcher):
    """Follows `table`: state -> {token: state}. A state missing from the table is a dead end; "$" is the end."""

    def __init__(self, table, fault=None):
        self.table, self.states, self.fault = table, ["start"], fault or (lambda call: None)

    def _moves(self):
        return self.table.get(self.states[-1], {})

    def accept_token(self, token_id):
        self.fault("accept")
        if self.is_terminated() or token_id not in self._moves():
            return False
        self.states.append(self._moves()[token_id])
        return True

    def rollback(self, num_tokens):
        self.fault("rollback")
        if not 0 <= num_tokens < len(self.states):
            raise gd.RollbackError(f"cannot roll back {num_tokens} tokens: {self.num_tokens} have been accepted")
        del self.states[len(self.states) - num_tokens :]

    def fill_next_token_bitmask(self, bitmask, index):
        self.fault("fill")
        bitmask[index] = 0
        for token_id in [STOP] if self.is_terminated() else self._moves():
            bitmask[index, token_id // 32] |= 1 << (token_id % 32)

    def is_terminated(self):
        return self.states[-1] == "$"

    def is_accepting(self):
        return STOP in self._moves()

    def fork(self):
        twin = TableMatcher(self.table, self.fault)
        twin.states = list(self.states)
        return twin

    def reset(self):
        self.states = ["start"]

    @property
    def num_tokens(self):
        return len(self.states) - 1


class TableFactory:
    """Makes matchers from tables: the guide's text names the table."""

    def __init__(self, tables, fault=None):
        self.tables, self.fault, self.made = tables, fault or (lambda call: None), []
        self.vocabulary = gd.Vocabulary.from_bytes(
            [text.encode() for text in STRINGS[:-1]] + [None], stop_token_ids=[STOP]
        )

    def create(self, guide):
        self.fault("create")
        self.made.append(TableMatcher(self.tables[guide.guide], self.fault))
        return self.made[-1]


class Kit:
    """What tests need, handed out by one fixture because test modules cannot import each other."""

    STRINGS, STOP, PADDED = STRINGS, STOP, PADDED
    ids, RealFactory, TableFactory, TableMatcher = staticmethod(ids), RealFactory, TableFactory, TableMatcher
    JSON = gd.Guide.json()

    @staticmethod
    def decoder(factory, *, slots=2, drafts=3, rows="repeat", **options):
        options.setdefault("config", gd.GuidedDecodingConfig(rows_behind_refused_draft=rows))
        options.setdefault("device", "cpu")
        return gd.GuidedDecoder(
            factory, max_num_sequences=slots, vocab_size_padded=PADDED, max_num_draft_tokens=drafts, **options
        )

    @staticmethod
    def context(guide, slot=0, request_id=None, **fields):
        return gd.GuidedRequest(
            guide=guide,
            request_id=slot if request_id is None else request_id,
            seq_slot=slot,
            is_context_init_state=True,
            is_last_context_chunk=True,
            **fields,
        )

    @staticmethod
    def generation(guide, text, slot=0, request_id=None, **fields):
        """The first character of `text` is golden, the rest are drafts."""
        golden, *drafts = ids(text) if isinstance(text, str) else text
        return gd.GuidedRequest(
            guide=guide,
            request_id=slot if request_id is None else request_id,
            seq_slot=slot,
            is_generation_in_progress_state=True,
            new_token=golden,
            draft_tokens=drafts,
            **fields,
        )

    @staticmethod
    def draft(guide, character, slot=0, request_id=None):
        return gd.GuidedRequest(
            guide=guide,
            request_id=slot if request_id is None else request_id,
            seq_slot=slot,
            is_draft=True,
            new_token=ids(character)[0],
        )

    @staticmethod
    def step(decoder, *requests, **options):
        decoder.add_batch(list(requests), **options)
        return decoder.build()

    @staticmethod
    def settle(decoder, *num_emitted):
        return decoder.rollback_rejected_batch(torch.tensor(num_emitted, dtype=torch.int32))

    @staticmethod
    def legal(decoder, row):
        """Legal tokens of a row of the last build."""
        words = decoder.bitmask_host[row].tolist()
        return {STRINGS[i] for i in range(len(STRINGS)) if words[i // 32] >> (i % 32) & 1}

    @staticmethod
    def switches(decoder, num_rows=4):
        return decoder.token_mask_host[:num_rows].tolist()


@pytest.fixture
def kit():
    return Kit


def _backends():
    names = []
    for name, module in (("xgrammar", "xgrammar"), ("llguidance", "llguidance")):
        try:
            create_backend(name, RealFactory("xgrammar").vocabulary, gd.GuidedDecodingConfig())
            names.append(pytest.param(name))
        except (ImportError, ValueError):
            names.append(pytest.param(name, marks=pytest.mark.skip(reason=f"{module} is not installed")))
    return names


@pytest.fixture(params=_backends(), scope="module")
def factory(request):
    return RealFactory(request.param)


@pytest.fixture(scope="session")
def driver_library(tmp_path_factory):
    """Path of a library that stands in for the CUDA driver."""
    if shutil.which("cc") is None:
        pytest.skip("the fake driver needs a C compiler called cc")
    return str(build_fake_driver(tmp_path_factory.mktemp("driver")))


@pytest.fixture(scope="session")
def driver(driver_library):
    return load_driver(driver_library)
