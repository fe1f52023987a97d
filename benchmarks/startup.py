"""How fast the command line answers: whole processes, from start to exit, medians beside the bare interpreter's.

    python benchmarks/startup.py [--runs 11]

Commands take turns, so that a busy moment of the machine falls on all of them alike. The last column is the limit that
the project holds itself to on two idle cores.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

Command = tuple[list[str], dict[str, str]]


def commands(run: Path | None) -> dict[str, tuple[Command, float]]:
    """Name -> what is run, with its environment, and the limit in seconds."""
    nftctl = [str(Path(sys.executable).with_name("nftctl"))]
    tab = {"_NFTCTL_COMPLETE": "complete_bash", "COMP_WORDS": "nftctl re", "COMP_CWORD": "1"}
    listed: dict[str, tuple[Command, float]] = {
        "bare python": (([sys.executable, "-c", "pass"], {}), 0.0),
        "--version": (([*nftctl, "--version"], {}), 0.10),
        "--help": (([*nftctl, "--help"], {}), 0.20),
        "validate": (([*nftctl, "validate", "tiny_t2i_cpu"], {}), 0.30),
        "TAB": ((nftctl, tab), 0.15),
    }
    if run is not None:
        listed["inspect-checkpoint"] = (([*nftctl, "inspect-checkpoint", str(run)], {}), 0.15)
    return listed


def once(command: Command) -> tuple[float, float]:
    """Wall and CPU seconds of one process."""
    arguments, extra = command
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(arguments, cwd=folder, env=os.environ | extra, capture_output=True, check=True)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=11)
    parser.add_argument("--run", type=lambda text: Path(text).resolve(), help="a run folder, for inspect-checkpoint")
    given = parser.parse_args()
    listed = commands(given.run)
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in listed}
    for _ in range(given.runs + 1):
        for name, (command, _limit) in listed.items():
            seen[name].append(once(command))
    floor = statistics.median(wall for wall, _ in seen["bare python"][1:])
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, median of {given.runs}")
    for name, (_, limit) in listed.items():
        wall, cpu = (statistics.median(column) for column in zip(*seen[name][1:], strict=True))
        print(f"{name:20} wall {wall:.3f} s  cpu {cpu:.3f} s  x{wall / floor:.1f} of bare python  limit {limit:.2f} s")


if __name__ == "__main__":
    main()
