"""Ranks: shards of the logits, pruned vocabularies, one decision about grammars for a group."""

import os
import tempfile
from multiprocessing import get_context

import pytest
import torch
import torch.multiprocessing as multiprocessing

import gd_plugin as gd
from gd_plugin.testing import SimulatedDevice

WIDTHS = [(64, 1), (64, 3), (61, 2), (64, 4)]


@pytest.mark.parametrize(("width", "world_size"), WIDTHS)
def test_shards_side_by_side_are_the_whole(kit, factory, width, world_size):
    whole = torch.randn(4, width)
    parts = []
    for rank in range(world_size):
        shard = gd.VocabShard(rank, world_size, width)
        decoder = gd.GuidedDecoder(
            factory, max_num_sequences=1, vocab_size_padded=width, max_num_draft_tokens=3, device="cpu", shard=shard
        )
        kit.step(decoder, kit.context(kit.JSON))
        kit.settle(decoder, 1)
        part = whole[:, shard.start : shard.stop].clone()
        decoder.add_batch([kit.generation(kit.JSON, '{"a"')])
        assert decoder.execute(part) == []
        parts.append(part)
    expected = whole.clone()
    for row, text in enumerate(["{", '{"', '{"a', '{"a"']):
        banned = [token for token in range(width) if not accepts(kit, factory, text, token)]
        expected[row, banned] = float("-inf")
    assert torch.equal(torch.cat(parts, dim=1), expected)


def accepts(kit, factory, text, token):
    matcher = factory.create(kit.JSON)
    return all(map(matcher.accept_token, [*kit.ids(text), token]))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_pruned_draft_vocabulary_in_shards(kit, factory, world_size):
    # draft columns stand for these tokens
    tokens = torch.tensor([0, 1, 4, 5, 7, 8, 11, 15])
    d2t = (tokens - torch.arange(8)).to(torch.int32)
    parts = []
    for rank in range(world_size):
        shard = gd.VocabShard(rank, world_size, 8)
        decoder = kit.decoder(factory, slots=1, draft_shard=shard)
        kit.step(decoder, kit.context(kit.JSON))
        decoder.add_draft_batch(torch.tensor(kit.ids("{"), dtype=torch.int32), torch.ones(1, dtype=torch.int32))
        part = torch.zeros(1, shard.stop - shard.start)
        assert decoder.execute_draft_batch(part, d2t) == []
        parts.append(part)
    legal = [accepts(kit, factory, "{", token) for token in tokens.tolist()]
    assert torch.cat(parts, dim=1)[0].isfinite().tolist() == legal


def test_a_stage_without_logits_keeps_its_state(kit, factory):
    decoder = kit.decoder(factory)
    decoder.add_batch([kit.context(kit.JSON)])
    assert decoder.execute(None) == []
    kit.settle(decoder, 1)
    decoder.add_batch([kit.generation(kit.JSON, '{"a"')])
    assert decoder.execute(None) == []
    assert decoder.num_advanced_tokens[0] == 4


# a group of processes -----------------------------------------------------------------------------------------------


class RankedFactory:
    """Compiles at once, never, or not at all, and differently on each rank: only rank 0's view may count."""

    def __init__(self, rank):
        from concurrent.futures import Future

        from gd_plugin.grammars.compiler import GrammarMatcherFactory

        strings = [text.encode() for text in ["{", "}", "[", "]", '"', ":", ",", "a", "b", "c", "1", "2"]]
        self.rank = rank
        self.vocabulary = gd.Vocabulary.from_bytes([*strings, None], stop_token_ids=[len(strings)])
        self.real = GrammarMatcherFactory(self.vocabulary, backend="xgrammar")
        self.future = Future

    def submit(self, guide):
        future = self.future()
        if guide.guide == "a":  # rank 0 has it, the others get it a little later
            if self.rank == 0:
                future.set_result(None)
            else:
                import threading

                threading.Timer(0.2, future.set_result, [None]).start()
        elif guide.guide == "b":  # rank 0 refuses it, the others would have taken it
            if self.rank == 0:
                future.set_exception(gd.InvalidGuideError("#: rank 0 says no, at length: " + "x" * 2000))
            else:
                future.set_result(None)
        elif self.rank:  # rank 0 never gets it
            future.set_result(None)
        return future

    def create(self, guide):
        return self.real.create(guide)


