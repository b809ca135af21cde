"""A small continuous-batching engine on a `transformers` model, guided by `GuidedDecoder` as a production engine would be.

Requests are admitted while others run, prompts are processed in chunks, several drafts are verified at once, and a
request can be preempted and comes back. Run it:  python examples/mini_engine.py
"""

import inspect
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

import gd_plugin as gd

# Proposes at most `num_tokens` tokens behind a text; anything goes, the target checks each of them.
Drafter = Callable[[list[int], int], list[int]]


@dataclass(eq=False)
class Request:
    """One prompt and what has become of it."""

    prompt: list[int]
    guide: gd.Guide | None = None
    max_new_tokens: int = 32
    temperature: float = 0.0  # 0 is greedy
    seed: int = 0
    output: list[int] = field(default_factory=list)
    error: str | None = None
    finished: bool = False
    drafts: list[int] = field(default_factory=list)
    reads_prompt: bool = True
    generator: torch.Generator | None = None
    guide_drafter: gd.Drafter | None = None
    request_id: int = field(default_factory=itertools.count().__next__)

    @property
    def tokens(self) -> list[int]:
        """Prompt and output: what the model is to have read, but for the last token."""
        return self.prompt + self.output


class Lanes:
    """A model with one row of KV cache a slot. Rows differ in length: columns that are not a row's own are masked."""

    def __init__(self, model: torch.nn.Module, num_slots: int) -> None:
        self.model = model
        self.read: list[list[int]] = [[] for _ in range(num_slots)]  # tokens in each row
        self._columns: list[list[int]] = [[] for _ in range(num_slots)]  # the cache column of each of them
        # renamed in transformers 5.24
        takes_cache = "cache" in inspect.signature(model.forward).parameters
        self._cache_name = "cache" if takes_cache else "past_key_values"
        self._cache = None
        self._num_columns = 0

    def keep(self, slot: int, num_tokens: int) -> None:
        """Forget what the row has read behind its first `num_tokens` tokens; its columns become holes."""
        del self.read[slot][num_tokens:], self._columns[slot][num_tokens:]

    @torch.no_grad()
    def feed(self, blocks: dict[int, list[int]]) -> torch.Tensor:
        """Let rows read one block each in a single forward pass; return logits [slots, width, V]."""
        num_slots, width = len(self.read), max(map(len, blocks.values()))
        ids = torch.zeros((num_slots, width), dtype=torch.long)
        positions = torch.zeros((num_slots, width), dtype=torch.long)
        mask = torch.zeros((num_slots, self._num_columns + width), dtype=torch.long)
        # padding stands behind a block, so no token sees it; it sees itself, so that no row is without a column
        mask[:, self._num_columns :] = 1
        for slot, block in blocks.items():
            start = len(self.read[slot])
            mask[slot, self._columns[slot]] = 1
            # a placeholder among the drafts is read as something, and never accepted
            ids[slot, : len(block)] = torch.tensor(block).clamp(min=0)
            positions[slot] = torch.arange(start, start + width)
            self.read[slot] += block
            self._columns[slot] += range(self._num_columns, self._num_columns + len(block))
        device = next(self.model.parameters()).device
        out = self.model(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            position_ids=positions.to(device),
            use_cache=True,
            **{self._cache_name: self._cache},
        )
        self._cache, self._num_columns = out[self._cache_name], self._num_columns + width
        return out.logits


@dataclass
class Turn:
    """What one request does in one step."""

    slot: int
    request: Request
    block: list[int]  # tokens it reads
    is_prompt: bool  # a chunk of its prompt, or the golden token and its drafts
    is_last_chunk: bool

    def snapshot(self) -> gd.GuidedRequest:
        """What the decoder must know."""
        request = self.request
        return gd.GuidedRequest(
            guide=request.guide,
            request_id=request.request_id,
            seq_slot=self.slot,
            is_context_init_state=self.is_prompt,
            is_last_context_chunk=self.is_last_chunk,
            is_generation_in_progress_state=not self.is_prompt,
            new_token=None if self.is_prompt else request.output[-1],
            draft_tokens=None if self.is_prompt else request.drafts,
            # a request that was preempted comes back with what it has emitted
            history=request.output if self.is_prompt else None,
        )

    def rows(self, draft_len: int) -> list[int]:
        """Positions in the block whose logits are masked, in the decoder's layout."""
        if self.is_prompt:
            return [len(self.block) - 1]
        # with fewer drafts than others have, the rows left over repeat the last one and are not used
        return [min(position, len(self.block) - 1) for position in range(draft_len + 1)]


