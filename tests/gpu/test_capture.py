"""Captured steps on a GPU: a thousand replays against the eager decoder, and what host nodes cost. Skipped without one."""

import gc
import time

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import gd_plugin as gd
from gd_plugin.decoding.hostfunc import num_registered

pytestmark = pytest.mark.timeout(240)
DEVICE = torch.device("cuda")
SLOTS, DRAFTS, COLUMNS, STOP = 3, 2, 64, 3
NUM_REPLAYS = 1000


class Engine:
    """Static buffers and a step that is kernels alone: forward, mask, verify, draft. No token is chosen on the host."""

    def __init__(self, decoder_class, *, kind, is_early=False, **options):
        factory = gd.GrammarMatcherFactory(
            gd.Vocabulary.from_bytes([b"a", b"b", b"c", None, b"ab", b"ca"], stop_token_ids=[STOP])
        )
        self.decoder = decoder_class(
            factory,
            max_num_sequences=SLOTS,
            vocab_size_padded=COLUMNS,
            max_num_draft_tokens=DRAFTS,
            device=DEVICE,
            **options,
        )
        self.kind, self.is_early = kind, is_early
        # the last one is not guided; nobody stops by choice, so that every guide goes on for ever
        self.guides = [gd.Guide.regex("(ab|ba|c)+"), gd.Guide.regex("(a|bc|cab)+"), None]
        table = torch.randn(97, COLUMNS, generator=torch.Generator().manual_seed(1))
        table[:, STOP] = -100.0
        self.table = table.to(DEVICE)
        self.new_tokens = torch.zeros((DRAFTS + 1, SLOTS), dtype=torch.int32, device=DEVICE)
        self.counts = torch.ones(SLOTS, dtype=torch.int32, device=DEVICE)
        self.drafted = torch.zeros(SLOTS, dtype=torch.int32, device=DEVICE)
        self.passes = torch.zeros((), dtype=torch.int64, device=DEVICE)
        self.target = torch.zeros((SLOTS * (DRAFTS + 1), COLUMNS), device=DEVICE)
        self.draft = torch.zeros((SLOTS, COLUMNS), device=DEVICE)
        self.positions = torch.arange(SLOTS * (DRAFTS + 1), device=DEVICE)

    def forward(self, logits, tokens):
        self.passes += 1
        logits.copy_(self.table[(7 * tokens.long() + self.positions[: len(tokens)] + 3 * self.passes) % 97])

    def step(self):
        if self.is_early:
            self.decoder.record_token_event()
        self.forward(self.target, self.new_tokens.t().reshape(-1))
        self.decoder.execute(self.target)
        best = self.target.argmax(dim=1).to(torch.int32).view(SLOTS, DRAFTS + 1)
        accepted = (best[:, :DRAFTS] == self.new_tokens[1:].t()).long().cumprod(dim=1).sum(dim=1)
        self.counts.copy_(accepted + 1)
        golden = best.gather(1, accepted[:, None])[:, 0]
        self.new_tokens[0] = golden
        self.drafted.copy_(golden)
        if self.kind == "rollback":
            self.decoder.rollback_rejected_batch(self.counts)
            self.new_tokens[1:] = (5 * golden + torch.arange(1, DRAFTS + 1, device=DEVICE)[:, None]) % 7 - 1
            return
        for draft_step in range(DRAFTS):
            self.decoder.add_draft_batch(self.drafted, self.counts if draft_step == 0 else None, draft_step)
            self.forward(self.draft, self.drafted)
            self.decoder.execute_draft_batch(self.draft, draft_step=draft_step)
            self.drafted.copy_(self.draft.argmax(dim=1))
            self.new_tokens[draft_step + 1] = self.drafted

    def batch(self, is_context=False):
        return [
            gd.GuidedRequest(
                guide=guide,
                request_id=slot,
                seq_slot=slot,
                prev_seq_slot=None if is_context else slot,
                is_context_init_state=is_context,
                is_last_context_chunk=is_context,
                is_generation_in_progress_state=not is_context,
            )
            for slot, guide in enumerate(self.guides)
        ]

    def start(self):
        """Run the prompts: the first golden tokens."""
        batch = self.batch(is_context=True)
        self.decoder.submit(batch)
        self.decoder.add_batch(batch)
        logits = self.table[:SLOTS].clone()
        assert self.decoder.execute(logits) == []
        self.new_tokens[0] = logits.argmax(dim=1)
        self.new_tokens[1:] = -1

    def run(self, replay=None):
        """What the masks of `NUM_REPLAYS` steps let through."""
        seen = []
        for _ in range(NUM_REPLAYS):
            self.decoder.add_batch(self.batch(), self.new_tokens)
            if replay is None:
                self.step()
            else:
                replay()
            seen.append((self.target.clone(), self.draft.clone(), self.new_tokens.clone(), self.counts.clone()))
        return [torch.stack(part).cpu() for part in zip(*seen, strict=True)]