def request_of(text, slot, **fields):
    return gd.GuidedRequest(guide=gd.Guide.regex(text), request_id=text, seq_slot=slot, **fields)


GOLDEN_AND_DRAFTS = [  # guide, golden token and drafts of the first verification, tokens the target emits then
    (gd.Guide.json(), '{"a"', 3),
    (gd.Guide.json(), "[1ab", 1),  # a draft that the guide refuses
    (gd.Guide.regex("ab"), "ab$a", 2),  # the end inside the drafts
    (gd.Guide.json(root="object"), "{a}}", 4),  # the target accepts what is illegal
]
STRINGS = [*'{}[]":,abc12', "$"]
# the draft vocabulary: every second token
D2T = torch.arange(7, dtype=torch.int32)


def run_schedule(factory, num_ranks, rank, *, device=None, with_logits=True, **options):
    """Prefill, verification, rollback, a draft loop, one more verification; return all that a rank can see of it.

    With a device that captures, all but the prefill are graphs of one step.
    """
    width, draft_width = len(STRINGS), len(D2T)
    shard, draft_shard = gd.VocabShard(rank, num_ranks, width), gd.VocabShard(rank, num_ranks, draft_width)
    decoder_class = gd.GuidedDecoder if device is None else gd.CapturableGuidedDecoder
    decoder = decoder_class(
        factory,
        max_num_sequences=4,
        vocab_size_padded=width,
        max_num_draft_tokens=3,
        device=device or "cpu",
        shard=shard,
        draft_shard=draft_shard,
        **options,
    )
    seen, masked = [], []

    def captured(execute, *arguments):
        """Failures of the call, which is captured and replayed."""
        if device is None:
            return execute(*arguments)
        with decoder.capturing() as handle, device.capture() as graph:
            assert execute(*arguments) == []
        graph.replay()
        device.check()
        assert len(handle) == 1
        return decoder.take_failures([f"r{slot}" for slot in range(4)])

    def look(failed, logits):
        rows = decoder.requests.num_bitmask_tokens
        switches = decoder.token_mask_host[:rows].clone()
        masks = (decoder.bitmask_host[:rows] * switches[:, None]).tolist()
        counters = [list(decoder.num_advanced_tokens), list(decoder.max_acceptable_tokens)]
        seen.append((failed, switches.tolist(), masks, counters))
        masked.append(logits)

    def logits_of(rows, part):
        return torch.zeros(rows, part.stop - part.start) if with_logits else None

    def batch(**fields):
        return [
            gd.GuidedRequest(guide=guide, request_id=f"r{slot}", seq_slot=slot, **fields)
            for slot, (guide, _, _) in enumerate(GOLDEN_AND_DRAFTS)
        ]

    first = batch(is_context_init_state=True, is_last_context_chunk=True)
    decoder.submit(first)
    decoder.add_batch(first)
    logits = logits_of(4, shard)
    look(decoder.execute(logits), logits)

    requests = batch(is_generation_in_progress_state=True)
    for request, (_, text, _) in zip(requests, GOLDEN_AND_DRAFTS, strict=True):
        request.new_token, *request.draft_tokens = map(STRINGS.index, text)
    decoder.add_batch(requests)
    logits = logits_of(16, shard)
    look(captured(decoder.execute, logits), logits)

    counts = torch.tensor([emitted for _, _, emitted in GOLDEN_AND_DRAFTS], dtype=torch.int32)
    drafted = torch.tensor([STRINGS.index(character) for character in "a2$["], dtype=torch.int32)

    def draft(logits, draft_step):
        decoder.add_draft_batch(drafted, counts, draft_step)
        return decoder.execute_draft_batch(logits, D2T, draft_step)

    for draft_step in range(3):
        logits = logits_of(4, draft_shard)
        if draft_step == 0 and device is not None:
            # read before it is captured
            decoder._draft_vocabulary.words(D2T)
        look(captured(draft, logits, draft_step), logits)

    requests = batch(is_generation_in_progress_state=True)
    for request, character in zip(requests, "a2$[", strict=True):
        request.new_token = STRINGS.index(character)
    decoder.add_batch(requests, runtime_draft_len=0)
    logits = logits_of(4, shard)
    look(captured(decoder.execute, logits), logits)
    return seen, masked