class MiniEngine:
    """Slots, a queue and one step.

    Args:
        model: a causal language model.
        vocabulary: its vocabulary.
        num_slots: requests that run at once.
        num_drafts: K, drafts verified in one step.
        drafter: proposes drafts without looking at logits, `prompt_lookup` for one; "guide" is what each request's
            guide forces, and copies that it allows.
        draft_model: proposes drafts itself, guided too.
        chunk_tokens: prompt tokens read in one step.
        config: settings of the decoder.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        vocabulary: gd.Vocabulary,
        *,
        num_slots: int = 4,
        num_drafts: int = 0,
        drafter: Drafter | Literal["guide"] | None = None,
        draft_model: torch.nn.Module | None = None,
        chunk_tokens: int = 16,
        config: gd.GuidedDecodingConfig | None = None,
    ) -> None:
        self.vocabulary = vocabulary
        self.lanes = Lanes(model, num_slots)
        self.draft_lanes = None if draft_model is None else Lanes(draft_model, num_slots)
        self.drafter = drafter
        self.num_drafts = num_drafts if drafter or draft_model else 0
        self.chunk_tokens = chunk_tokens
        self.slots: list[Request | None] = [None] * num_slots
        self.waiting: deque[Request] = deque()
        self.decoder = gd.GuidedDecoder(
            gd.GrammarMatcherFactory(vocabulary, config=config),
            max_num_sequences=num_slots,
            vocab_size_padded=vocabulary.vocab_size,
            max_num_draft_tokens=self.num_drafts,
            device=next(model.parameters()).device,
            config=config,
        )

    def add(self, request: Request) -> Request:
        """Queue a request; its guide is compiled while it waits."""
        self.waiting.append(request)
        self.decoder.submit([gd.GuidedRequest(guide=request.guide, request_id=request.request_id)])
        return request

    def run(self) -> None:
        """Step until every request has finished."""
        while self.waiting or any(self.slots):
            self.step()

    def preempt(self, slot: int) -> None:
        """Take the request out of its slot and queue it in front; it comes back with its history."""
        request, self.slots[slot] = self.slots[slot], None
        if request is not None:
            request.drafts, request.reads_prompt = [], True
            self.waiting.appendleft(request)

    def step(self) -> None:
        """Admit, read, mask, sample, settle, draft."""
        self._admit()
        turns = [self._turn(slot, request) for slot, request in enumerate(self.slots) if request is not None]
        if not turns:
            return
        longest = max(len(turn.request.drafts) for turn in turns)
        # a draft model's loop is as long as the layout
        draft_len = longest if self.draft_lanes is None else self.num_drafts
        self.decoder.add_batch([turn.snapshot() for turn in turns], runtime_draft_len=draft_len)
        # on a GPU the grammar work and the copy of its masks overlap this forward pass
        logits = self.lanes.feed({turn.slot: turn.block for turn in turns})
        masked = torch.stack([logits[turn.slot, row] for turn in turns for row in turn.rows(draft_len)])
        failed = dict(self.decoder.execute(masked))

        counts, first = [], 0
        for turn in turns:
            counts.append(self._emit(turn, masked[first:]))
            first += len(turn.rows(draft_len))
            # failures are acted upon after sampling: the step was the same for everybody
            if turn.request.request_id in failed:
                turn.request.finished, turn.request.error = True, failed[turn.request.request_id]
        self._draft(turns, torch.tensor(counts, dtype=torch.int32, device=masked.device))
        for turn in turns:
            if turn.request.finished:
                self.slots[turn.slot] = None

    def _admit(self) -> None:
        for slot, occupant in enumerate(self.slots):
            if occupant is None and self.waiting:
                self.slots[slot] = self.waiting.popleft()
                self.lanes.keep(slot, 0)
                if self.draft_lanes is not None:
                    self.draft_lanes.keep(slot, 0)

    def _turn(self, slot: int, request: Request) -> Turn:
        unread = request.tokens[len(self.lanes.read[slot]) :]
        if request.reads_prompt:
            # so is read what a request emitted before it was preempted
            block = unread[: self.chunk_tokens]
            return Turn(slot, request, block, is_prompt=True, is_last_chunk=len(block) == len(unread))
        return Turn(slot, request, unread + request.drafts, is_prompt=False, is_last_chunk=False)

    def _emit(self, turn: Turn, masked: torch.Tensor) -> int:
        """Sample the turn's rows as far as drafts agree; return the tokens emitted, bonus included."""
        request, slot = turn.request, turn.slot
        if turn.is_prompt and not turn.is_last_chunk:
            return 1
        request.reads_prompt = False
        drafts, num_emitted = [] if turn.is_prompt else request.drafts, 0
        num_read = len(self.lanes.read[slot]) - len(drafts)
        most = self.decoder.max_acceptable_tokens[slot] if request.guide else len(drafts) + 1
        for row in range(min(len(drafts) + 1, most)):
            token = self._sample(request, masked[row])
            request.output.append(token)
            num_emitted += 1
            if token in self.vocabulary.stop_token_set or len(request.output) >= request.max_new_tokens:
                request.finished = True
                break
            if row == len(drafts) or token != drafts[row]:
                break
        # the columns of rejected drafts become holes
        self.lanes.keep(slot, num_read + num_emitted - 1)
        request.drafts = []
        return num_emitted

    def _sample(self, request: Request, row: torch.Tensor) -> int:
        if request.temperature == 0:
            return int(row.argmax())
        if request.generator is None:
            request.generator = torch.Generator().manual_seed(request.seed)
        weights = torch.softmax(row.float().cpu() / request.temperature, dim=-1)
        return int(torch.multinomial(weights, 1, generator=request.generator))

    def _draft(self, turns: Sequence[Turn], counts: torch.Tensor) -> None:
        """Undo what was rejected and propose drafts for the next step."""
        drafting = [turn for turn in turns if not (turn.request.reads_prompt or turn.request.finished)]
        if self.draft_lanes is not None:
            self._draft_with_model(turns, drafting, counts)
            return
        self.decoder.rollback_rejected_batch(counts)
        for turn in drafting:
            if self.drafter == "guide":
                turn.request.drafts = self._draft_with_guide(turn)
            elif self.drafter is not None:
                turn.request.drafts = self.drafter(turn.request.tokens, self.num_drafts)[: self.num_drafts]

    def _draft_with_guide(self, turn: Turn) -> list[int]:
        request = turn.request
        if request.guide is None:
            return []
        if request.guide_drafter is None:
            request.guide_drafter = gd.Drafter(self.vocabulary)
        request.guide_drafter.extend(request.tokens[request.guide_drafter.num_tokens :])
        matcher = self.decoder.grammar_matchers[turn.slot]
        if matcher is None:
            return []
        # the golden token is consumed by the next step only
        ahead = matcher.fork()
        return request.guide_drafter.propose(ahead, self.num_drafts) if ahead.accept_token(request.output[-1]) else []

    def _draft_with_model(self, turns: Sequence[Turn], drafting: Sequence[Turn], counts: torch.Tensor) -> None:
        """Run the draft model's loop under the masks. Its step 0 undoes what was rejected, its last step the loop."""
        lanes, tokens = self.draft_lanes, torch.zeros_like(counts)
        for turn in drafting:
            position = turns.index(turn)
            tokens[position] = turn.request.output[-1]
            shared = _shared_length(lanes.read[turn.slot], turn.request.tokens)
            # at least the golden token is read, for its logits
            lanes.keep(turn.slot, min(shared, len(turn.request.tokens) - 1))
        for draft_step in range(self.num_drafts):
            self.decoder.add_draft_batch(tokens, counts, draft_step)
            rows = torch.zeros((len(turns), self.vocabulary.vocab_size), device=counts.device)
            if drafting:
                blocks = {
                    turn.slot: (turn.request.tokens + turn.request.drafts)[len(lanes.read[turn.slot]) :]
                    for turn in drafting
                }
                logits = lanes.feed(blocks)
                for turn in drafting:
                    rows[turns.index(turn)] = logits[turn.slot, len(blocks[turn.slot]) - 1]
            self.decoder.execute_draft_batch(rows, draft_step=draft_step)
            tokens = rows.argmax(dim=-1).to(torch.int32)
            for turn in drafting:
                turn.request.drafts.append(int(tokens[turns.index(turn)]))


