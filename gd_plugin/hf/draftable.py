"""What the drafting loop of gd_plugin.hf.drafting can serve, and what it calls things in each version of transformers.

In:  what `generate` hands to its custom callable.      Out: why it must be generated plainly, or None.
Source: transformers 5.24, generation/utils.py and cache_utils.py (is_croppable).
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

__all__ = ["ROW_LOCAL", "cache_name", "has_mask", "why_not"]

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
ROW_LOCAL = {
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


def has_mask(model_kwargs: dict[str, Any]) -> bool:
    """Tell whether `generate` passes an attention mask."""
    return model_kwargs.get("attention_mask") is not None


def cache_name(model_kwargs: dict[str, Any]) -> str:
    """The name of the cache: transformers 5.24 calls it `cache`, earlier versions `past_key_values`."""
    return "cache" if "cache" in model_kwargs else "past_key_values"


def why_not(
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
    cache = model_kwargs.get(cache_name(model_kwargs))
    if cache is None and not (generation_config.use_cache and model_kwargs.get("use_cache", True)):
        return "use_cache=False leaves no cache that a draft could be taken back from; leave it out"
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
    mask = model_kwargs.get("attention_mask")
    if mask is not None and (mask.dim() != 2 or bool((mask.diff(dim=1) < 0).any())):
        return "the attention mask does more than leave out padding on the left"
    for name in _OUTPUT_OPTIONS:
        if getattr(generation_config, name, False):
            return f"{name} needs one forward pass a token"
    names = {type(callback).__name__ for callback in callbacks}
    if "UnbatchedClassifierFreeGuidanceLogitsProcessor" in names:
        return "guidance_scale runs the model a second time at every step"
    if input_ids.shape[0] > 1 and (several := sorted(names - ROW_LOCAL)):
        return f"{', '.join(several)} may tell the rows of a batch apart, and rows are processed one by one"
    return None
