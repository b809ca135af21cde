"""The guide drafts: forced text and copies from the prompt are checked by the model in one forward pass.

In:  `model.generate(..., logits_processor=[p], custom_generate=grammar_drafting())`.
Out: what plain guided generation returns: the same tokens under greedy search, the same distribution under sampling.
Kept here: every emitted token is the model's own choice from processed scores of its own position; a draft only decides
which positions are computed together. Rows of a batch go on at their own speed: slots of refused drafts stay in the
cache and are masked out, positions are given explicitly.
Source: transformers 5.24, generation/utils.py (_sample, custom_generate) and cache_utils.py (crop, is_croppable).
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache, LogitsProcessorList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from gd_plugin.grammars.forced import Lookup, propose_draft
from gd_plugin.grammars.matcher import GrammarMatcher
from gd_plugin.hf.processor import GuidedLogitsProcessor

__all__ = ["grammar_drafting"]

# inputs that the loop hands on to the model; anything else means a model it does not know how to feed
_KNOWN_INPUTS = {
    "attention_mask",
    "cache",
    "cache_position",
    "logits_to_keep",
    "past_key_values",
    "position_ids",
    "use_cache",
}
# what may be called with one row of a batch: these know no row from another, and keep nothing a row
_ROW_LOCAL = {
    "EosTokenCriteria",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "ExponentialDecayLengthPenalty",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "GuidedLogitsProcessor",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
    "MaxLengthCriteria",
    "MaxTimeCriteria",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "MinPLogitsWarper",
    "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "StopStringCriteria",
    "SuppressTokensAtBeginLogitsProcessor",
    "SuppressTokensLogitsProcessor",
    "TemperatureLogitsWarper",
    "TopHLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
}
_OUTPUT_OPTIONS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


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
        ValueError: `num_draft_tokens` is below 1.
    """
    if not isinstance(num_draft_tokens, int) or isinstance(num_draft_tokens, bool) or num_draft_tokens < 1:
        raise ValueError(f"num_draft_tokens must be a positive number of tokens, got {num_draft_tokens!r}")
    return _Drafting(num_draft_tokens, prompt_lookup, streamer)


@dataclass
class _Row:
    """One row on its way.

    Attributes:
        token_ids: left padding, prompt and generated tokens.
        processors: what `generate` prepared, with the guide of this row alone.
        matcher: state behind the generated tokens; None once nothing can be drafted from it.
        num_cached: tokens of this row in the cache, padding not counted.
        block: tokens of the next forward pass: those not cached yet, then the draft.
        num_draft: length of the draft.
    """

    token_ids: list[int]
    processors: LogitsProcessorList
    matcher: GrammarMatcher | None
    lookup: Lookup | None
    num_cached: int = 0
    block: list[int] = field(default_factory=list)
    num_draft: int = 0
    done: bool = False

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        if self.lookup is not None:
            self.lookup.extend([token_id])
        if self.matcher is not None and not self.matcher.accept_token(token_id):
            self.matcher = None  # past its guide's end, or released from it


