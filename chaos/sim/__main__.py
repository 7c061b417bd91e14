"""``python -m pdxfer.chaos.sim --seed N`` replays one run with its timeline; ``--seeds N`` runs many."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from . import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m pdxfer.chaos.sim", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this seed and print its timeline")
    parser.add_argument("--only", default="", help="with --seed: keep only these faults, by number, e.g. 0,2")
    parser.add_argument("--room", default="", help="with --seed: only lines that name this room")
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds to run")
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--audit-every", type=int, default=1)
    parser.add_argument("--stop", action="store_true", help="stop at the first failing seed")
    args = parser.parse_args()
    if args.seed is not None:
        only = [int(i) for i in args.only.split(",")] if args.only and args.only != "none" else None
        result = run.run(args.seed, only=[] if args.only == "none" else only, trace=True)
        for when, who, what in result.timeline:
            if not args.room or args.room in what or who in ("fault", "world") or what.isupper():
                print(f"{when:9.4f} {who:8} {what}")
        for i, fault in enumerate(result.faults):
            print(f"fault {i}: {fault}")
        print(f"seed {args.seed}: {result.violation or 'ok'}; {dict(result.ends)}")
        return 0 if result.ok else 1
    began, failed, ends, steps = time.perf_counter(), [], Counter[str](), 0
    slowest = 0.0
    for seed in range(args.start, args.start + args.seeds):
        result = run.run(seed, audit_every=args.audit_every)
        ends += result.ends
        steps += result.steps
        slowest = max(slowest, result.home_after)
        if not result.ok:
            failed.append(seed)
            print(f"seed {seed}: {result.violation[:600]}")
            print(f"  replay: python -m pdxfer.chaos.sim --seed {seed} --only {','.join(map(str, run.shrink(seed))) or 'none'}")
            if args.stop:
                break
    seconds = time.perf_counter() - began
    print(f"ends: {dict(ends.most_common())}")
    print(f"{args.seeds} seeds, {len(failed)} failed, {steps} steps, {seconds:.1f} s; latest home {slowest:.2f} s after calm")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
