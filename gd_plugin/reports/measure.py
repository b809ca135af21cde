"""Figures of one step, by plain torch: what the mask took away and what that did to the distribution.

In:  scores before the mask and after it, [B, V].      Out: one tensor a figure, on their device; nothing waits for it.
All of it is about temperature 1: what comes behind the processor (temperature, top-k, top-p) is not seen.
"""

from typing import NamedTuple

import torch

__all__ = ["Chosen", "Figures", "measure_chosen", "measure_step"]


class Figures(NamedTuple):
    """Figures of the rows of one step; B rows, K alternatives, S stop tokens.

    Attributes:
        removed_mass: [B] probability that the mask removed, 0 to 1.
        log_kept: [B] natural logarithm of the probability that is left; -inf where nothing was, and the processor has let
            all that is legal through alike.
        entropy_before: [B] in nats.
        entropy_after: [B] in nats, of what is left, renormalised.
        num_allowed: [B] columns with a score above -inf after the mask and the budget.
        overruled: [B] whether a banned token had a higher score than all that are left.
        highest: [B] highest score before the mask.
        log_sum: [B] logarithm of the sum of exp(score - highest); apart from `highest`, which would cost it digits.
        banned_ids, banned: [B, K] the likeliest of the banned tokens and their probabilities before the mask; below 0
            where fewer are banned.
        allowed_ids, allowed: [B, K] the same of those that are left.
        stops: the stop tokens as if each had been chosen.
    """

    removed_mass: torch.Tensor
    log_kept: torch.Tensor
    entropy_before: torch.Tensor
    entropy_after: torch.Tensor
    num_allowed: torch.Tensor
    overruled: torch.Tensor
    highest: torch.Tensor
    log_sum: torch.Tensor
    banned_ids: torch.Tensor
    banned: torch.Tensor
    allowed_ids: torch.Tensor
    allowed: torch.Tensor
    stops: "Chosen"


class Chosen(NamedTuple):
    """Figures of chosen tokens; any shape.

    Attributes:
        log_probability: natural logarithm of the probability before the mask.
        rank: 1 for the likeliest token before the mask; tokens of equal score share the best rank among them.
    """

    log_probability: torch.Tensor
    rank: torch.Tensor


def measure_step(before: torch.Tensor, after: torch.Tensor, stop_ids: torch.Tensor, num_alternatives: int) -> Figures:
    """Return the figures of a step.

    Args:
        before: float32 or float64 [B, V], scores as the processor got them.
        after: [B, V] of any floating type, scores as it returned them.
        stop_ids: int64 [S], below V.
        num_alternatives: K, at most V.
    """
    highest = before.amax(dim=-1)
    # two wide tensors serve all that follows: on a CPU, fresh memory costs more than what is done with it
    probabilities = (before - highest[:, None]).exp_()
    total = probabilities.sum(dim=-1)
    probabilities /= total[:, None]
    work = torch.special.entr(probabilities)
    entropy_before = work.sum(dim=-1)
    kept = after > float("-inf")
    nothing, never = before.new_tensor(-1.0), before.new_tensor(float("-inf"))
    banned = torch.where(kept, nothing, probabilities, out=work).topk(num_alternatives)
    removed_mass = work.clamp_(min=0.0).sum(dim=-1)
    allowed = torch.where(kept, probabilities, nothing, out=work).topk(num_alternatives)
    highest_left = torch.where(kept, before, never, out=work).amax(dim=-1)
    # not from the probabilities: where the mask leaves next to nothing of them, they have no digits
    work.copy_(after)
    work -= work.amax(dim=-1, keepdim=True)
    work.exp_()
    total_left = work.sum(dim=-1)
    work /= total_left[:, None]
    log_sum = total.log()
    stops = [measure_chosen(before, highest, log_sum, stop.expand(len(before))) for stop in stop_ids]
    no_stop = total.new_empty((len(before), 0))
    return Figures(
        removed_mass=removed_mass,
        log_kept=highest_left - highest + total_left.log() - log_sum,
        entropy_before=entropy_before,
        entropy_after=torch.special.entr(work, out=work).sum(dim=-1),
        num_allowed=kept.sum(dim=-1),
        overruled=highest > highest_left,
        highest=highest,
        log_sum=log_sum,
        banned_ids=banned.indices,
        banned=banned.values,
        allowed_ids=allowed.indices,
        allowed=allowed.values,
        stops=Chosen(
            torch.stack([stop.log_probability for stop in stops], dim=1) if stops else no_stop,
            torch.stack([stop.rank for stop in stops], dim=1) if stops else no_stop.long(),
        ),
    )


def measure_chosen(
    before: torch.Tensor, highest: torch.Tensor, log_sum: torch.Tensor, token_ids: torch.Tensor
) -> Chosen:
    """Return the figures of one token a row of `before` [P, V]."""
    scores = before.gather(1, token_ids[:, None])
    return Chosen(scores[:, 0] - highest - log_sum, (before > scores).sum(dim=-1) + 1)