def run_decisions(rank, world_size, device):
    """Add requests whose guides only rank 0 may judge; return what comes of it."""
    import torch.distributed as dist

    width = 13
    shard = gd.VocabShard(rank, world_size, width)
    decoder_class = gd.GuidedDecoder if device is None else gd.CapturableGuidedDecoder
    decoder = decoder_class(
        RankedFactory(rank),
        max_num_sequences=3,
        vocab_size_padded=width,
        max_num_draft_tokens=1,
        device=device or "cpu",
        shard=shard,
        group=dist.group.WORLD,
        config=gd.GuidedDecodingConfig(compile_timeout_s=0.1),
    )
    collectives, broadcast = [], dist.broadcast

    def counted(*args, **kwargs):
        # never in a host function, never in a capture
        assert device is None or not (device._is_in_host_function or device.is_capturing())
        collectives.append(1)
        return broadcast(*args, **kwargs)

    dist.broadcast = counted
    try:
        context = {"is_context_init_state": True, "is_last_context_chunk": True}
        decoder.add_batch([request_of(text, slot, **context) for slot, text in enumerate("abc")])
        logits = torch.zeros(3, shard.stop - shard.start)
        failed = decoder.execute(logits)
        # nobody without a matcher: no collective; a golden token that the guide refuses fails on every rank
        decoder.add_batch([request_of("a", 0, is_generation_in_progress_state=True, new_token=8)])
        refused = decoder.build()
        if device is not None:
            device.check()
    finally:
        dist.broadcast = broadcast
    return {"failed": failed, "refused": refused, "logits": logits, "collectives": len(collectives)}


def run_rank(rank, world_size, folder):
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        group = dist.group.WORLD
        result = {"eager": run_decisions(rank, world_size, None)}
        # a schedule of its own on each rank
        result["captured"] = run_decisions(rank, world_size, SimulatedDevice(rank))
        real = gd.GrammarMatcherFactory(RankedFactory(rank).vocabulary, backend="xgrammar")
        ranks = world_size // 2
        for name, device in (("", None), (" captured", SimulatedDevice(rank))):
            result[f"tensor{name}"] = run_schedule(real, world_size, rank, device=device, group=group)
            result[f"pipeline{name}"] = run_schedule(
                real, ranks, rank % ranks, device=device, group=group, with_logits=rank >= world_size - ranks
            )
        torch.save(result, os.path.join(folder, f"{rank}.pt"))
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.usefixtures("spawnable")
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_agree(world_size):
    # importing torch is most of the time that ranks take, so it is done once for all of them
    get_context("forkserver").set_forkserver_preload(["torch.distributed", "gd_plugin", "xgrammar"])
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(run_rank, (world_size, folder), world_size, start_method="forkserver")
        results = [torch.load(os.path.join(folder, f"{rank}.pt")) for rank in range(world_size)]
    for mode in ("eager", "captured"):
        check_decisions([result[mode] for result in results])
    alone, whole = run_schedule(gd.GrammarMatcherFactory(RankedFactory(0).vocabulary, backend="xgrammar"), 1, 0)
    failed = [request_id for failures, _, _, _ in alone for request_id, _ in failures]
    assert failed == ["r3"]
    half = world_size // 2
    for name in ("", " captured"):
        tensor, pipeline = ([result[kind + name] for result in results] for kind in ("tensor", "pipeline"))
        assert all(seen == alone for seen, _ in tensor + pipeline)
        for step, logits in enumerate(whole):
            assert torch.equal(torch.cat([masked[step] for _, masked in tensor], dim=1), logits)
            assert all(masked[step] is None for _, masked in pipeline[:half])
            assert torch.equal(torch.cat([masked[step] for _, masked in pipeline[half:]], dim=1), logits)


def check_decisions(results):
    """Rank 0 alone decides who attaches: "a" does, "b" is refused, "c" is not compiled in time."""
    first = results[0]
    assert [request_id for request_id, _ in first["failed"]] == ["b", "c"]
    assert "rank 0 says no" in first["failed"][0][1] and "not compiled within" in first["failed"][1][1]
    assert [request_id for request_id, _ in first["refused"]] == ["a"]
    for result in results:
        assert result["failed"] == first["failed"] and result["refused"] == first["refused"]
        assert result["collectives"] == 1
    logits = torch.cat([result["logits"] for result in results], dim=1)
    assert logits[0].isfinite().nonzero().flatten().tolist() == [7]
    assert logits[1:].isfinite().all()
