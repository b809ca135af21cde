"""Sharded equals unsharded, between real processes: gloo on the CPU, 2, 3 and 4 ranks."""

import socket

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from gd_plugin.masks.apply import apply_token_bitmask_
from gd_plugin.masks.shard import VocabShard

VOCAB, DRAFT_VOCAB, ROWS = 1003, 251, 3
# plain, and cut where no mask word begins
CUTS = {2: [0, 33, 0], 3: [0, 31, 400, 0], 4: [0, 1, 65, 500, 0]}


def problem():
    """The same on every rank: logits whole, mask rows, and a d2t that prunes every fourth token or so."""
    rng = np.random.default_rng(8)
    bits = rng.random((ROWS, 32 * ((VOCAB + 31) // 32))) < 0.3
    mask = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32).copy())
    d2t = torch.from_numpy(np.sort(rng.choice(VOCAB, DRAFT_VOCAB, replace=False)) - np.arange(DRAFT_VOCAB))
    logits = torch.from_numpy(rng.standard_normal((ROWS, VOCAB))).float()
    draft_logits = torch.from_numpy(rng.standard_normal((ROWS, DRAFT_VOCAB))).float()
    return bits, mask, d2t, logits, draft_logits


def rank_main(rank, port):
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=max(CUTS))
    try:
        for world_size in CUTS:
            group = dist.new_group(list(range(world_size)))
            if rank < world_size:
                check_group(rank, world_size, group)
            dist.barrier()
    finally:
        dist.destroy_process_group()


def check_group(rank, world_size, group):
    bits, mask, d2t, logits, draft_logits = problem()
    tokens = torch.arange(DRAFT_VOCAB) + d2t
    for whole, legal, offsets in (
        (logits, torch.from_numpy(bits[:, :VOCAB]), None),
        (draft_logits, torch.from_numpy(bits)[:, tokens], d2t),
    ):
        total = whole.shape[1]
        for edges in (None, [*(min(edge, total) for edge in CUTS[world_size][:-1]), total]):
            shard = VocabShard(rank, world_size, total, edges)
            width = max(VocabShard(r, world_size, total, edges).num_columns for r in range(world_size))
            # every rank's logits are as wide as the widest: what is behind its shard is padding
            part = torch.zeros(ROWS, width)
            part[:, : shard.num_columns] = whole[:, shard.start : shard.stop]
            for local in (False, True) if offsets is not None else (False,):
                mine = part.clone()
                mapping = offsets[shard.start : shard.stop] if local else offsets
                apply_token_bitmask_(mine, mask, d2t=mapping, shard=shard, vocab_size=VOCAB)
                gathered = [torch.empty_like(mine) for _ in range(world_size)]
                dist.all_gather(gathered, mine, group=group)
                assert (mine[:, shard.num_columns :] == float("-inf")).all()
                shards = [VocabShard(r, world_size, total, edges) for r in range(world_size)]
                joined = torch.cat([g[:, : s.num_columns] for g, s in zip(gathered, shards, strict=True)], dim=1)
                assert torch.equal(joined, whole.masked_fill(~legal, float("-inf")))


@pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")
@pytest.mark.usefixtures("spawnable")
def test_sharded_equals_unsharded():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(rank_main, args=(port,), nprocs=max(CUTS))
