"""Session: one `generate` call as a logits processor sees it, which is token ids and nothing else.

In:  the ids of each call.      Out: a node (and so a mask row) for each row.
Kept here: state is found by the content of the ids alone. Rows may be reordered (beams), come back shorter or with other
tokens (drafts), hold tokens that the guide rejects (beam-sample), and go on behind a stop token (padding). Prompt tokens
never reach a matcher.
Source: how transformers 5.24 calls a processor in each of its modes (generation/utils.py, candidate_generator.py).
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from gd_plugin.errors import DeadEndError
from gd_plugin.grammars.backends.registry import CompiledGrammar
from gd_plugin.grammars.batch import fill_next_token_bitmasks
from gd_plugin.grammars.dead_ends import dead_end_error
from gd_plugin.grammars.history import MatcherTree, Node, NodeState
from gd_plugin.grammars.vocabulary import Vocabulary, text_of
from gd_plugin.masks.bitmask import first_valid_token, legal_columns
from gd_plugin.masks.pool import BitmaskPool
from gd_plugin.reports.recorder import Recorder

__all__ = ["Session", "StepRows", "guide_of_row"]

Ids = npt.NDArray[np.int64]

_log = logging.getLogger(__name__)

# the deepest known node of a row's history, None where it is unguided, and the tokens behind that
_Place = tuple[Node | None, list[int]]

# tokens at a row's end that are compared first when beams have been reordered
_TAIL = 8


@dataclass(slots=True)
class StepRows:
    """What to apply at one step: for each row its row in the pool (-1: leave it alone) and one legal token (or -1)."""

    row_index: npt.NDArray[np.int32]
    first_legal: npt.NDArray[np.int64]


def guide_of_row(row: int, num_rows: int, num_guides: int | None) -> int:
    """Return the guide of a row: rows of one prompt lie together, whatever expanded them (beams, return sequences)."""
    return 0 if num_guides is None else row * num_guides // num_rows


class Session:
    """The rows of one `generate` call.

    Args:
        compiled: the guides, None for unguided.
        num_guides: number of prompts the guides are for; None lets the only guide serve every row.
        prompt: int64 [B, P], the ids of the first call.
        width: columns of the logits.
        skipped_start: token ids that the model is made to begin with, which are no part of the output's text.

    Raises:
        ValueError: the rows cannot be shared out among the guides.
    """

    def __init__(
        self,
        compiled: Sequence[CompiledGrammar | None],
        num_guides: int | None,
        prompt: Ids,
        vocabulary: Vocabulary,
        width: int,
        finish_token_ids: Sequence[int],
        skipped_start: frozenset[int] = frozenset(),
    ) -> None:
        self.prompt = prompt.copy()
        self.num_rows, self.prompt_len = prompt.shape
        self.vocabulary = vocabulary
        self.width = min(width, vocabulary.vocab_size)
        self.skipped_start = skipped_start
        _check_num_guides(self.prompt, num_guides)
        self.pool = BitmaskPool(vocabulary.vocab_size, max(8, self.num_rows + 1))
        # finished and dead rows share this one
        self._stop_row = self.pool.take()
        self._stop_legal = finish_token_ids[0]
        for token_id in finish_token_ids:
            self.pool.bitmask[self._stop_row, token_id >> 5] |= torch.tensor(
                [1 << (token_id & 31)], dtype=torch.int64
            ).to(torch.int32)[0]
        trees: dict[int, MatcherTree] = {}
        self._row_trees: list[MatcherTree | None] = []
        for row in range(self.num_rows):
            grammar = compiled[guide_of_row(row, self.num_rows, num_guides)]
            if grammar is None:
                self._row_trees.append(None)
                continue
            if id(grammar) not in trees:
                trees[id(grammar)] = MatcherTree(grammar.create_matcher, self.pool)
            self._row_trees.append(trees[id(grammar)])
        self._trees = list(trees.values())
        self._tree_rows = [
            (tree, [row for row, owner in enumerate(self._row_trees) if owner is tree]) for tree in self._trees
        ]
        self.nodes: list[Node | None] = [None if tree is None else tree.root for tree in self._row_trees]
        self._ids = self.prompt
        self.generated: Ids = self.prompt[:, self.prompt_len :]
        # what `continues` found, for the `follow` behind it: histories are long
        self._located: tuple[Ids, list[_Place]] | None = None
        # set by a processor that was asked for a report
        self.recorder: Recorder | None = None
        # drafts in use: masks of histories that were left will be asked for again
        self._revisits = False

    def is_next_step(self, ids: Ids) -> bool:
        """Tell whether `ids` are those of the last call and one token more in each row."""
        known = self._ids
        rows, length = ids.shape
        return length == known.shape[1] + 1 and rows == self.num_rows and bool((ids[:, :-1] == known).all())

    def led_to(self, output: Ids) -> bool:
        """Tell whether `output` goes on from the ids of the last call."""
        known = self._ids
        return output.shape[0] == self.num_rows and np.array_equal(output[:, : known.shape[1]], known)

    def continues(self, ids: Ids) -> bool:
        """Tell whether `ids` can be the next call of the same `generate`.

        Each row must be the prompt and a history that was seen before, or one token longer than one.
        """
        if ids.shape[0] != self.num_rows or ids.shape[1] < self.prompt_len:
            return False
        if not np.array_equal(ids[:, : self.prompt_len], self.prompt):
            return False
        located = self._locate(ids[:, self.prompt_len :])
        self._located = ids, located
        return all(len(rest) <= 1 for _, rest in located)

    def follow(self, ids: Ids, *, next_step: bool | None = None) -> list[Node | None]:
        """Return the node of each row of int64 [B, L]; None where the row is unguided.

        Args:
            ids: prompt and generated tokens.
            next_step: what `is_next_step(ids)` says, if it was asked.
        """
        if self.is_next_step(ids) if next_step is None else next_step:
            nodes = self._follow_one(ids)
        else:
            generated = ids[:, self.prompt_len :]
            self._revisits = self._revisits or 0 < generated.shape[1] <= self.generated.shape[1]
            found = self._located
            nodes = self._follow_any(found[1] if found is not None and found[0] is ids else self._locate(generated))
        if not self._revisits:
            self._drop_left_masks(nodes)
        self._located = None
        self.nodes = nodes
        self._ids = ids.copy()
        self.generated = self._ids[:, self.prompt_len :]
        return nodes

    def _follow_one(self, ids: Ids) -> list[Node | None]:
        """Each row is one token longer."""
        last: list[int] = ids[:, -1].tolist()
        at_start = self.skipped_start and ids.shape[1] == self.prompt_len + 1
        nodes: list[Node | None] = [None] * self.num_rows
        for tree, rows in self._tree_rows:
            moves: list[tuple[Node, int]] = []
            moved: list[int] = []
            for row in rows:
                node, token_id = self.nodes[row], last[row]
                if node is None:
                    continue
                if at_start and token_id in self.skipped_start:
                    nodes[row] = tree.skip(node, token_id)
                    continue
                moves.append((node, token_id))
                moved.append(row)
            for row, reached in zip(moved, tree.step(moves), strict=True):
                nodes[row] = reached
        return nodes

    def _follow_any(self, starts: list[_Place]) -> list[Node | None]:
        """Rows have been reordered, shortened, or have grown by more than a token."""
        nodes: list[Node | None] = [None] * self.num_rows
        for tree, rows in self._tree_rows:
            moves: list[tuple[Node, int]] = []
            moved: list[int] = []
            for row in rows:
                node, rest = starts[row]
                if node is None:
                    continue
                if rest and node.parent is None and rest[0] in self.skipped_start:
                    node, rest = tree.skip(node, rest[0]), rest[1:]
                if len(rest) > 1:
                    node = tree.walk(node, rest[:-1])
                if rest:
                    moved.append(row)
                    moves.append((node, rest[-1]))
                else:
                    nodes[row] = node
            for row, reached in zip(moved, tree.step(moves), strict=True):
                nodes[row] = reached
        return nodes

    def mask_rows(self, release: bool) -> StepRows:
        """Fill what is missing and return where each row's mask lies.

        Args:
            release: rows in a dead end are left alone instead of being stopped.
        """
        self._fill_masks()
        row_index, first_legal = [-1] * self.num_rows, [-1] * self.num_rows
        for row, node in enumerate(self.nodes):
            if node is None:
                continue
            if node.state is NodeState.LIVE:
                row_index[row], first_legal[row] = node.mask_row, node.first_legal
            elif not (release and isinstance(node.error, DeadEndError)):
                row_index[row], first_legal[row] = self._stop_row, self._stop_legal
        for tree, rows in self._tree_rows:
            tree.prune(node for row in rows if (node := self.nodes[row]) is not None)
        return StepRows(np.array(row_index, dtype=np.int32), np.array(first_legal, dtype=np.int64))

    def open_rows(self, rows: StepRows) -> tuple[list[int], list[int | None]]:
        """Return the rows that are not finished, and how many tokens each one's guide allows; None if it is unguided."""
        open_rows: list[int] = []
        num_legal: list[int | None] = []
        for row, node in enumerate(self.nodes):
            if node is not None and node.state is NodeState.FINISHED:
                continue
            open_rows.append(row)
            if node is None or rows.row_index[row] < 0:
                num_legal.append(None)
            elif node.state is NodeState.DEAD:
                num_legal.append(0)
            else:
                num_legal.append(int(legal_columns(self.pool.bitmask[node.mask_row], self.width).sum()))
        return open_rows, num_legal

    def dead_end(self) -> tuple[int, Exception] | None:
        """Return the first row that is dead for a reason of its own, and the reason."""
        for row, node in enumerate(self.nodes):
            if node is not None and node.error is not None:
                return row, node.error
        return None

    def failure(self, row: int, token_ids: Sequence[int]) -> Exception | None:
        """Return why `token_ids` in this row led to a dead node, if it was seen and no token was rejected."""
        tree = self._row_trees[row]
        return None if tree is None else tree.failures.get(tuple(token_ids))

    def intervened(self, row: int, token_ids: Sequence[int]) -> bool:
        """Tell whether a budget refused a token on the way through `token_ids` in this row."""
        tree = self._row_trees[row]
        if tree is None:
            return False
        return any(history == tuple(token_ids[: len(history)]) for history in tree.interventions)

    def take_reports(self, row: int, alone: "Session") -> None:
        """Take over why `alone`, a session of this row only, has failed, and where a budget has refused tokens."""
        tree, source = self._row_trees[row], alone.tree_of_row(0)
        if tree is not None and source is not None:
            tree.failures.update(source.failures)
            tree.interventions.update(source.interventions)

    def tree_of_row(self, row: int) -> MatcherTree | None:
        """Return the tree that holds a row's states; None if the row is unguided."""
        return self._row_trees[row]

    @property
    def num_matchers(self) -> int:
        """Matchers alive in all rows."""
        return sum(tree.num_matchers for tree in self._trees)

    def _locate(self, generated: Ids) -> list[_Place]:
        """For each row the deepest known node of its history, and the tokens behind that."""
        located: list[_Place] = []
        for row, tree in enumerate(self._row_trees):
            if tree is None:
                located.append((None, []))
                continue
            tokens = generated[row]
            node = self._nearest(row, tree, tokens)
            rest: list[int] = tokens[node.depth :].tolist()
            known = 0
            while known < len(rest) and rest[known] in node.children:
                node = node.children[rest[known]]
                known += 1
            located.append((node, rest[known:]))
        return located

    def _nearest(self, row: int, tree: MatcherTree, tokens: Ids) -> Node:
        """The deepest node on the paths of the last call's rows that is a prefix of `tokens`."""
        common = min(len(tokens), self.generated.shape[1])
        head = tokens[:common]
        best, best_depth = tree.root, 0
        for other in self._likely_rows(row, tree, head):
            node = self.nodes[other]
            if node is None:
                continue
            differing = np.flatnonzero(head != self.generated[other, :common])
            depth = int(differing[0]) if differing.size else common
            if depth > best_depth:
                best, best_depth = node.ancestor(depth), depth
            if depth == common:
                break
        return best

    def _likely_rows(self, row: int, tree: MatcherTree, head: Ids) -> Iterable[int]:
        """Rows of the last call under the same guide, those that end like `head` first."""
        yield row
        others = [r for r, owner in enumerate(self._row_trees) if owner is tree and r != row]
        if not others:
            return
        tail = head[-_TAIL:]
        ends = self.generated[others, max(0, len(head) - _TAIL) : len(head)]
        alike = (ends == tail).all(axis=1).tolist()
        yield from (r for r, same in zip(others, alike, strict=True) if same)
        yield from (r for r, same in zip(others, alike, strict=True) if not same)

    def _drop_left_masks(self, nodes: list[Node | None]) -> None:
        """Give back the masks of the last step, so that this one is filled where the cache is still warm."""
        current = set(nodes)
        for node, tree in zip(self.nodes, self._row_trees, strict=True):
            if node is not None and tree is not None and node.mask_row >= 0 and node not in current:
                tree.drop_mask(node)

    def _fill_masks(self) -> None:
        waiting: dict[Node, MatcherTree] = {}
        for node, tree in zip(self.nodes, self._row_trees, strict=True):
            if node is not None and tree is not None and tree.needs_mask(node):
                waiting[node] = tree
        kept = set(waiting)
        nodes, matchers, rows = [], [], []
        for node, tree in waiting.items():
            matcher = tree.seat(node, kept)
            if matcher is not None:
                nodes.append(node)
                matchers.append(matcher)
                rows.append(self.pool.take())
        if not nodes:
            return
        errors = fill_next_token_bitmasks(matchers, self.pool.bitmask, rows)
        words = self.pool.words
        for position, (node, row) in enumerate(zip(nodes, rows, strict=True)):
            tree = waiting[node]
            # a row without a legal token never reaches softmax
            first = first_valid_token(words[row], self.width)
            if position in errors:
                self.pool.give_back(row)
                _log.warning("row %d ends: the engine failed: %s", self.nodes.index(node), errors[position])
                tree.fail(node, errors[position])
            elif first < 0:
                self.pool.give_back(row)
                tokens = node.token_ids()
                dead_end = dead_end_error(len(tokens), text_of(self.vocabulary, tokens), row=self.nodes.index(node))
                _log.warning("dead end: %s", dead_end)
                tree.close(node, dead_end)
            else:
                tree.add_mask(node, row, first)


def _check_num_guides(prompt: Ids, num_guides: int | None) -> None:
    num_rows = prompt.shape[0]
    if num_guides is None:
        return
    advice = "pass one guide per prompt (None for an unguided one), or a single guide outside a list for all"
    if num_rows % num_guides:
        raise ValueError(f"{num_guides} guides cannot serve a batch of {num_rows} rows: {advice}")
    expansion = num_rows // num_guides
    groups = prompt.reshape(num_guides, expansion, prompt.shape[1])
    if expansion > 1 and not (groups == groups[:, :1]).all():
        num_prompts = 1 + sum(not np.array_equal(prompt[r], prompt[r - 1]) for r in range(1, num_rows))
        raise ValueError(f"{num_guides} guides cannot serve a batch of {num_prompts} different prompts: {advice}")
