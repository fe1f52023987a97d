"""The public recipe as published, on as many ranks as there are GPUs: start, steps, a kill, an exact resume, scale-out.

Writes a base of random weights at the true shape where there is none, starts the toy reward service (`brightness`) as
an HTTP service of its own, and runs, one behind the other, the commands that a person would type:

1. `launch` of 20 steps with a checkpoint at 10, killed with SIGKILL after step 13; `resume` to 20;
2. with `job.deterministic`: four steps in one go, and the same four killed after the third and resumed from the second:
   rows and tensors have to be equal to the bit;
3. `bench` at every size, and with fewer ranks of the same rows each at the first size.

Parts that would not end in `--seconds` are left out, and named; `--parts` names those that are wanted. Prints every
figure as it is found, then the table, and writes FOLDER/public_profile.json. Exits with 1 where something failed or a
resume was not exact.

With `--nodes N` the ranks run on a Ray cluster of N nodes, which is started on this host for the purpose, each node
with GPUs of its own. Where there are more nodes than GPUs, with one rank each, nodes share GPUs, and NCCL is told that
they are other hosts, since it refuses one GPU for two ranks of a host: all goes over its sockets then, and times mean
little; what a run does, saves and resumes is the same.

    python benchmarks/public_profile.py FOLDER [--ranks 4] [--shape cosmos3-nano] [--sizes 512 1024] [--seconds 600]
    python benchmarks/public_profile.py FOLDER --ranks 2 --nodes 2 --parts start exact
    python benchmarks/public_profile.py FOLDER --ranks 2 --shape cosmos3-tiny --sizes 256 --set 'grid.device="cpu"'
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import secrets
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROMPTS = (
    "a red cube on a wooden table",
    "three white birds over a lake at dawn, wide angle, soft light",
    "a market in the rain, seen from a balcony, neon signs mirrored in puddles, people with umbrellas",
    "an old map of an island",
)
PROFILE = """\
extends = "cosmos3_nft_t2i_public_4gpu"
[rl]
group_size = {ranks}
max_steps = 20
init_from = "{base}"
[model]
vae = "{base}/vae"
height = {size}
width = {size}
[data]
prompt_file = "{folder}/prompts.txt"
[[reward.providers]]
name = "toy"
kind = "http"
url = "{url}"
revision = "toy"
[checkpoint]
every = 10
[samples]
prompts = 0
"""
STEPS, KILLED = 20, 13
EXACT_STEPS, EXACT_KILLED = 4, 3
LEAST = {"start": 150, "exact": 120, "bench": 90}
"""Seconds that have to be left before a part is begun."""


class Figures:
    """What was found so far, and how much time is left."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self._until, self._begun = folder, time.monotonic() + seconds, time.monotonic()
        self.found: dict[str, Any] = {"left_out": [], "failed": []}

    def left(self) -> float:
        return self._until - time.monotonic()

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._begun:4.0f} s] {text}", flush=True)

    def begin(self, what: str, least: float) -> bool:
        """Whether there is time for a part; what is left out is noted."""
        if self.left() < least:
            self.found["left_out"].append(what)
            self.say(f"left out: {what} ({self.left():.0f} s are left, it may take {least:.0f})")
            return False
        self.say(what)
        return True

    def keep(self) -> None:
        (self.folder / "public_profile.json").write_text(json.dumps(self.found, indent=1) + "\n")


