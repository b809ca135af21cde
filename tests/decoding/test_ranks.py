"""Ranks: shards of the logits, pruned vocabularies, one decision about grammars for a group."""

import os
import tempfile

import pytest
import torch
import torch.multiprocessing as multiprocessing

import gd_plugin as gd

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


def run_rank(rank, world_size, folder):
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        width = 13
        shard = gd.VocabShard(rank, world_size, width)
        decoder = gd.GuidedDecoder(
            RankedFactory(rank),
            max_num_sequences=3,
            vocab_size_padded=width,
            max_num_draft_tokens=1,
            device="cpu",
            shard=shard,
            group=dist.group.WORLD,
            config=gd.GuidedDecodingConfig(compile_timeout_s=0.1),
        )
        collectives = []
        broadcast = dist.broadcast
        dist.broadcast = lambda *args, **kwargs: collectives.append(1) or broadcast(*args, **kwargs)
        context = {"is_context_init_state": True, "is_last_context_chunk": True}
        decoder.add_batch([request_of(text, slot, **context) for slot, text in enumerate("abc")])
        logits = torch.zeros(3, shard.stop - shard.start)
        failed = decoder.execute(logits)
        # nobody without a matcher: no collective; a golden token that the guide refuses fails on every rank
        decoder.add_batch([request_of("a", 0, is_generation_in_progress_state=True, new_token=8)])
        refused = decoder.build()
        result = {"failed": failed, "refused": refused, "logits": logits, "collectives": len(collectives)}
        torch.save(result, os.path.join(folder, f"{rank}.pt"))
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.usefixtures("spawnable")
def test_one_decision_for_all_ranks():
    # three, so that a shard is short; a new process imports torch, which is all the time this takes
    world_size = 3
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run_rank, args=(world_size, folder), nprocs=world_size)
        results = [torch.load(os.path.join(folder, f"{rank}.pt")) for rank in range(world_size)]
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