def capture(engine):
    """Warm up on the prompt's batch, on a stream of its own as torch asks for, then capture; nothing of it may count."""
    static = [engine.new_tokens, engine.counts, engine.drafted, engine.passes]
    saved = [tensor.clone() for tensor in static]
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        for _ in range(2):
            engine.step()
    torch.cuda.current_stream().wait_stream(warm_up)
    engine.decoder.add_batch(engine.batch(), engine.new_tokens)
    graph = torch.cuda.CUDAGraph()
    with engine.decoder.capturing() as handle, torch.cuda.graph(graph):
        engine.step()
    for tensor, value in zip(static, saved, strict=True):
        tensor.copy_(value)
    return graph, handle


@pytest.mark.parametrize("is_early", [False, True], ids=["late", "early"])
@pytest.mark.parametrize("kind", ["loop", "rollback"])
def test_a_thousand_replays_are_the_eager_decoders_steps(kind, is_early):
    eager = Engine(gd.GuidedDecoder, kind=kind)
    eager.start()
    expected = eager.run()
    captured = Engine(gd.CapturableGuidedDecoder, kind=kind, is_early=is_early)
    captured.start()
    graph, _handle = capture(captured)
    got = captured.run(graph.replay)
    captured.decoder.drain_captured_host_functions()
    assert captured.decoder.take_failures(range(SLOTS)) == []
    for part, want in zip(got, expected, strict=True):
        assert torch.equal(part, want)
    # guided rows are masked, the unguided one is not
    banned = got[0].isinf().view(NUM_REPLAYS, SLOTS, DRAFTS + 1, COLUMNS).any(dim=3).any(dim=2)
    assert banned[:, :2].all() and not banned[:, 2].any()
    assert captured.decoder.num_advanced_tokens == eager.decoder.num_advanced_tokens
    captured.decoder.close()


def test_eager_steps_between_replays():
    eager, mixed = Engine(gd.GuidedDecoder, kind="loop"), Engine(gd.CapturableGuidedDecoder, kind="loop")
    for engine in (eager, mixed):
        engine.start()
    graph, _handle = capture(mixed)
    for step in range(100):
        eager.decoder.add_batch(eager.batch(), eager.new_tokens)
        eager.step()
        mixed.decoder.add_batch(mixed.batch(), mixed.new_tokens)
        if step % 3:
            graph.replay()
        else:
            mixed.step()
        assert torch.equal(mixed.target, eager.target) and torch.equal(mixed.new_tokens, eager.new_tokens)
    mixed.decoder.close()


def test_host_functions_live_as_long_as_their_handle():
    gc.collect()
    before = num_registered()
    engine = Engine(gd.CapturableGuidedDecoder, kind="loop")
    engine.start()
    graph, handle = capture(engine)
    # one a step of the target and of the draft loop
    assert num_registered() == before + len(handle) == before + 1 + DRAFTS
    engine.decoder.add_batch(engine.batch(), engine.new_tokens)
    graph.replay()
    engine.decoder.drain_captured_host_functions()
    graph.reset()
    handle.release()
    engine.decoder.close()
    del engine, handle
    gc.collect()
    assert num_registered() == before


@pytest.mark.parametrize("spin", [False, True], ids=["asleep", "spinning"])
def test_what_host_nodes_cost(spin):
    """No judgement: microseconds of a replay with and without its host functions, printed by `pytest -rP`."""
    try:
        engine = Engine(gd.CapturableGuidedDecoder, kind="rollback", spin=spin)
    except gd.GuidedDecodingError as error:
        pytest.skip(str(error))
    engine.start()
    guided, _handle = capture(engine)
    forward = torch.cuda.CUDAGraph()
    with torch.cuda.graph(forward):
        engine.forward(engine.target, engine.new_tokens.t().reshape(-1))
    done, times = torch.cuda.Event(), {}
    for name, graph in (("forward", forward), ("forward, two host nodes and a new batch", guided)):
        micros = []
        for _ in range(200):
            begun = time.perf_counter()
            if graph is guided:
                engine.decoder.add_batch(engine.batch(), engine.new_tokens)
            graph.replay()
            done.record()
            done.synchronize()
            micros.append(1e6 * (time.perf_counter() - begun))
        times[name] = round(sorted(micros)[len(micros) // 2], 1)
    engine.decoder.close()
    print("microseconds:", times)
