"""Real schemas with valid and invalid instances, through one backend or several: who is right on how many?

    python benchmarks/conformance.py FILE [--backend auto ...] [--property-order any ...] [--least 142]

FILE has one JSON object a line: `{"id": ..., "schema": ..., "tests": [{"valid": true, "data": ...}, ...]}`.
Each instance is tried compact and as `json.dumps` writes it. A schema is right when it compiled, every valid instance was
accepted in both forms and no invalid one was admitted. Exits with 1 if an invalid instance was admitted, or if fewer than
`--least` schemas are right with "auto".
Without `--property-order`, "auto" is run in declared order and in any; `--least` is about declared order.
Compile times are those of the whole way from the schema to a matcher, in a process that has compiled something with every
engine before: CPU time of this process, and elapsed time, in which other processes (a compile worker) count too.
The vocabulary is single bytes: compile times hold for any, masks are measured by mask_errors.py.
"""

import argparse
import contextlib
import gc
import json
import sys
import time

import gd_plugin as gd


def admits(matcher, text):
    matcher.reset()
    return all(matcher.accept_token(byte) for byte in text.encode()) and matcher.is_accepting()


def load_engines(factory):
    # the second is refused by every engine, so "auto" asks all of them
    for schema in ({"pattern": "^\\w+$", "format": "date-time"}, {"format": "regex"}):
        with contextlib.suppress(gd.GuidedDecodingError):
            factory.create(gd.Guide.json_schema(schema))


def measure(name, rows, config, verbose):
    vocabulary = gd.Vocabulary.from_bytes([bytes([value]) for value in range(256)] + [None], stop_token_ids=[256])
    factory = gd.GrammarMatcherFactory(vocabulary, backend=name, config=config)
    load_engines(factory)
    # as servers do: a full collection walks the imported modules, a quarter of a second that is charged to some schema
    gc.collect()
    gc.freeze()
    result = {"right": 0, "refused": 0, "valid refused": 0, "invalid admitted": 0, "cpu": [], "elapsed": []}
    for row in rows:
        start, started = time.process_time(), time.perf_counter()
        try:
            matcher = factory.create(gd.Guide.json_schema(row["schema"]))
        except gd.GuidedDecodingError as error:
            result["refused"] += 1
            if verbose:
                print(f"  {row['id']}: refused: {str(error)[:160]}")
            continue
        result["cpu"].append(time.process_time() - start)
        result["elapsed"].append(time.perf_counter() - started)
        wrong = {"valid refused": 0, "invalid admitted": 0}
        for test in row["tests"]:
            compact = json.dumps(test["data"], separators=(",", ":"), ensure_ascii=False)
            verdicts = {admits(matcher, text) for text in (compact, json.dumps(test["data"]))}
            if test["valid"] and False in verdicts:
                wrong["valid refused"] += 1
            if not test["valid"] and True in verdicts:
                wrong["invalid admitted"] += 1
        result["right"] += not any(wrong.values())
        for key, count in wrong.items():
            result[key] += count
            if count and verbose:
                print(f"  {row['id']}: {count} {key}")
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--backend", action="append", help="auto, or a backend by name; may be repeated")
    parser.add_argument("--property-order", action="append", choices=["declared", "any"], help="may be repeated")
    parser.add_argument("--whitespace", default="any")
    parser.add_argument("--least", type=int, default=0, help='schemas that must be right with "auto"')
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    with open(options.file, encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    print(f"{len(rows)} schemas")
    print(
        "| backend | key order | right | refused | valid refused | invalid admitted "
        "| compile p50 / p99, CPU | p50 / p99, elapsed |"
    )
    print("|---|---|---|---|---|---|---|---|")
    failed = False
    for name in options.backend or ["auto", "llguidance", "xgrammar"]:
        for order in options.property_order or (["declared", "any"] if name == "auto" else ["declared"]):
            config = gd.GuidedDecodingConfig(
                whitespace=options.whitespace, additional_properties=True, strict=True, property_order=order
            )
            result = measure(name, rows, config, options.verbose)
            counts = " | ".join(str(result[key]) for key in ("right", "refused", "valid refused", "invalid admitted"))
            print(f"| {name} | {order} | {counts} | {percentiles(result['cpu'])} | {percentiles(result['elapsed'])} |")
            short = (name, order) == ("auto", "declared") and result["right"] < options.least
            failed |= result["invalid admitted"] > 0 or short
    return 1 if failed else 0


def percentiles(times):
    times = sorted(times) or [0.0]
    return " / ".join(f"{times[int(len(times) * share)] * 1e3:.1f}" for share in (0.5, 0.99)) + " ms"


if __name__ == "__main__":
    sys.exit(main())
