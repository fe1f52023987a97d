"""How much of a slow scorer's time a run really waits for.

Runs the tiny profile on two ranks twice against a service that scores one image after another: first at no cost, to see
how long a rollout takes, then at a cost that makes a whole step's images take half a rollout. Prints the service's own
seconds per step, the seconds that were exposed (`timer/reward_exposed`), and their ratio.

    python benchmarks/reward_overlap.py [--steps 6] [--rows 8] [--micro-batch 1] [--share 0.5]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aiohttp import web

RANKS = 2
WARM = 2
"""First steps that are left out: they load, compile and connect."""


class Sleeper:
    """A service that needs `seconds` for an image and has one pair of hands."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.busy = 0.0
        self._hands = asyncio.Lock()

    async def info(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"protocol": "nftctl-reward/1", "name": "sleeper", "revision": "1", "modalities": ["image"],
             "components": [], "max_items": 64}
        )  # fmt: skip

    async def score(self, request: web.Request) -> web.Response:
        items = (await request.json())["items"]
        async with self._hands:
            await asyncio.sleep(self.seconds * len(items))
            self.busy += self.seconds * len(items)
        scores = [{"id": item["id"], "score": len(item["image"]["data"]) % 97 / 97} for item in items]
        return web.json_response({"revision": "1", "scores": scores})


@contextmanager
def serving(sleeper: Sleeper) -> Iterator[str]:
    """The service on a loop of its own; yields its URL."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def start() -> str:
        app = web.Application(client_max_size=2**30)
        app.router.add_get("/v1/info", sleeper.info)
        app.router.add_post("/v1/score", sleeper.score)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)


def train(folder: Path, name: str, url: str, options: argparse.Namespace) -> dict[str, float]:
    """Medians over the steps of one run."""
    profile = folder / f"{name}.toml"
    profile.write_text(
        f'extends = "tiny_t2i_cpu"\n[rl]\ngroup_size = {RANKS}\n[data]\nrows_per_step = {options.rows}\n'
        f'[model]\nrollout_micro_batch = {options.micro_batch}\n[samples]\nprompts = 0\n[eval]\nprompt_file = ""\n'
        f'[[reward.providers]]\nname = "sleeper"\nurl = "{url}"\nrevision = "1"\n'
    )
    steps = str(WARM + options.steps)
    command = [sys.executable, "-m", "nftctl", "launch", str(profile), "--steps", steps, "--name", name, "-q"]
    subprocess.run(command, cwd=folder, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    rows = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").open()][WARM:]
    return {key: statistics.median(row[key] for row in rows) for key in rows[0] if key.startswith("timer/")}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="steps that are measured")
    parser.add_argument("--rows", type=int, default=8, help="rows of a step; each rank makes one image of each")
    parser.add_argument("--micro-batch", type=int, default=1, help="images that are decoded and sent together")
    parser.add_argument("--share", type=float, default=0.5, help="the scorer's time as a share of the rollout's")
    options = parser.parse_args()
    sleeper = Sleeper()
    with tempfile.TemporaryDirectory() as place, serving(sleeper) as url:
        free = train(Path(place), "free", url, options)
        sleeper.seconds = options.share * free["timer/sample"] / (RANKS * options.rows)
        slow = train(Path(place), "slow", url, options)
    own = sleeper.busy / (WARM + options.steps)
    exposed = slow["timer/reward_exposed"]
    print(f"rollout            {free['timer/sample']:.3f} s, {slow['timer/sample']:.3f} s with the slow scorer")
    print(f"scorer's own time  {own:.3f} s a step, {own / slow['timer/sample']:.0%} of the rollout")
    print(f"exposed            {exposed:.3f} s a step, {exposed / own:.1%} of the scorer's own time")
    print(f"step               {free['timer/step']:.3f} s, {slow['timer/step']:.3f} s with the slow scorer")


if __name__ == "__main__":
    main()