class Program:
    """The installed command in the folder of the measurement."""

    def __init__(self, figures: Figures, sets: Sequence[str]) -> None:
        self._figures, self._sets = figures, [part for one in sets for part in ("--set", one)]
        self._environment = os.environ | {"HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}

    def start(self, *arguments: str, sets: bool = True) -> subprocess.Popen[str]:
        """Begin a command, its talk in a file beside its name."""
        command = [sys.executable, "-m", "nftctl", *arguments, *(self._sets if sets else [])]
        with (self._figures.folder / "said.txt").open("a") as said:
            return subprocess.Popen(
                command, cwd=self._figures.folder, env=self._environment, stdout=subprocess.PIPE, stderr=said, text=True
            )

    def run(self, *arguments: str, sets: bool = True) -> dict[str, Any] | None:
        """Run a command with --json to its end; its object, or None where it failed or ran out of time."""
        process = self.start(*arguments, "--json", sets=sets)
        try:
            out, _ = process.communicate(timeout=max(1.0, self._figures.left()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=60)
        if process.returncode == 0:
            document: dict[str, Any] = json.loads(out)
            return document
        self._figures.found["failed"].append(" ".join(arguments))
        self._figures.say(f"failed with {process.returncode}: {arguments}; see {self._figures.folder / 'said.txt'}")
        return None


def gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if (chosen := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [one for one in chosen.split(",") if one]
    with contextlib.suppress(OSError):
        lines = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout.splitlines()
        return [str(number) for number, _ in enumerate(line for line in lines if line.startswith("GPU "))]
    return []


def devices_of(node: int, nodes: int, ranks: int, there: Sequence[str]) -> list[str]:
    """The GPUs of one node: as many as it has ranks, or one that it shares; none where there are none."""
    each = ranks // nodes
    if len(there) >= ranks:
        return list(there[node * each : (node + 1) * each])
    if there and each > 1:
        raise SystemExit(f"{len(there)} GPUs for {ranks} ranks: nodes can share them only with one rank each")
    return [there[node % len(there)]] if there else []


@contextmanager
def cluster(figures: Figures, nodes: int, ranks: int, there: Sequence[str]) -> Iterator[str]:
    """A Ray cluster of so many nodes on this host, with a token of its own; its address. Ends what it started alone."""
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    started: list[subprocess.Popen[bytes]] = []
    address = ""
    try:
        for node in range(nodes):
            own = devices_of(node, nodes, ranks, there)
            where = [f"--address={address}"] if address else ["--head", "--port=0", "--include-dashboard=false"]
            size = [f"--num-cpus={ranks // nodes}", f"--num-gpus={len(own)}", f"--object-store-memory={256 << 20}"]
            apart = {"CUDA_VISIBLE_DEVICES": ",".join(own), "NCCL_HOSTID": f"node-{node}", "NCCL_NVLS_ENABLE": "0"}
            with (figures.folder / f"node_{node}.txt").open("w") as said:
                process = subprocess.Popen(
                    [sys.executable, "-m", "ray.scripts.scripts", "start", *where, *size, "--block"],
                    env=os.environ | apart,
                    stdout=said,
                    stderr=said,
                    start_new_session=True,
                )
            started.append(process)
            text = joined(process, figures.folder / f"node_{node}.txt")
            address = address or re.findall(r"ray start --address='(\S+)'", text)[0]
        yield address
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=40)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def joined(process: subprocess.Popen[bytes], said: Path) -> str:
    """What `ray start` printed, once the node is there."""
    by = time.monotonic() + 90
    while time.monotonic() < by and process.poll() is None:
        if "Ray runtime started" in (text := said.read_text()) and "block forever" in text:
            return text
        time.sleep(0.2)
    raise SystemExit(f"a node of the Ray cluster did not start: see {said}")


def rows(run: Path) -> list[dict[str, Any]]:
    """The whole rows of a run's metrics; of steps that were done again the last."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return list({row["step"]: row for row in found}.values())


def promised(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a resume has to repeat: all but times and memory."""
    return {name: value for name, value in row.items() if not name.startswith(("timer/", "system/"))}


def tensors(state: Path) -> dict[str, bytes]:
    """Every tensor's bytes by name, whichever rank's file it lies in."""
    from safetensors import safe_open

    found: dict[str, bytes] = {}
    for path in sorted(state.glob("*.safetensors")):
        with safe_open(path, "pt") as part:
            found |= {name: part.get_tensor(name).numpy().tobytes() for name in part.keys()}  # noqa: SIM118
    return found


@contextmanager
def reward_service(program: Program) -> Iterator[str]:
    """The toy scorer behind HTTP; its address."""
    process = program.start("reward-serve", "--scorer", "brightness", "--port", "0", "--revision", "toy", sets=False)
    assert process.stdout is not None
    line = process.stdout.readline()
    address = re.search(r"http://\S+", line)
    if address is None:
        raise SystemExit(f"the reward service did not start: {line!r}")
    try:
        yield address.group()
    finally:
        process.terminate()
        process.wait(timeout=30)


def killed_after(program: Program, figures: Figures, run: Path, step: int, *launch: str) -> float | None:
    """Launch, and kill the driver once the row of `step` is there; seconds from launch to the first row."""
    begun, first = time.monotonic(), None
    process = program.start(*launch)
    while figures.left() > 0 and process.poll() is None:
        there = len(rows(run))
        if there and first is None:
            first = time.monotonic() - begun
        if there >= step:
            break
        time.sleep(0.05)
    ended = process.poll()
    process.kill()
    process.communicate()
    if ended is not None:
        figures.found["failed"].append(" ".join(launch))
        figures.say(f"ended by itself with {ended}: {launch}; see {figures.folder / 'said.txt'}")
    return first


def published(program: Program, figures: Figures) -> None:
    """Twenty steps, killed and resumed."""
    run = figures.folder / "runs" / "published"
    name = f"{STEPS} steps with a checkpoint at 10, killed after step {KILLED}, resumed"
    if not figures.begin(name, LEAST["start"]):
        return
    launch = ("launch", "profile.toml", "--name", "published", "--steps", str(STEPS), "--quiet")
    first = killed_after(program, figures, run, KILLED, *launch)
    before = rows(run)
    again = time.monotonic()
    if program.run("resume", "published", "--steps", str(STEPS), sets=False) is None:
        return
    table = rows(run)
    steady = before[2:] + table[12:]
    timers = sorted({name for row in steady for name in row if name.startswith("timer/") and "per_second" not in name})
    found = {
        "launch_to_first_step_s": first,
        "resume_to_the_end_s": time.monotonic() - again,
        "steps": len(table),
        "step_s": statistics.median(row["timer/step"] for row in steady),
        "stages_s": {name: statistics.median(row.get(name, 0.0) for row in steady) for name in timers},
        "system": {name: max(row[name] for row in table if name in row) for name in table[-1] if "gpu" in name},
    }
    figures.found["published"] = found
    figures.say(f"launch to first step {first or 0:.1f} s, a step {found['step_s']:.3f} s, {len(table)} rows")
    figures.say(f"  stages, ms: { {n[6:]: round(s * 1e3, 1) for n, s in found['stages_s'].items()} }")
    figures.say(f"  {found['system']}")


def exact(program: Program, figures: Figures) -> None:
    """A deterministic run in one go against one that was killed."""
    if not figures.begin(f"deterministic: {EXACT_STEPS} steps in one go, and killed and resumed", LEAST["exact"]):
        return
    how = ("--set", "job.deterministic=true", "--set", "checkpoint.every=2", "--steps", str(EXACT_STEPS), "--quiet")
    if program.run("launch", "profile.toml", "--name", "straight", *how) is None:
        return
    runs = figures.folder / "runs"
    killed_after(program, figures, runs / "killed", EXACT_KILLED, "launch", "profile.toml", "--name", "killed", *how)
    if program.run("resume", "killed", sets=False) is None:
        return
    last = f"checkpoints/step_{EXACT_STEPS:06d}/state"
    one, other = (tensors(runs / name / last) for name in ("straight", "killed"))
    same = [promised(row) for row in rows(runs / "straight")] == [promised(row) for row in rows(runs / "killed")]
    equal = one == other and same and bool(one)
    step = statistics.median(row["timer/step"] for row in rows(runs / "straight")[1:])
    figures.found["exact"] = {"equal": equal, "tensors": len(one), "step_s": step}
    figures.say(f"rows equal: {same}; {len(one)} tensors equal: {one == other}; a step {step:.3f} s")
    if not equal:
        figures.found["failed"].append("exact resume")


def bench(program: Program, figures: Figures, ranks: int, size: int, *, least: float) -> None:
    """One `nftctl bench`."""
    if not figures.begin(f"bench, {ranks} ranks, {size}x{size}", least):
        return
    sides = ("--set", f"model.height={size}", "--set", f"model.width={size}")
    counts = ("--ranks", str(ranks), "--steps", "4", "--warm", "3", "--quiet")
    document = program.run("bench", "profile.toml", *counts, *sides)
    if document is None:
        return
    found = document["bench"]
    step, rollout = found["step"], found["rollout"]
    kept = {
        "ranks": ranks,
        "size": size,
        "step_s": step["seconds"],
        "floor_s": step["floor_seconds"],
        "outside_denoiser": step["outside_denoiser_share"],
        "samples_per_second_and_rank": step["samples_per_second_per_rank"],
        "rollout_ms": rollout["ms_per_forward"],
        "rollout_floor_ms": rollout["floor_ms"],
        "peak_gb": found["gpu_peak_gb"],
        "parts_s": {part["title"]: part["seconds"] for part in found["parts"]},
    }
    figures.found.setdefault("bench", []).append(kept)
    figures.say(
        f"  step {kept['step_s']:.3f} s, floor {kept['floor_s'] or 0:.3f}; rollout {kept['rollout_ms']:.2f} ms a "
        f"sample-forward, floor {kept['rollout_floor_ms'] or 0:.2f}; {kept['samples_per_second_and_rank']:.3f} samples "
        f"a second and rank; peak {kept['peak_gb']}"
    )


def summary(found: Mapping[str, Any], ranks: int, first_size: int) -> list[str]:
    """The table, in Markdown."""
    lines = [
        "| ranks | size | step | its floor | samples a second and rank | peak memory |",
        "|---|---|---|---|---|---|",
    ]
    for one in found.get("bench", []):
        peak = max(one["peak_gb"].values(), default=0.0) if one["peak_gb"] else 0.0
        lines.append(
            f"| {one['ranks']} | {one['size']}x{one['size']} | {one['step_s']:.3f} s | {one['floor_s'] or 0:.3f} s | "
            f"{one['samples_per_second_and_rank']:.3f} | {peak:.1f} GB |"
        )
    rate = {
        one["ranks"]: one["samples_per_second_and_rank"] for one in found.get("bench", []) if one["size"] == first_size
    }
    if 1 in rate:
        lines += [f"efficiency of {n} ranks against 1: {rate[n] / rate[1]:.3f}" for n in sorted(rate) if n > 1]
    return lines


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=lambda text: Path(text).resolve(), help="new, or one that holds base/")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--shape", default="cosmos3-nano")
    parser.add_argument("--sizes", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--nodes", type=int, default=0, help="on a Ray cluster of so many nodes, started for it here")
    parser.add_argument("--parts", nargs="+", choices=list(LEAST), default=list(LEAST))
    options = parser.parse_args()
    if options.nodes and options.ranks % options.nodes:
        parser.error(f"--ranks {options.ranks} is no multiple of --nodes {options.nodes}")
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    figures = Figures(folder, options.seconds - 15)
    on_cpu = any("cpu" in one for one in options.sets if one.startswith("grid.device"))
    there = [] if on_cpu else gpus()
    with contextlib.ExitStack() as open_things:
        if options.nodes:
            address = open_things.enter_context(cluster(figures, options.nodes, options.ranks, there))
            options.sets += [f'grid.address="{address}"', 'grid.strategy="spread"']
            figures.say(f"{options.nodes} Ray nodes at {address} for {options.ranks} ranks on {len(there)} GPUs")
        measure(options, figures, Program(figures, options.sets))
    if there and len(there) < options.ranks:
        figures.say(f"{options.ranks} ranks shared {len(there)} GPUs: what a step took is not what it takes")
        figures.found["shared_gpus"] = len(there)
    figures.keep()
    print("\n".join(summary(figures.found, options.ranks, options.sizes[0])))
    figures.say(f"figures in {folder / 'public_profile.json'}")
    return 1 if figures.found["failed"] else 0


def measure(options: argparse.Namespace, figures: Figures, program: Program) -> None:
    """Every part that is wanted."""
    folder: Path = options.folder
    base = folder / "base"
    if not (base / "model_index.json").exists():
        figures.say(f"writing a base of the shape {options.shape}")
        if program.run("bench", "--write-base", options.shape, str(base), sets=False) is None:
            return
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    with reward_service(program) as url:
        figures.say(f"reward service at {url}")
        text = PROFILE.format(ranks=options.ranks, base=base, folder=folder, url=url, size=options.sizes[0])
        (folder / "profile.toml").write_text(text)
        if "start" in options.parts:
            published(program, figures)
        if "exact" in options.parts:
            exact(program, figures)
        if "bench" not in options.parts:
            return
        for size in options.sizes:
            bench(program, figures, options.ranks, size, least=LEAST["bench"])
        for fewer in (n for n in (1, 2, 4, 8, 16, 32) if n < options.ranks):
            bench(program, figures, fewer, options.sizes[0], least=LEAST["bench"] * 0.7)


if __name__ == "__main__":
    sys.exit(main())
