"""Real schemas with valid and invalid instances, through one backend or several: who is right on how many?

    python benchmarks/conformance.py FILE [--backend auto --backend xgrammar ...]

FILE has one JSON object a line: `{"id": ..., "schema": ..., "tests": [{"valid": true, "data": ...}, ...]}`.
Each instance is tried compact and as `json.dumps` writes it. A schema is right when it compiled, every valid instance was
accepted in both forms and no invalid one was admitted. Exits with 1 if an invalid instance was admitted.
The vocabulary is single bytes: compile times hold for any, mask times are not measured here.
"""

import argparse
import json
import sys
import time

import gd_plugin as gd
from gd_plugin.grammars.backends.registry import create_backend

AUTO_ORDER = ("xgrammar", "llguidance")


def compile_guide(backends, guide):
    errors = []
    for backend in backends:
        if len(backends) > 1 and backend.problems(guide):
            continue
        try:
            return backend.compile(guide)
        except gd.GuidedDecodingError as error:
            errors.append(error)
    raise errors[0] if errors else gd.UnsupportedGuideError("no backend enforces it")


def admits(matcher, text):
    matcher.reset()
    return all(matcher.accept_token(byte) for byte in text.encode()) and matcher.is_accepting()


def measure(name, rows, config, verbose):
    vocabulary = gd.Vocabulary.from_bytes([bytes([value]) for value in range(256)] + [None], stop_token_ids=[256])
    names = AUTO_ORDER if name == "auto" else (name,)
    backends = [create_backend(each, vocabulary, config) for each in names]
    result = {"right": 0, "refused": 0, "valid refused": 0, "invalid admitted": 0, "times": []}
    for row in rows:
        start = time.perf_counter()
        try:
            matcher = compile_guide(backends, gd.Guide.json_schema(row["schema"])).create_matcher()
        except gd.GuidedDecodingError as error:
            result["refused"] += 1
            if verbose:
                print(f"  {row['id']}: refused: {str(error)[:160]}")
            continue
        result["times"].append(time.perf_counter() - start)
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
    parser.add_argument("--backend", action="append", help="auto, llguidance, xgrammar; may be repeated")
    parser.add_argument("--whitespace", default="any")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    with open(options.file, encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    config = gd.GuidedDecodingConfig(whitespace=options.whitespace, additional_properties=True, strict=True)
    print(f"{len(rows)} schemas\n| backend | right | refused | valid refused | invalid admitted | compile p50 / p99 |")
    print("|---|---|---|---|---|---|")
    admitted = 0
    for name in options.backend or ["auto", "llguidance", "xgrammar"]:
        result = measure(name, rows, config, options.verbose)
        times = sorted(result["times"]) or [0.0]
        p50, p99 = (times[int(len(times) * share)] * 1e3 for share in (0.5, 0.99))
        counts = " | ".join(str(result[key]) for key in ("right", "refused", "valid refused", "invalid admitted"))
        print(f"| {name} | {counts} | {p50:.1f} / {p99:.1f} ms |")
        admitted += result["invalid admitted"]
    return 1 if admitted else 0


if __name__ == "__main__":
    sys.exit(main())
