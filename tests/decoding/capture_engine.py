"""A small engine for tests of captured steps: the same program on any device, with any decoder, in any schedule.

All that depends on tokens runs in kernels, so the host may run ahead of the device. Kernels are plain Python on tensors
whose reads and writes are declared. A program is drawn from a seed of its own and makes the same calls on every device.
"""

import gc
import random

import torch

import gd_plugin as gd
from gd_plugin.decoding import hostfunc

SLOTS, COLUMNS, STOP = 3, 64, 15
GUIDES = [gd.Guide.json(), gd.Guide.regex("(a|b)+c?"), gd.Guide.choice(["ab", "abc", "{1}"]), None]
# forward passes by token and position
TABLE = torch.randn(97, COLUMNS, generator=torch.Generator().manual_seed(0))
TABLE[:, STOP] += 1.0


def num_registered():
    """Host functions that are registered, without those that only wait to be collected."""
    gc.collect()
    return hostfunc.num_registered()


class Engine:
    """Args: a decoder, its device, its K; `captures`: steps of generation may be graphs."""

    def __init__(self, decoder, device, drafts, *, captures, keeps_lock=lambda wait: wait()):
        self.decoder, self.device, self.drafts = decoder, device, drafts
        self.captures, self.keeps_lock = captures, keeps_lock
        self.new_tokens = device.empty((drafts + 1) * SLOTS).view(drafts + 1, SLOTS)
        self.counts, self.drafted = device.empty(SLOTS), device.empty(SLOTS)
        # what the device has done: masked logits of every pass, tokens by request
        self.log, self.emitted, self.passes = [], {}, 0
        self.owners = [None] * SLOTS  # slot -> request id, as the device sees it
        self.running = {}  # slot -> (request id, guide)
        self.graphs, self.failures = {}, []

    # kernels ---------------------------------------------------------------------------------------------------------

    def forward(self, logits, slots, draft_len):
        """Target logits: a context row a new request, draft_len + 1 rows any other."""

        def target_forward():
            self.passes += 1
            tokens = self.new_tokens[: draft_len + 1, slots].t().reshape(-1).tolist()
            logits.copy_(TABLE[[(7 * token + 3 * row + self.passes) % 97 for row, token in enumerate(tokens)]])

        self.device.launch(target_forward, self.device.main(), reads=[self.new_tokens], writes=[logits])

    def verify(self, logits, slots, draft_len, is_context):
        """Accept drafts greedily, emit a bonus token, note the counts; the next drafts are proposed as a drafter would."""

        def verify():
            self.log.append(logits.clone())
            best = logits.argmax(dim=1).view(len(slots), draft_len + 1).tolist()
            for position, slot in enumerate(slots):
                drafts = [] if is_context else self.new_tokens[1 : draft_len + 1, slot].tolist()
                tokens = best[position]
                accepted = 0
                while accepted < len(drafts) and drafts[accepted] == tokens[accepted]:
                    accepted += 1
                self.emitted.setdefault(self.owners[slot], []).extend(tokens[: accepted + 1])
                self.counts[position] = accepted + 1
                self.new_tokens[0, slot] = self.drafted[position] = tokens[accepted]
                for step in range(self.drafts):
                    # legal ones, illegal ones, placeholders
                    self.new_tokens[step + 1, slot] = (5 * tokens[accepted] + 3 * step + self.passes) % 17 - 1

        self.device.launch(
            verify, self.device.main(), reads=[logits], writes=[self.new_tokens, self.counts, self.drafted]
        )

    def draft(self, logits, slots, draft_step):
        def draft_forward():
            self.passes += 1
            logits.copy_(
                TABLE[[(11 * token + draft_step + self.passes) % 97 for token in self.drafted.tolist()]][: len(slots)]
            )

        def take():
            self.log.append(logits.clone())
            tokens = logits.argmax(dim=1).to(torch.int32)
            self.drafted[: len(slots)] = tokens
            self.new_tokens[draft_step + 1, slots] = tokens

        main, n = self.device.main(), len(slots)
        self.decoder.add_draft_batch(self.drafted[:n], self.counts[:n] if draft_step == 0 else None, draft_step)
        self.device.launch(draft_forward, main, reads=[self.drafted], writes=[logits])
        self.check(self.decoder.execute_draft_batch(logits, draft_step=draft_step))
        self.device.launch(take, main, reads=[logits], writes=[self.drafted, self.new_tokens])

    # steps -----------------------------------------------------------------------------------------------------------

    def check(self, failures):
        self.failures += failures or []

    def step(self, logits, draft_logits, slots, draft_len, mode, is_context=False):
        """One pass of the target and what follows it, to be captured or not."""
        kind, is_early, warms_up = mode
        if self.captures and is_early and not is_context:
            self.decoder.record_token_event()
        if warms_up:
            # a pass whose result nobody uses; it takes the batch, and the next one finds none
            scratch = self.memory(len(logits))
            self.forward(scratch, slots, draft_len)
            self.check(self.decoder.execute(scratch))
        self.forward(logits, slots, draft_len)
        self.check(self.decoder.execute(logits))
        self.verify(logits, slots, draft_len, is_context)
        if kind == "loop":
            for draft_step in range(draft_len):
                self.draft(draft_logits, slots, draft_step)
        elif self.drafts:
            self.check(self.decoder.rollback_rejected_batch(self.counts[: len(slots)]))

    def add(self, slots, draft_len, is_context):
        requests = []
        for slot in slots:
            request_id, guide = self.running[slot]
            requests.append(
                gd.GuidedRequest(
                    guide=guide,
                    request_id=request_id,
                    seq_slot=slot,
                    prev_seq_slot=None if is_context else slot,
                    is_context_init_state=is_context,
                    is_last_context_chunk=is_context,
                    is_generation_in_progress_state=not is_context,
                )
            )
        if is_context:
            self.decoder.submit(requests)
        self.decoder.add_batch(requests, None if is_context else self.new_tokens, draft_len)

    def context(self, slots, warms_up):
        def admit(ids=tuple(self.running[slot][0] for slot in slots)):
            for slot, request_id in zip(slots, ids, strict=True):
                self.owners[slot] = request_id

        self.add(slots, 0, True)
        self.device.launch(admit, self.device.main())
        logits = self.memory(len(slots))
        self.step(logits, None, slots, 0, ("rollback", False, warms_up), is_context=True)
        if self.captures and self.decoder.active:
            self.wait_with_lock()

    def generate(self, slots, draft_len, mode, as_graph):
        self.add(slots, draft_len, False)
        key = (tuple(slots), draft_len, mode)
        if not (as_graph and self.captures):
            memory = self.memory(len(slots) * (draft_len + 1)), self.memory(len(slots))
            self.step(*memory, slots, draft_len, mode)
            # a step without a guided request waits for nothing, and replays may be pending
            if self.captures and self.decoder.active:
                self.wait_with_lock()
            return
        if key not in self.graphs:
            memory = self.memory(len(slots) * (draft_len + 1)), self.memory(len(slots))
            with self.decoder.capturing() as handle, self.device.capture() as graph:
                self.step(*memory, slots, draft_len, mode)
            self.graphs[key] = graph, handle
        self.graphs[key][0].replay()

    def memory(self, rows):
        return torch.zeros(rows, COLUMNS)

    def wait_with_lock(self):
        """What an engine does that may keep the lock: an eager call has waited for its host functions."""
        event = self.device.event()
        self.device.record(event, self.device.main())
        self.keeps_lock(lambda: self.device.synchronize(event))

    def synchronize(self):
        """Read what was emitted; end what is over."""
        if self.captures:
            self.decoder.drain_captured_host_functions()
        self.wait_with_lock()
        self.check(self.decoder.take_failures([]) if self.captures else [])
        for slot, (request_id, _guide) in list(self.running.items()):
            if STOP in self.emitted.get(request_id, ()) or len(self.emitted[request_id]) > 12:
                del self.running[slot]


def run_program(engine, seed, num_steps=10):
    """Make the calls of a program: steps of several kinds, the host running ahead in between."""
    rng, next_id = random.Random(seed), 0
    for _ in range(num_steps):
        free = [slot for slot in range(SLOTS) if slot not in engine.running]
        if free and (not engine.running or rng.random() < 0.4):
            admitted = rng.sample(free, rng.randint(1, len(free)))
            for slot in admitted:
                engine.running[slot] = (next_id, rng.choice(GUIDES))
                next_id += 1
            engine.context(admitted, rng.random() < 0.3)
        else:
            slots = rng.sample(sorted(engine.running), rng.randint(1, len(engine.running)))
            draft_len = rng.randint(0, engine.drafts)
            mode = (rng.choice(["loop", "rollback"]), rng.random() < 0.5, rng.random() < 0.2)
            engine.generate(slots, draft_len, mode, rng.random() < 0.7)
        if rng.random() < 0.3:
            engine.synchronize()
    engine.synchronize()
