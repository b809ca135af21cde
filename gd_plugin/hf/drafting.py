"""The guide drafts: forced text and copies from the prompt are checked by the model in one forward pass.

In:  `model.generate(..., logits_processor=[p], custom_generate=grammar_drafting())`.
Out: what plain guided generation returns: the same tokens under greedy search, the same distribution under sampling.
Kept here: every emitted token is the model's own choice from processed scores of its own position, or the only legal one
there; a draft only decides which positions are computed together. Rows of a batch go on at their own speed: slots of
refused drafts stay in the cache and are masked out, positions are given explicitly.
Source: transformers 5.24, generation/utils.py (_sample, custom_generate) and cache_utils.py (crop, is_croppable).
"""

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LogitsProcessorList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from gd_plugin.grammars.forced import Drafter, PassCost
from gd_plugin.grammars.matcher import GrammarMatcher
from gd_plugin.hf.draftable import ROW_LOCAL, cache_name, has_mask, why_not
from gd_plugin.hf.processor import GuidedLogitsProcessor
from gd_plugin.hf.warning import warn_user
from gd_plugin.masks.bitmask import allocate_token_bitmask, few_legal_tokens

__all__ = ["grammar_drafting"]

_log = logging.getLogger(__name__)

# what width costs, in passes over one token: measured with SmolLM2 135M in float32, where two tokens took 1.6 times as
# long as one and sixteen 2.4 times (matrix times vector reads the weights as they lie, a matrix product packs them first)
_CPU_COST = PassCost(second=0.6, further=0.055)
# a decoding step of an accelerator waits for the weights, whatever the width; not measured
_ACCELERATOR_COST = PassCost(second=0.02, further=0.005)


def grammar_drafting(
    num_draft_tokens: int = 15, prompt_lookup: bool = True, streamer: Any = None
) -> Callable[..., Any]:
    """Return a callable for `model.generate(..., logits_processor=[p], custom_generate=...)`.

    Works with causal models whose cache can be cropped, greedy or sampling, any batch size, left padding, mixed guides
    and unguided rows. What it cannot serve (beams, encoder-decoder models, other caches, `output_scores` and the like)
    is generated plainly, with one warning that says why.

    Args:
        num_draft_tokens: longest draft.
        prompt_lookup: also draft what followed the last tokens earlier in the row, where the guide allows it.
        streamer: as for `generate`, which does not hand its own to a callable. One row only.

    Returns:
        The callable. Its attribute `num_forwards` counts the forward passes of its last call.

    Raises:
        ValueError: `num_draft_tokens` is below 1, or `streamer` is none.
    """
    if not isinstance(num_draft_tokens, int) or isinstance(num_draft_tokens, bool) or num_draft_tokens < 1:
        raise ValueError(f"num_draft_tokens must be a positive number of tokens, got {num_draft_tokens!r}")
    if streamer is not None and not (
        callable(getattr(streamer, "put", None)) and callable(getattr(streamer, "end", None))
    ):
        raise ValueError(f"streamer must have put() and end(), as transformers' streamers do, got {streamer!r}")
    return _Drafting(num_draft_tokens, bool(prompt_lookup), streamer)


@dataclass
class _Row:
    """One row on its way.

    Attributes:
        token_ids: left padding, prompt and generated tokens.
        padding: tokens of padding among them.
        processors: what `generate` prepared, with the guide of this row alone.
        matcher: state behind the generated tokens; None once nothing can be drafted from it.
        drafter: None where the row is unguided.
        num_cached: tokens of this row in the cache, padding not counted.
        draft: tokens of the next forward pass behind those that are not cached yet.
    """

    token_ids: list[int]
    padding: int
    processors: LogitsProcessorList
    matcher: GrammarMatcher | None
    drafter: Drafter | None
    num_cached: int = 0
    draft: list[int] = field(default_factory=list)
    done: bool = False

    @property
    def block(self) -> list[int]:
        """Tokens of the next forward pass."""
        return [] if self.done else self.token_ids[self.padding + self.num_cached :] + self.draft

    def append(self, token_id: int) -> None:
        """Add a token."""
        self.token_ids.append(token_id)
        if self.matcher is not None and not self.matcher.accept_token(token_id):
            self.matcher = None  # past its guide's end, or released from it


