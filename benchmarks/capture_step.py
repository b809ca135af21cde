"""What a captured step costs on the CPU beside an eager one: the ticket, the launch or replay, the callback, the queue.

A small C library stands in for the CUDA driver and runs host functions on a thread of its own, so the way through ctypes,
the change of threads and the interpreter lock are real; copies and kernels are left out. Both decoders build the same
steps, in turn text by text; a round's time is the median of its text's 40 steps, its overhead the difference of times. Not
shown: what a real driver adds. The library's thread is awake when a step begins.

    python benchmarks/capture_step.py [--slots 1,8,64] [--rounds 100] [--json FILE]
"""

import argparse
import statistics
import tempfile
import time

import torch
from harness import interleave, machine, print_table, quantiles, write_json

import gd_plugin as gd
from gd_plugin.decoding.hostfunc import load_driver
from gd_plugin.masks.device import CpuDevice
from gd_plugin.testing import ThreadedDevice, build_fake_driver

TEXT = "ab" * 20
LIMIT_US = 60.0


def requests(guide, slots, step):
    """Every slot reads its prompt, or stands at one place of the text; it is brought there by its history."""
    fields = {"is_context_init_state": True, "is_last_context_chunk": True}
    if step is not None:
        fields = {"is_generation_in_progress_state": True, "new_token": ord(TEXT[step])}
    return [gd.GuidedRequest(guide=guide, request_id=slot, seq_slot=slot, **fields) for slot in range(slots)]


def start(decoder_class, factory, device, guide, slots):
    decoder = decoder_class(factory, max_num_sequences=slots, vocab_size_padded=256, device=device)
    batch = requests(guide, slots, None)
    decoder.submit(batch)
    decoder.add_batch(batch)
    if decoder.execute(None):
        raise RuntimeError("the guide was refused")
    return decoder


class Contender:
    """One decoder and how it runs a step that has been added."""

    def __init__(self, decoder, run, guide, slots):
        self.decoder, self.run = decoder, run
        self.batches = [requests(guide, slots, step) for step in range(len(TEXT))]
        self.rows = slice(0, slots)

    def text(self):
        """Run the text once; return microseconds a step, the median."""
        times = []
        for batch in self.batches:
            begun = time.perf_counter()
            self.decoder.add_batch(batch)
            self.run()
            times.append(1e6 * (time.perf_counter() - begun))
        self.restart()
        return statistics.median(times)

    def masks(self):
        """Run the text once; return the rows of every step."""
        seen = []
        for batch in self.batches:
            self.decoder.add_batch(batch)
            self.run()
            seen.append(self.decoder.bitmask_host[self.rows].clone())
        self.restart()
        return torch.stack(seen)

    def restart(self):
        for matcher in self.decoder.grammar_matchers:
            matcher.reset()
        if isinstance(self.decoder, gd.CapturableGuidedDecoder) and self.decoder.take_failures(range(10_000)):
            raise RuntimeError("a step failed")


def contenders(driver, factory, guide, slots):
    """An eager build, an eager step of the capturable decoder, a replay of a captured one."""
    plain = start(gd.GuidedDecoder, factory, CpuDevice(), guide, slots)
    eager = start(gd.CapturableGuidedDecoder, factory, ThreadedDevice(driver, only_host=True), guide, slots)
    device = ThreadedDevice(driver, only_host=True)
    replayed = start(gd.CapturableGuidedDecoder, factory, device, guide, slots)
    replayed.add_batch(requests(guide, slots, 0))
    with replayed.capturing() as handle, device.capture() as graph:
        replayed.execute(None)
    replayed.handle = handle

    def replay():
        graph.replay()
        device.synchronize(None)

    replay()
    made = {
        "build": Contender(plain, plain.build, guide, slots),
        "eager": Contender(eager, lambda: eager.execute(None), guide, slots),
        "replay": Contender(replayed, replay, guide, slots),
    }
    made["replay"].restart()
    return made


def measure(driver, factory, guide, slots, rounds):
    """Microseconds a step of each contender, one number a round."""
    made = contenders(driver, factory, guide, slots)
    masks = {name: contender.masks() for name, contender in made.items()}
    if not all(torch.equal(masks["build"], rows) for rows in masks.values()):
        raise RuntimeError("the masks differ, so no time is worth printing")
    return interleave({name: contender.text for name, contender in made.items()}, rounds)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slots", default="1,8,64")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    vocabulary = gd.Vocabulary.from_bytes([bytes([byte]) for byte in range(255)] + [None], stop_token_ids=[255])
    factory, guide, records, table = gd.GrammarMatcherFactory(vocabulary), gd.Guide.regex("(ab)+"), [], []
    with tempfile.TemporaryDirectory() as folder:
        driver = load_driver(str(build_fake_driver(folder)))
        for slots in map(int, options.slots.split(",")):
            times = measure(driver, factory, guide, slots, options.rounds)
            build = quantiles(times["build"])
            record, row = {"slots": slots, "build_us": build}, [str(slots), build.text(digits=1)]
            for name in ("eager", "replay"):
                over = quantiles([mine - plain for mine, plain in zip(times[name], times["build"], strict=True)])
                record[f"{name}_overhead_us"] = over
                row += [f"{statistics.median(times[name]):.1f}", over.text(digits=1)]
            records.append(record)
            table.append(row)
    print(machine(["torch", "gd_plugin", "xgrammar"]))
    print_table(
        [
            "slots",
            "add_batch + build, us",
            "eager step, us",
            "more than build, us",
            "replay, us",
            "more than build, us",
        ],
        table,
    )
    worst = max(record[f"{name}_overhead_us"].median for record in records for name in ("eager", "replay"))
    print(f"at most {worst:.1f} us more than a build (the limit is {LIMIT_US:.0f} us)")
    write_json(options.json, records)


if __name__ == "__main__":
    main()
