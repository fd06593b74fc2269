"""Run all benchmarks, one after another, and make the table in this folder's README from their results.

    python experiments/benchmarks/all.py [--only step_time,traffic] [--timeout 3600] [--readme]

Each benchmark runs in its own process with `--json`. Its row of the table, with the machine and versions, replaces the
row of the same program and arguments in `results.json`, beside this file; rows with and without a GPU are both kept. If
a benchmark fails or times out, its name is printed, its old row stays, and the exit code is 1. `peers.py` compares with
PyTorch if TORCH_PYTHON names a Python that has it; `gpu.py` has no row without a GPU. `--readme` measures nothing: it
writes the table from `results.json` into README.md, between two marks.
"""

import argparse
import json
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS, README = HERE / "results.json", HERE / "README.md"
BEGIN, END = "<!-- made by experiments/benchmarks/all.py --readme -->\n", "<!-- end of what is made -->"

RUNS = tuple(
    tuple(line.split())
    for line in """\
step_time
checkpoint --gib 0.25
startup
traffic --partitionings chosen --precisions bf16 --targets h100:1x8,h100:64x8 --models gpt,unrolled,mlp
traffic --partitionings chosen --precisions bf16 --targets h100:8x8 --models gpt --replicas 8
traffic --partitionings chosen --precisions bf16 --targets h100:8x8 --models gpt --model-axis 8
published
overlap
overlap --accumulate 4 --cases gpt_1b@h100:8x8:ddp,zero1,zero2
shipped
peers
gpu
""".splitlines()
)


def run(words: tuple[str, ...], timeout: float) -> dict[str, Any] | str:
    """Run one benchmark; return its entry for `results.json`, or why there is none."""
    begun = time.monotonic()
    command = [sys.executable, str(HERE / f"{words[0]}.py"), "--json", *words[1:]]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return f"took longer than {timeout:g} seconds"
    if done.returncode != 0:
        return f"exit code {done.returncode}: {done.stderr.strip()[-2000:]}"
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"{' '.join(words)}: {found['row']['result']} ({time.monotonic() - begun:.0f} s)", flush=True)
    return {"run": list(words), **found["row"], "machine": found["machine"], "date": date.today().isoformat()}


def keep(entry: dict[str, Any]) -> None:
    """Put an entry into `results.json`, replacing the entry of the same run on the same kind of machine.

    Entries of runs that are no longer in `RUNS` are dropped.
    """
    order = [" ".join(words) for words in RUNS]
    kept = [one for one in json.loads(RESULTS.read_text(encoding="utf-8")) if " ".join(one["run"]) in order]
    entries = {_key(one): one for one in [*kept, entry]}
    by_run = sorted(entries.values(), key=lambda one: (order.index(" ".join(one["run"])), _key(one)))
    RESULTS.write_text(json.dumps(by_run, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _key(entry: dict[str, Any]) -> tuple[str, str]:
    return " ".join(entry["run"]), entry["machine"].get("gpu", "")


def table(entries: list[dict[str, Any]]) -> str:
    """Return the README's table of these entries of `results.json`."""
    lines = ["| program | measures | result | promised | measured on |", "|---|---|---|---|---|"]
    for one in entries:
        machine = one["machine"]
        load = f"load {machine['load']:.0f}, " if "load" in machine else ""  # results from LOG.md have no load
        on = f"{machine['gpu']}, " if "gpu" in machine else f"{machine['cores']} cores, {load}"
        on += f"jax {machine['jax']}, {one['date']}"
        lines.append(f"| `{one['run'][0]}.py` | {one['measures']} | {one['result']} | {one['promised']} | {on} |")
    return "\n".join(lines) + "\n"


def with_table(readme: str, made: str) -> str:
    """Return the README's text with the table between its marks replaced."""
    before, _, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"README.md has no lines {BEGIN!r} and {END!r}")
    return before + BEGIN + made + end + after


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    options = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    options.add_argument("--only", metavar="NAME,…", help="run only these programs")
    options.add_argument("--timeout", type=float, default=3600, metavar="SECONDS", help="time limit of each program")
    options.add_argument("--readme", action="store_true", help="only write README.md's table")
    given = options.parse_args()
    if given.readme:
        made = table(json.loads(RESULTS.read_text(encoding="utf-8")))
        README.write_text(with_table(README.read_text(encoding="utf-8"), made), encoding="utf-8")
        return 0
    names = dict.fromkeys(words[0] for words in RUNS)
    chosen = list(names) if given.only is None else given.only.split(",")
    if unknown := [name for name in chosen if name not in names]:
        options.error(f"--only names benchmarks: {', '.join(names)}; given {unknown[0]!r}")
    failed: list[str] = []
    for words in (words for words in RUNS if words[0] in chosen):
        found = run(words, given.timeout)
        if isinstance(found, str):
            print(f"{' '.join(words)}: {found}", file=sys.stderr, flush=True)
            failed.append(words[0])
        elif words[0] == "gpu" and "gpu" not in found["machine"]:
            print("gpu: not kept, as its numbers mean nothing without a GPU")
        else:
            keep(found)
    print(f"{len(chosen)} programs, failed: {', '.join(failed) or 'none'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