class _Drafting:
    def __init__(self, num_draft_tokens: int, prompt_lookup: bool, streamer: Any) -> None:
        self._num_draft_tokens = num_draft_tokens
        self._prompt_lookup = prompt_lookup
        self._streamer = streamer
        self._warned = False
        self._skips = False  # tokens that alone are legal need no pass; callbacks of the user's see every pass
        self.num_forwards = 0

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        *,
        logits_processor: LogitsProcessorList,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        """Generate; called by transformers.

        Raises:
            ValueError: no guided processor, or several; a streamer for several rows; a budget below the shortest
                completion known of a row's guide.
        """
        # calls of several threads keep their own counts
        call = copy.copy(self)
        call.num_forwards = 0
        try:
            return call._generate(
                model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs
            )
        finally:
            self.num_forwards, self._warned = call.num_forwards, call._warned

    def _generate(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: Any,
        generation_config: Any,
        model_kwargs: dict[str, Any],
    ) -> Any:
        guided = [processor for processor in logits_processor if isinstance(processor, GuidedLogitsProcessor)]
        if len(guided) != 1:
            raise ValueError(
                f"grammar_drafting needs one GuidedLogitsProcessor in logits_processor, found {len(guided)}; "
                "pass logits_processor=[p]"
            )
        if self._streamer is not None and input_ids.shape[0] != 1:
            raise ValueError(f"a streamer follows one row, but there are {input_ids.shape[0]}; leave streamer out")
        guided[0].check_budget(input_ids.shape[0])
        reason = why_not(model, input_ids, [*logits_processor, *stopping_criteria], generation_config, model_kwargs)
        if reason is not None:
            return self._plain(
                model, input_ids, reason, logits_processor, stopping_criteria, generation_config, model_kwargs
            )
        padding = (
            (model_kwargs["attention_mask"] == 0).sum(-1).tolist() if has_mask(model_kwargs) else [0] * len(input_ids)
        )
        self._skips = {type(callback).__name__ for callback in [*logits_processor, *stopping_criteria]} <= ROW_LOCAL
        rows = [
            self._new_row(
                guided[0].for_row(index, len(input_ids)),
                guided[0],
                logits_processor,
                tokens,
                padding[index],
                input_ids.device,
            )
            for index, tokens in enumerate(input_ids.tolist())
        ]
        if self._streamer is not None:
            self._streamer.put(input_ids.cpu())
        cache = self._loop(model, input_ids, rows, stopping_criteria, generation_config, model_kwargs)
        if self._streamer is not None:
            self._streamer.end()
        width = max(len(row.token_ids) for row in rows)
        pad = _pad_id(generation_config)
        sequences = torch.tensor(
            [row.token_ids + [pad] * (width - len(row.token_ids)) for row in rows], device=input_ids.device
        )
        guided[0].follow_rows(input_ids, [_guided_of(row.processors) for row in rows])
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences, **{cache_name(model_kwargs): cache})
        return sequences

    def _plain(
        self,
        model: Any,
        input_ids: torch.Tensor,
        reason: str,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        model_kwargs: dict[str, Any],
    ) -> Any:
        _log.info("generating plainly: %s", reason)
        if not self._warned:
            self._warned = True
            warn_user(f"grammar_drafting generates plainly here: {reason}")
        method = model._beam_search if generation_config.num_beams > 1 else model._sample
        counter = model.register_forward_hook(self._count)
        try:
            return method(
                input_ids,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                generation_config=generation_config,
                **({} if generation_config.num_beams > 1 else {"streamer": self._streamer}),
                **model_kwargs,
            )
        finally:
            counter.remove()

    def _count(self, *_: Any) -> None:
        self.num_forwards += 1

    def _new_row(
        self,
        alone: GuidedLogitsProcessor,
        guided: GuidedLogitsProcessor,
        logits_processor: LogitsProcessorList,
        tokens: list[int],
        padding: int,
        device: torch.device,
    ) -> _Row:
        processors = LogitsProcessorList([alone if p is guided else p for p in logits_processor])
        (grammar,) = alone.compiled
        matcher = None if grammar is None else grammar.create_matcher()
        drafter = None
        if grammar is not None:
            drafter = Drafter(
                alone.vocabulary,
                prompt_lookup=self._prompt_lookup,
                pass_cost=_CPU_COST if device.type == "cpu" else _ACCELERATOR_COST,
                skips_alone=self._skips,
            )
            drafter.extend(tokens[padding:])
        return _Row(tokens, padding, processors, matcher, drafter)

    def _loop(
        self,
        model: Any,
        input_ids: torch.Tensor,
        rows: list[_Row],
        stopping_criteria: Any,
        generation_config: Any,
        model_kwargs: dict[str, Any],
    ) -> Any:
        device = input_ids.device
        name = cache_name(model_kwargs)
        cache = model_kwargs[name]
        if hasattr(cache, "activate_past_recording"):
            cache.activate_past_recording()
        flags = model_kwargs["attention_mask"].long() if has_mask(model_kwargs) else torch.ones_like(input_ids)
        mask = flags.new_empty((len(rows), 0))  # slots in the cache that are in use
        pad = _pad_id(generation_config)
        prompts = [row.token_ids for row in rows]  # left padding included
        self._draft(rows, generation_config)
        blocks = [prompt + row.draft for prompt, row in zip(prompts, rows, strict=True)]
        while True:
            width = max(map(len, blocks))
            in_use = mask.new_tensor([[1] * len(block) + [0] * (width - len(block)) for block in blocks])
            if not mask.shape[1]:
                in_use[:, : flags.shape[1]] &= flags
            cached = mask.new_tensor([[row.num_cached] for row in rows])
            # scores from the last token before each row's draft on
            starts = [len(block) - len(row.draft) - 1 for block, row in zip(blocks, rows, strict=True)]
            first = min(start for start, row in zip(starts, rows, strict=True) if not row.done)
            logits = model(
                input_ids=torch.tensor([block + [pad] * (width - len(block)) for block in blocks], device=device),
                attention_mask=torch.cat([mask, in_use], dim=1),
                position_ids=(cached + in_use.cumsum(-1) - 1).clamp(min=0),
                use_cache=True,
                return_dict=True,
                **{name: cache},
                **({"logits_to_keep": width - first} if model._supports_logits_to_keep() else {}),
            ).logits[:, first - width :]
            self.num_forwards += 1
            for index, row in enumerate(rows):
                if not row.done:
                    num_right = self._verify(
                        row, logits[index, starts[index] - first :], stopping_criteria, generation_config, device
                    )
                    in_use[index, starts[index] + 1 + num_right :] = 0
            if all(row.done for row in rows):
                return cache
            mask = self._crop(cache, torch.cat([mask, in_use], dim=1))
            for row, used in zip(rows, mask.sum(-1).tolist(), strict=True):
                row.num_cached = used
            self._draft(rows, generation_config)
            blocks = [row.block for row in rows]

    def _crop(self, cache: Any, mask: torch.Tensor) -> torch.Tensor:
        """Cut off the slots at the end that no row uses."""
        used = mask.any(dim=0).nonzero()
        unused = mask.shape[1] - 1 - int(used[-1])
        if not unused:
            return mask
        cache.crop(-unused)
        return mask[:, :-unused]

    def _draft(self, rows: list[_Row], generation_config: Any) -> None:
        for row in rows:
            row.draft = []
        # all rows are as wide as the widest
        num_pending = max(len(row.block) for row in rows)
        for row in rows:
            if row.done or row.matcher is None or row.drafter is None:
                continue
            room = generation_config.max_length - len(row.token_ids) - 1
            limit = min(self._num_draft_tokens, room)
            row.draft = row.drafter.propose(row.matcher, limit, num_pending=num_pending)

    def _verify(
        self, row: _Row, logits: torch.Tensor, stopping_criteria: Any, generation_config: Any, device: torch.device
    ) -> int:
        """Append what the model chooses, as long as the draft agrees; return how much of the draft was right."""
        known = len(row.token_ids)
        right = 0
        while True:
            ids = torch.tensor([row.token_ids], device=device)
            raw = logits[right : right + 1].to(copy=True, dtype=torch.float32, device=device)
            scores = row.processors(ids, raw)
            if generation_config.do_sample:
                chosen = int(torch.multinomial(scores.softmax(dim=-1), num_samples=1))
            else:
                chosen = int(scores.argmax(dim=-1))
            self._append(row, chosen, stopping_criteria, scores)
            if row.done or right == len(row.draft) or chosen != row.draft[right]:
                break
            right += 1
        while self._skips and not row.done and (only := self._only_token(row)) is not None:
            self._append(row, only, stopping_criteria, None)
        if row.drafter is not None:
            row.drafter.extend(row.token_ids[known:])
        return right

    def _append(self, row: _Row, token_id: int, stopping_criteria: Any, scores: Any) -> None:
        row.append(token_id)
        if self._streamer is not None:
            self._streamer.put(torch.tensor([token_id]))
        ids = torch.tensor([row.token_ids], device=None if scores is None else scores.device)
        row.done = bool(stopping_criteria(ids, scores)[0])

    def _only_token(self, row: _Row) -> int | None:
        """Return the token that alone is legal: the model need not be asked for it."""
        if row.matcher is None or row.matcher.is_terminated():
            return None
        bitmask = allocate_token_bitmask(1, _guided_of(row.processors).vocabulary.vocab_size)
        row.matcher.fill_next_token_bitmask(bitmask, 0)
        legal = few_legal_tokens(bitmask[0], bitmask.shape[1] * 32, 1)
        return legal[0] if legal else None


def _guided_of(processors: Sequence[Any]) -> GuidedLogitsProcessor:
    return next(processor for processor in processors if isinstance(processor, GuidedLogitsProcessor))


def _pad_id(generation_config: Any) -> int:
    pad = getattr(generation_config, "_pad_token_tensor", None)
    return 0 if pad is None else int(pad)