class _Drafting:
    def __init__(self, num_draft_tokens: int, prompt_lookup: bool, streamer: Any) -> None:
        self._num_draft_tokens = num_draft_tokens
        self._prompt_lookup = prompt_lookup
        self._streamer = streamer
        self._warned = False
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
            ValueError: no guided processor, or several; a streamer for several rows.
        """
        guided = [processor for processor in logits_processor if isinstance(processor, GuidedLogitsProcessor)]
        if len(guided) != 1:
            raise ValueError(
                f"grammar_drafting needs one GuidedLogitsProcessor in logits_processor, found {len(guided)}; "
                "pass logits_processor=[p]"
            )
        if self._streamer is not None and input_ids.shape[0] != 1:
            raise ValueError(f"a streamer follows one row, but there are {input_ids.shape[0]}; leave streamer out")
        self.num_forwards = 0
        reason = _why_not(model, input_ids, [*logits_processor, *stopping_criteria], generation_config, model_kwargs)
        if reason is not None:
            return self._plain(
                model, input_ids, reason, logits_processor, stopping_criteria, generation_config, model_kwargs
            )
        rows = [
            self._new_row(guided[0].for_row(index, len(input_ids)), guided[0], logits_processor, tokens)
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
            return GenerateDecoderOnlyOutput(sequences=sequences, **{_cache_name(model_kwargs): cache})
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
        if not self._warned:
            self._warned = True
            warnings.warn(f"grammar_drafting generates plainly here: {reason}", UserWarning, stacklevel=4)
        method = model._beam_search if generation_config.num_beams > 1 else model._sample
        return method(
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            **({} if generation_config.num_beams > 1 else {"streamer": self._streamer}),
            **model_kwargs,
        )

    def _new_row(
        self,
        alone: GuidedLogitsProcessor,
        guided: GuidedLogitsProcessor,
        logits_processor: LogitsProcessorList,
        tokens: list[int],
    ) -> _Row:
        processors = LogitsProcessorList([alone if p is guided else p for p in logits_processor])
        (grammar,) = alone.compiled
        matcher = None if grammar is None else grammar.create_matcher()
        return _Row(tokens, processors, matcher, Lookup(tokens) if self._prompt_lookup and grammar else None)

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
        cache_name = _cache_name(model_kwargs)
        cache = model_kwargs[cache_name]
        if hasattr(cache, "activate_past_recording"):
            cache.activate_past_recording()
        given = model_kwargs.get("attention_mask")
        flags = torch.ones_like(input_ids) if given is None else given.long()
        mask = flags.new_empty((len(rows), 0))  # slots in the cache that are in use
        for row in rows:
            row.block = list(row.token_ids)
            self._draft(row, generation_config)
        real = flags  # of the tokens before the draft, those that are no padding
        pad = _pad_id(generation_config)
        while not all(row.done for row in rows):
            width = max(len(row.block) for row in rows)
            block = torch.tensor([row.block + [pad] * (width - len(row.block)) for row in rows], device=device)
            in_use = torch.tensor(
                [[1] * len(row.block) + [0] * (width - len(row.block)) for row in rows], device=device
            )
            in_use[:, : real.shape[1]] &= real
            cached = torch.tensor([[row.num_cached] for row in rows], device=device)
            positions = (cached + in_use.cumsum(-1) - 1).clamp(min=0)
            kept = width - real.shape[1] + 1  # scores from the last token before the draft on
            logits = model(
                input_ids=block,
                attention_mask=torch.cat([mask, in_use], dim=1),
                position_ids=positions,
                use_cache=True,
                return_dict=True,
                **{cache_name: cache},
                **({"logits_to_keep": kept} if model._supports_logits_to_keep() else {}),
            ).logits[:, -kept:]
            self.num_forwards += 1
            for index, row in enumerate(rows):
                num_right = self._verify(row, logits[index], stopping_criteria, generation_config, device)
                in_use[index, real.shape[1] + num_right :] = 0
                if row.done:
                    in_use[index, real.shape[1] :] = 0
            mask = self._crop(cache, torch.cat([mask, in_use], dim=1))
            for row, used in zip(rows, mask.sum(-1).tolist(), strict=True):
                row.num_cached = used
                row.block = [row.token_ids[-1]]
                row.num_draft = 0
                if not row.done:
                    self._draft(row, generation_config)
            real = mask.new_ones((len(rows), 1))
        return cache

    def _crop(self, cache: Any, mask: torch.Tensor) -> torch.Tensor:
        """Cut off the slots at the end that no row uses."""
        used = mask.any(dim=0).nonzero()
        unused = mask.shape[1] - 1 - int(used[-1])
        if not unused:
            return mask
        cache.crop(-unused)
        return mask[:, :-unused]

    def _draft(self, row: _Row, generation_config: Any) -> None:
        if row.matcher is None or row.matcher.is_terminated():
            return
        room = generation_config.max_length - len(row.token_ids) - 1
        guided = _guided_of(row.processors)
        draft = propose_draft(
            row.matcher, guided.vocabulary, guided.spell_text, row.lookup, min(self._num_draft_tokens, room)
        )
        row.block += draft
        row.num_draft = len(draft)

    def _verify(
        self, row: _Row, logits: torch.Tensor, stopping_criteria: Any, generation_config: Any, device: torch.device
    ) -> int:
        """Append what the model chooses, as long as the draft agrees; return how much of the draft was right."""
        if row.done:
            return 0
        draft = row.block[len(row.block) - row.num_draft :] if row.num_draft else []
        for position in range(len(draft) + 1):
            ids = torch.tensor([row.token_ids], device=device)
            raw = logits[position : position + 1].to(copy=True, dtype=torch.float32, device=device)
            scores = row.processors(ids, raw)
            if generation_config.do_sample:
                chosen = int(torch.multinomial(scores.softmax(dim=-1), num_samples=1))
            else:
                chosen = int(scores.argmax(dim=-1))
            row.append(chosen)
            if self._streamer is not None:
                self._streamer.put(torch.tensor([chosen]))
            row.done = bool(stopping_criteria(torch.tensor([row.token_ids], device=device), scores)[0])
            if row.done or position == len(draft) or chosen != draft[position]:
                return position
        return len(draft)


def _guided_of(processors: Sequence[Any]) -> GuidedLogitsProcessor:
    return next(processor for processor in processors if isinstance(processor, GuidedLogitsProcessor))


def _cache_name(model_kwargs: dict[str, Any]) -> str:
    """The name of the cache: transformers 5.24 calls it `cache`, earlier versions `past_key_values`."""
    return "cache" if "cache" in model_kwargs else "past_key_values"


def _pad_id(generation_config: Any) -> int:
    pad = getattr(generation_config, "_pad_token_tensor", None)
    return 0 if pad is None else int(pad)


def _why_not(
    model: Any,
    input_ids: torch.Tensor,
    callbacks: Sequence[Any],
    generation_config: Any,
    model_kwargs: dict[str, Any],
) -> str | None:
    """Say what the loop cannot serve here, or None."""
    if getattr(model.config, "is_encoder_decoder", False):
        return "the model is not a causal decoder"
    if generation_config.num_beams > 1:
        return "beams are reordered at every step; pass num_beams=1"
    if input_ids.shape[1] == 0 or "inputs_embeds" in model_kwargs:
        return "the prompt is given as inputs_embeds; pass input_ids"
    unknown = sorted(name for name in set(model_kwargs) - _KNOWN_INPUTS if model_kwargs[name] is not None)
    if unknown:
        return f"the model takes further inputs ({', '.join(unknown)})"
    cache = model_kwargs.get(_cache_name(model_kwargs))
    if (
        not isinstance(cache, DynamicCache)
        or type(cache) is not DynamicCache
        or not getattr(cache, "is_croppable", True)
    ):
        return f"the cache ({type(cache).__name__}) cannot be cut back; pass cache_implementation='dynamic'"
    if cache.get_seq_length():
        return "past_key_values already holds tokens"
    if any(getattr(layer, "is_sliding", False) for layer in getattr(cache, "layers", ())):
        return "the model's attention slides, and slots of refused drafts would count in its window"
    for name in _OUTPUT_OPTIONS:
        if getattr(generation_config, name, False):
            return f"{name} needs one forward pass a token"
    names = {type(callback).__name__ for callback in callbacks}
    if "UnbatchedClassifierFreeGuidanceLogitsProcessor" in names:
        return "guidance_scale runs the model a second time at every step"
    if input_ids.shape[0] > 1 and (several := sorted(names - _ROW_LOCAL)):
        return f"{', '.join(several)} may tell the rows of a batch apart, and rows are processed one by one"
    return None