def _shared_length(left: list[int], right: list[int]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((position for position, (a, b) in pairs if a != b), min(len(left), len(right)))


def prompt_lookup(tokens: list[int], num_tokens: int) -> list[int]:
    """Propose what followed the last two tokens the last time they stood together."""
    for start in range(len(tokens) - 3, -1, -1):
        if tokens[start : start + 2] == tokens[-2:]:
            return tokens[start + 2 : start + 2 + num_tokens]
    return []


def main() -> None:
    """Serve a few requests with and without drafts on SmolLM2 and print what they cost."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from gd_plugin.testing.real_model import smollm2_folder

    folder = smollm2_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    vocabulary = gd.Vocabulary.from_tokenizer(tokenizer, vocab_size=model.config.vocab_size)
    person = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    guides = [gd.Guide.json_schema(person), gd.Guide.choice(["yes", "no"]), None]
    questions = ["Ann is 31. As JSON:", "Is water wet?", "Count to five:"]
    for num_drafts in (0, 8):
        engine = MiniEngine(model, vocabulary, num_slots=2, num_drafts=num_drafts, drafter="guide")
        requests = []
        for question, guide in zip(questions, guides, strict=True):
            prompt = tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
            )
            requests.append(engine.add(Request(list(prompt), guide, max_new_tokens=24)))
        steps = 0
        while engine.waiting or any(engine.slots):
            engine.step()
            steps += 1
        print(f"{num_drafts} drafts: {steps} steps")
        for question, request in zip(questions, requests, strict=True):
            print(f"  {question} {tokenizer.decode(request.output)!r} {request.error or ''}")


if __name__ == "__main__":
    main()
