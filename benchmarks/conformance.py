"""Real schemas with valid and invalid instances, through one backend or several: who is right on how many?

    python benchmarks/conformance.py FILE [--backend auto --backend xgrammar ...] [--least 142]

FILE has one JSON object a line: `{"id": ..., "schema": ..., "tests": [{"valid": true, "data": ...}, ...]}`.
Each instance is tried compact and as `json.dumps` writes it. A schema is right when it compiled, every valid instance was
accepted in both forms and no invalid one was admitted. Exits with 1 if an invalid instance was admitted, or if fewer than
`--least` schemas are right with "auto".
Compile times are CPU times of the whole way from the schema to a matcher, in a process that has compiled something before.
The vocabulary is single bytes: compile times hold for any, masks are measured by mask_errors.py.
"""

import argparse
import json
import sys
import time

import gd_plugin as gd


def admits(matcher, text):
    matcher.reset()
    return all(matcher.accept_token(byte) for byte in text.encode()) and matcher.is_accepting()


def measure(name, rows, config, verbose):
    vocabulary = gd.Vocabulary.from_bytes([bytes([value]) for value in range(256)] + [None], stop_token_ids=[256])
    factory = gd.GrammarMatcherFactory(vocabulary, backend=name, config=config)
    factory.create(gd.Guide.json_schema({"enum": ["the engines are loaded with the first guide"]}))
    result = {"right": 0, "refused": 0, "valid refused": 0, "invalid admitted": 0, "times": []}
    for row in rows:
        start = time.process_time()
        try:
            matcher = factory.create(gd.Guide.json_schema(row["schema"]))
        except gd.GuidedDecodingError as error:
            result["refused"] += 1
            if verbose:
                print(f"  {row['id']}: refused: {str(error)[:160]}")
            continue
        result["times"].append(time.process_time() - start)
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
    parser.add_argument("--whitespace", default="any")
    parser.add_argument("--least", type=int, default=0, help='schemas that must be right with "auto"')
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    with open(options.file, encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    config = gd.GuidedDecodingConfig(whitespace=options.whitespace, additional_properties=True, strict=True)
    print(
        f"{len(rows)} schemas\n| backend | right | refused | valid refused | invalid admitted | compile p50 / p99, CPU |"
    )
    print("|---|---|---|---|---|---|")
    failed = False
    for name in options.backend or ["auto", "llguidance", "xgrammar"]:
        result = measure(name, rows, config, options.verbose)
        times = sorted(result["times"]) or [0.0]
        p50, p99 = (times[int(len(times) * share)] * 1e3 for share in (0.5, 0.99))
        counts = " | ".join(str(result[key]) for key in ("right", "refused", "valid refused", "invalid admitted"))
        print(f"| {name} | {counts} | {p50:.1f} / {p99:.1f} ms |")
        failed |= result["invalid admitted"] > 0 or (name == "auto" and result["right"] < options.least)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
