"""Budget: a row may choose only tokens from which its guide can still be completed in the tokens that remain.

In:  guided scores of a step, the rows' nodes.      Out: scores that keep only tokens with a certificate that fits.
Near the limit: where a bound is proven on what completes the guide from anywhere, no step is touched until no more than
that remains behind its token. Without such a bound every step is near.
Kept here: the certificate's own next token always stays, so a row that has begun within its budget ends within it,
whatever is chosen. Of the other legal tokens the best `num_candidates` are tried and the rest is banned: sound, not
complete. What is left out is left to the sampler's own renormalisation.
"""

from collections.abc import Sequence

import torch

from gd_plugin.config import GuidedDecodingConfig
from gd_plugin.grammars.backends.registry import CompiledGrammar
from gd_plugin.grammars.closing import (
    Certificate,
    closing_hints,
    completion_bound,
    exact_certificate,
    find_certificate,
    renew_certificate,
)
from gd_plugin.grammars.history import MatcherTree, Node, NodeState
from gd_plugin.grammars.matcher import GrammarMatcher
from gd_plugin.grammars.reasoning import ReasoningMatcher
from gd_plugin.grammars.vocabulary import Vocabulary
from gd_plugin.guides.completion import completion_of
from gd_plugin.hf.session import Session, StepRows

__all__ = ["Budget"]


class Budget:
    """Holds the rows of one `generate` call to `max_new_tokens`, stop token included.

    Args:
        max_new_tokens: tokens a row may generate.
        vocabulary: the guides' own.
        compiled: the guide of each row, None for an unguided one.
        config: the settings they were compiled with.
        num_candidates: legal tokens tried in a step of a row, best first.
    """

    def __init__(
        self,
        max_new_tokens: int,
        vocabulary: Vocabulary,
        compiled: Sequence[CompiledGrammar | None],
        config: GuidedDecodingConfig,
        num_candidates: int = 64,
    ) -> None:
        self._max_new_tokens = max_new_tokens
        self._vocabulary = vocabulary
        self._compiled = compiled
        guides = {grammar.guide for grammar in compiled if grammar is not None}
        self._bounds = {guide: completion_bound(guide, vocabulary, config) for guide in guides}
        self._num_candidates = num_candidates

    def apply(self, session: Session, rows: StepRows, scores: torch.Tensor) -> torch.Tensor:
        """Return scores [B, V] without the tokens that lead out of the budget. `scores` may be written.

        Raises:
            ValueError: at the first step, a budget below the shortest completion known for a row's guide.
        """
        in_use = {node for node in session.nodes if node is not None}
        for row, node in enumerate(session.nodes):
            tree = session.tree_of_row(row)
            if node is None or tree is None or node.state is not NodeState.LIVE or rows.row_index[row] < 0:
                continue
            if not self._is_near(node, row):
                continue
            allowed = self._allowed(tree, node, row, scores[row], in_use)
            if allowed is not None:
                self._keep_only(scores, row, allowed)
        return scores

    def _is_near(self, node: Node, row: int) -> bool:
        grammar = self._compiled[row]
        bound = None if grammar is None else self._bounds[grammar.guide]
        return bound is None or self._max_new_tokens - node.depth <= bound

    def _allowed(
        self, tree: MatcherTree, node: Node, row: int, scores: torch.Tensor, in_use: set[Node]
    ) -> list[int] | None:
        """Return the tokens that may follow `node`; None leaves the row alone because its engine has failed."""
        matcher = tree.seat(node, in_use)
        if matcher is None:
            return None
        left = self._max_new_tokens - node.depth
        certificate = self._certificate(tree, node, matcher, row)
        if certificate is None or len(certificate) > left:
            if node.parent is None:
                raise self._refusal(row, certificate)
            # nobody chose this history: a draft behind a refused token, or a beam without probability
            return list(self._vocabulary.stop_token_ids)
        allowed = [certificate[0]]
        node.closing = {certificate[0]: certificate[1:]}
        refused = False
        for token_id in self._best(scores):
            if token_id == certificate[0]:
                continue
            if token_id in self._vocabulary.stop_token_set:
                allowed.append(token_id)
                continue
            if not matcher.accept_token(token_id):
                continue
            try:
                found = renew_certificate(matcher, certificate)
                if found is None or len(found) >= left:
                    found = self._search(matcher, (*node.token_ids(), token_id), row, certificate)
            finally:
                matcher.rollback(1)
            if found is None or len(found) >= left:
                refused = True
            else:
                allowed.append(token_id)
                node.closing[token_id] = found
        if refused:
            tree.interventions.add(node.token_ids())
        return allowed

    def _certificate(self, tree: MatcherTree, node: Node, matcher: GrammarMatcher, row: int) -> Certificate | None:
        """Return the node's certificate: what its parent knows of it, or a new one."""
        if node.parent is not None and node.parent.closing is not None:
            known = node.parent.closing.get(node.token_id)
            if known is not None:
                return known
        return self._search(matcher, node.token_ids(), row)

    def _search(
        self, matcher: GrammarMatcher, token_ids: Sequence[int], row: int, old: Certificate = ()
    ) -> Certificate | None:
        """Return a completion of the state behind `token_ids`."""
        grammar = self._compiled[row]
        if grammar is None:
            return None
        completion = completion_of(grammar.guide)
        if completion is not None:
            found = exact_certificate(matcher, self._vocabulary, completion, self._vocabulary.decode(token_ids))
            if found is not None:
                return found
        # the end marker is worth trying as long as the free text goes on
        free = isinstance(matcher, ReasoningMatcher) and matcher.is_reasoning
        hints = closing_hints(grammar.guide) if free or not token_ids else ()
        return find_certificate(matcher, self._vocabulary, hints, old)

    def _best(self, scores: torch.Tensor) -> list[int]:
        values, ids = scores.topk(min(self._num_candidates, scores.shape[0]))
        best: list[int] = ids[values > float("-inf")].tolist()
        return best

    def _keep_only(self, scores: torch.Tensor, row: int, allowed: list[int]) -> None:
        ids = torch.tensor(allowed, device=scores.device)
        kept = scores[row, ids]
        if bool((kept == float("-inf")).all()):
            kept = torch.zeros_like(kept)  # something before the guide banned what is left
        scores[row] = float("-inf")
        scores[row, ids] = kept

    def _refusal(self, row: int, certificate: Certificate | None) -> ValueError:
        if certificate is None:
            return ValueError(
                f"row {row}: max_new_tokens={self._max_new_tokens} cannot be guaranteed: no completion of this guide was "
                "found to begin with; leave the budget out, or bound the guide"
            )
        return ValueError(
            f"row {row}: max_new_tokens={self._max_new_tokens} is too small: the shortest completion known for this guide "
            f"needs {len(certificate)} tokens, the stop token included; pass at least max_new_tokens={len(certificate)}"
        )
