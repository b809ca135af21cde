"""What the decoder remembers by slot: matchers, whose they are, and the counters of speculation.

A slot is where one request's state lives; it is never a row and never a position in the batch.
"""

from collections.abc import Sequence

from gd_plugin.grammars.matcher import GrammarMatcher
from gd_plugin.grammars.vocabulary import Vocabulary
from gd_plugin.guides.guide import Guide

__all__ = ["SlotStates"]

_NOBODY = object()
_SHOWN_TOKENS = 64


class SlotStates:
    """Lists by slot. The counters follow the names of TensorRT-LLM's guided decoder.

    Attributes:
        matchers: the live matchers; callers may put their own in. None is a slot without one, or one that has failed.
        num_advanced: tokens the last build credited: golden and accepted drafts, 1 for a context step. 0 once what the
            target rejected has been rolled back.
        num_guided: rows the last build filled.
        num_advanced_draft: tokens accepted in the draft loop under way.
        draft_terminated: the draft loop under way is unguided for the rest of it.
        max_acceptable: tokens the target may emit this step, bonus included.
        errors: failure found outside a build, to be reported by the next one.
        drafts: token of each node of the draft tree that the last build walked; empty for chains.
    """

    def __init__(self, num_slots: int, vocabulary: Vocabulary | None = None) -> None:
        self._vocabulary = vocabulary
        self.matchers: list[GrammarMatcher | None] = [None] * num_slots
        self.num_advanced = [0] * num_slots
        self.num_guided = [0] * num_slots
        self.num_advanced_draft = [0] * num_slots
        self.draft_terminated = [False] * num_slots
        self.max_acceptable = [0] * num_slots
        self.errors: list[str | None] = [None] * num_slots
        self.drafts: list[Sequence[int]] = [()] * num_slots
        self._owners: list[object] = [_NOBODY] * num_slots
        self._guides: list[Guide | None] = [None] * num_slots
        # what `attach` stored: another matcher in the slot was put there by the caller
        self._attached: list[GrammarMatcher | None] = [None] * num_slots
        self._tokens: list[list[int]] = [[] for _ in range(num_slots)]

    def __len__(self) -> int:
        return len(self.matchers)

    def attach(self, slot: int, request_id: object, guide: Guide | None, matcher: GrammarMatcher | None) -> None:
        """Give the slot to a request; without a matcher too, so that nobody sees the matcher of the one before."""
        self.matchers[slot] = self._attached[slot] = matcher
        self._owners[slot] = request_id
        self._guides[slot] = guide
        self._tokens[slot] = []
        self.errors[slot] = None
        self.drafts[slot] = ()
        self.num_advanced[slot] = self.num_guided[slot] = self.num_advanced_draft[slot] = 0
        self.draft_terminated[slot] = False

    def owner_matches(self, slot: int, request_id: object) -> bool:
        """Tell whether the slot is this request's. A matcher that the caller put in belongs to whoever asks first."""
        matcher = self.matchers[slot]
        if matcher is not self._attached[slot]:
            self._attached[slot] = matcher
            self._owners[slot] = request_id
            self._guides[slot] = None
            self._tokens[slot] = []
        return self._owners[slot] is not _NOBODY and self._owners[slot] == request_id

    def is_live(self, slot: int, request_id: object, guide: Guide | None) -> bool:
        """Tell whether the slot holds a matcher of this request for this very guide."""
        owned = self.owner_matches(slot, request_id)
        return owned and self.matchers[slot] is not None and self._guides[slot] == guide

    def fail(self, slot: int) -> None:
        """Drop a matcher whose state is not known any more; its request keeps the slot."""
        self.matchers[slot] = self._attached[slot] = None
        self.num_advanced[slot] = self.num_guided[slot] = self.num_advanced_draft[slot] = 0
        self.max_acceptable[slot] = 1

    def accept(self, slot: int, token_id: int) -> bool:
        """Advance the slot's matcher by one token; False leaves it as it was."""
        matcher = self.matchers[slot]
        if matcher is None or not matcher.accept_token(token_id):
            return False
        self._tokens[slot].append(token_id)
        return True

    def rollback(self, slot: int, num_tokens: int) -> None:
        """Undo the slot's last tokens.

        Raises:
            RollbackError: more than have been accepted; the state is as before the call.
        """
        matcher = self.matchers[slot]
        if matcher is not None and num_tokens:
            matcher.rollback(num_tokens)
            tokens = self._tokens[slot]
            del tokens[max(len(tokens) - num_tokens, 0) :]

    def replay(self, slot: int, history: Sequence[int]) -> int | None:
        """Bring the slot's matcher to the state behind `history`; return the position of a refused token, or None."""
        matcher, tokens = self.matchers[slot], self._tokens[slot]
        if matcher is not None and matcher.num_tokens != len(tokens):
            # a matcher that the caller put in with a past of its own
            matcher.reset()
            tokens.clear()
        common = 0
        while common < min(len(tokens), len(history)) and tokens[common] == history[common]:
            common += 1
        self.rollback(slot, len(tokens) - common)
        for position in range(common, len(history)):
            if not self.accept(slot, history[position]):
                return position
        return None

    def tokens(self, slot: int) -> list[int]:
        """Tokens the slot's matcher has consumed since it was attached."""
        return self._tokens[slot]

    def text(self, slot: int) -> str:
        """The end of the text so far, for messages; token ids where there is no vocabulary to spell them."""
        tokens = self._tokens[slot][-_SHOWN_TOKENS:]
        dots = "..." if len(self._tokens[slot]) > _SHOWN_TOKENS else ""
        if self._vocabulary is None:
            return dots + " ".join(map(str, tokens))
        return dots + self._vocabulary.decode(tokens).decode("utf-8", "replace")

    def rollback_drafts(self, slot: int) -> None:
        """End the slot's draft loop: undo what it accepted.

        Raises:
            RollbackError: the matcher has less history than that; the counters are cleared all the same.
        """
        num_tokens = self.num_advanced_draft[slot]
        self.draft_terminated[slot] = False
        if num_tokens:
            self.num_advanced_draft[slot] = 0
            # the last draft step counted its token here too, and that is undone with the rest
            self.num_advanced[slot] = 0
            self.rollback(slot, num_tokens)
