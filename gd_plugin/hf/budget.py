"""Budget: a row may choose only tokens from which its guide can still be completed in the tokens that remain.

In:  guided scores of a step, the rows' nodes.      Out: scores that keep only tokens with a certificate that fits.
Kept here: the best `num_candidates` legal tokens of a row are tried (see gd_plugin.grammars.budgets) and the rest is banned.
What is left out is left to the sampler's own renormalisation.
"""

from collections.abc import Sequence

import torch

from gd_plugin.config import GuidedDecodingConfig
from gd_plugin.grammars.backends.registry import CompiledGrammar
from gd_plugin.grammars.budgets import NUM_CANDIDATES, Closing, refusal
from gd_plugin.grammars.closing import Certificate
from gd_plugin.grammars.history import MatcherTree, Node, NodeState
from gd_plugin.grammars.matcher import GrammarMatcher
from gd_plugin.grammars.vocabulary import Vocabulary
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
        num_candidates: int = NUM_CANDIDATES,
    ) -> None:
        self._max_new_tokens = max_new_tokens
        self._vocabulary = vocabulary
        self._compiled = compiled
        guides = {grammar.guide for grammar in compiled if grammar is not None}
        closings = {guide: Closing(guide, vocabulary, config) for guide in guides}
        self._closings = [None if grammar is None else closings[grammar.guide] for grammar in compiled]
        self._num_candidates = num_candidates

    def check(self) -> None:
        """Raise ValueError where no completion of a row's guide is known that fits into the budget."""
        checked = set()
        for row, (grammar, closing) in enumerate(zip(self._compiled, self._closings, strict=True)):
            if grammar is None or closing is None or closing in checked or not closing.is_near(self._max_new_tokens):
                continue
            checked.add(closing)
            certificate = closing.find(grammar.create_matcher(), ())
            if certificate is None or len(certificate) > self._max_new_tokens:
                raise self._refusal(row, certificate)

    def _refusal(self, row: int, certificate: Certificate | None) -> ValueError:
        return ValueError(f"row {row}: {refusal(self._max_new_tokens, certificate)}")

    def apply(self, session: Session, rows: StepRows, scores: torch.Tensor) -> torch.Tensor:
        """Return scores [B, V] without the tokens that lead out of the budget. `scores` may be written.

        Raises:
            ValueError: at the first step, a budget below the shortest completion known for a row's guide.
        """
        in_use = {node for node in session.nodes if node is not None}
        for row, node in enumerate(session.nodes):
            tree, closing = session.tree_of_row(row), self._closings[row]
            if node is None or tree is None or closing is None:
                continue
            if node.state is not NodeState.LIVE or rows.row_index[row] < 0:
                continue
            if not closing.is_near(self._max_new_tokens - node.depth):
                continue
            allowed = self._allowed(tree, node, row, closing, scores[row], in_use)
            if allowed is not None:
                self._keep_only(scores, row, allowed)
        return scores

    def _allowed(
        self, tree: MatcherTree, node: Node, row: int, closing: Closing, scores: torch.Tensor, in_use: set[Node]
    ) -> list[int] | None:
        """Return the tokens that may follow `node`; None leaves the row alone because its engine has failed."""
        matcher = tree.seat(node, in_use)
        if matcher is None:
            return None
        left = self._max_new_tokens - node.depth
        token_ids = node.token_ids()
        certificate = self._certificate(node, closing, matcher, token_ids)
        if certificate is None or len(certificate) > left:
            if node.parent is None:
                raise self._refusal(row, certificate)
            # nobody chose this history: a draft behind a refused token, or a beam without probability
            return list(self._vocabulary.stop_token_ids)
        node.closing, refused = closing.fitting(matcher, token_ids, certificate, left, self._best(scores))
        if refused:
            tree.interventions.add(token_ids)
        return list(node.closing)

    def _certificate(
        self, node: Node, closing: Closing, matcher: GrammarMatcher, token_ids: Sequence[int]
    ) -> Certificate | None:
        """Return the node's certificate: what its parent knows of it, or a new one."""
        if node.parent is not None and node.parent.closing is not None:
            known = node.parent.closing.get(node.token_id)
            if known is not None:
                return known
        return closing.find(matcher, token_ids)

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
