"""What a captured step costs on the CPU beside an eager one: the ticket, the launch or replay, the callback, the queue.

A small C library stands in for the CUDA driver and runs host functions on a thread of its own, so the way through ctypes,
the change of threads and the interpreter lock are real; copies and kernels are left out. Both decoders build the same
steps, interleaved; the overhead of a round is the difference of its times. Not shown: what a real driver adds.

    python benchmarks/capture_step.py [--slots 1,8,64] [--rounds 400] [--json FILE]
"""

import argparse
import statistics
import tempfile
import time

import torch
from harness import machine, print_table, quantiles, write_json

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


def timed(function):
    begun = time.perf_counter()
    function()
    return 1e6 * (time.perf_counter() - begun)


def measure(driver, factory, guide, slots, rounds):
    """Microseconds a step: eager build, eager step of the capturable decoder, replay of a captured one."""
    plain = start(gd.GuidedDecoder, factory, CpuDevice(), guide, slots)
    eager_device = ThreadedDevice(driver, only_host=True)
    eager = start(gd.CapturableGuidedDecoder, factory, eager_device, guide, slots)
    device = ThreadedDevice(driver, only_host=True)
    replayed = start(gd.CapturableGuidedDecoder, factory, device, guide, slots)
    replayed.add_batch(requests(guide, slots, 0))
    with replayed.capturing() as _handle, device.capture() as graph:
        replayed.execute(None)

    def step(decoder, batch, run):
        decoder.add_batch(batch)
        run()

    def replay():
        graph.replay()
        device.synchronize(None)

    times = {"build": [], "eager": [], "replay": []}
    for number in range(rounds):
        position = number % len(TEXT)
        runs = {
            "build": (plain, plain.build),
            "eager": (eager, lambda: eager.execute(None)),
            "replay": (replayed, replay),
        }
        for name, (decoder, run) in runs.items():
            batch = requests(guide, slots, position)
            times[name].append(timed(lambda d=decoder, b=batch, r=run: step(d, b, r)))
        if eager.take_failures(range(slots)) or replayed.take_failures(range(slots)):
            raise RuntimeError("a step failed")
        rows = [decoder.bitmask_host[:slots] for decoder in (plain, eager, replayed)]
        if not (torch.equal(rows[0], rows[1]) and torch.equal(rows[0], rows[2])):
            raise RuntimeError("the masks differ, so no time is worth printing")
        if position == len(TEXT) - 1:
            for decoder in (plain, eager, replayed):
                for matcher in decoder.grammar_matchers:
                    matcher.reset()
    warm = rounds // 10
    return {name: values[warm:] for name, values in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slots", default="1,8,64")
    parser.add_argument("--rounds", type=int, default=400)
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
