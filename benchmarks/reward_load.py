"""What it costs to get a step's images scored when scoring itself costs nothing.

Three tables. 1: CPU per image of every stage of a request, for each encoding, in one process. 2: a step of 64 images
of 512x512 from 8 client processes over loopback against `nftctl reward-serve` with an empty scorer: CPU per image of
client and server (all of its processes), and wall. 3: one client and a scorer that sleeps per image, one big request
against small ones, one after another and overlapped: what small requests gain, and what overlap gains.

"png before" is Pillow's writer at level 1, put back for the comparison; rows of a table are measured in turns.

    python benchmarks/reward_load.py [--side 512] [--images 64] [--clients 8] [--workers 2] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import io
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import psutil
from PIL import Image

from nftctl.reward import images as wire
from nftctl.reward.client import RewardClient
from nftctl.reward.exchange import deadline_in
from nftctl.reward.png import write_png
from nftctl.reward.protocol import Item

ENCODINGS = ("png before", "png", "jpeg", "raw")
SCORER = """
import time
def empty(images, prompts, metadata):
    return [0.0] * len(images)
def sleepy(images, prompts, metadata):
    time.sleep(SECONDS * len(images))
    return [0.0] * len(images)
"""


def picture(seed: int, side: int) -> np.ndarray:
    """Something like a photograph to a compressor: broad and fine shapes, and a little noise."""
    rng = np.random.default_rng(seed)
    out = rng.normal(0, 3, (side, side, 3))
    for cells, depth in ((9, 255), (65, 80)):
        small = rng.uniform(0, depth, (cells, cells, 3)).astype(np.float32)
        planes = [Image.fromarray(small[..., c]).resize((side, side), Image.Resampling.BICUBIC) for c in range(3)]
        out += np.stack([np.asarray(plane) for plane in planes], axis=-1) - (depth / 2 if cells > 9 else 0)
    return out.clip(0, 255).astype(np.uint8)


def pillow_png(pixels: np.ndarray) -> bytes:
    """The writer before: Pillow's, level 1."""
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, format="PNG", compress_level=1)
    return out.getvalue()


def use(encoding: str) -> wire.Encoding:
    """Make this process's client write `encoding`; the name to ask it for."""
    general = wire._to_file

    def to_file(pixels: np.ndarray, kind: str, quality: int) -> bytes:
        if kind != "png":
            return general(pixels, kind, quality)
        return pillow_png(pixels) if encoding == "png before" else write_png(pixels)

    wire._to_file = to_file
    return encoding.split()[0]  # type: ignore[return-value]


# ---------------------------------------------------------------------------------------------- 1: stages


def stages(pictures: list[np.ndarray]) -> None:
    """CPU milliseconds per image and stage; the least of five rounds."""
    raw = [p.tobytes() for p in pictures]
    files = {
        "png before": [pillow_png(p) for p in pictures],
        "png": [write_png(p) for p in pictures],
        "jpeg": [wire._to_file(p, "jpeg", wire.JPEG_QUALITY) for p in pictures],
        "raw": raw,
    }
    writers: dict[str, Callable[[np.ndarray], Any]] = {
        "png before": pillow_png,
        "png": write_png,
        "jpeg": lambda p: wire._to_file(p, "jpeg", wire.JPEG_QUALITY),
        "raw": lambda p: p.tobytes(),
    }
    print("\n1. CPU ms per image and stage          client                   |  server")
    print("             kB     pixels-file  base64   JSON   |  JSON   digest  base64  file-pixels |  sum   of before")
    before = 0.0
    for encoding in ENCODINGS:
        blobs = files[encoding]
        text = [base64.b64encode(b).decode() for b in blobs]
        body = [orjson.dumps({"data": t}) for t in text]
        kind, side = encoding.split()[0], pictures[0].shape[0]
        encoded = [wire.encode_image(p, kind) for p in pictures] if kind != "png" else text
        b64 = cpu(lambda t: base64.b64decode(t, validate=True), text)
        row = [
            cpu(writers[encoding], pictures),
            cpu(base64.b64encode, blobs),
            cpu(lambda t: orjson.dumps({"data": t}), text),
            cpu(orjson.loads, body),
            cpu(lambda b: hashlib.sha256(b).digest(), body),
            b64,
            max(0.0, cpu(lambda t, k=kind, s=side: wire.decode_image(k, s, s, t), encoded) - b64),
        ]
        before = before or sum(row)
        cells = "  ".join(f"{v:7.2f}" for v in row)
        print(f"  {encoding:10} {len(blobs[0]) / 1000:5.0f}  {cells}  {sum(row):8.2f}  {sum(row) / before:6.2f}")


def cpu(run: Callable[[Any], Any], inputs: list[Any], rounds: int = 5) -> float:
    """CPU milliseconds of one call."""
    best = float("inf")
    for _ in range(rounds):
        started = time.process_time()
        for given in inputs:
            run(given)
        best = min(best, time.process_time() - started)
    return best / len(inputs) * 1000


# ---------------------------------------------------------------------------------------------- 2 and 3: a step


@contextmanager
def served(function: str, workers: int, seconds: float = 0.0) -> Iterator[tuple[psutil.Process, str]]:
    """`nftctl reward-serve` around one of the functions above."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "scorer.py")
        path.write_text(SCORER.replace("SECONDS", str(seconds)))
        command = [sys.executable, "-m", "nftctl", "reward-serve", "--port", "0", "--revision", "bench"]
        command += ["--scorer", f"{path}:{function}", "--workers", str(workers)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout
                yield psutil.Process(process.pid), process.stdout.readline().removeprefix("listening on ").strip()
            finally:
                process.terminate()


def server_cpu(process: psutil.Process) -> float:
    """Seconds that the server and its workers have used."""
    return sum(sum(p.cpu_times()[:2]) for p in (process, *process.children(recursive=True)))


def client(url: str, job: dict[str, Any], start: Any, results: Any) -> None:
    """One client process: its share of the step, when told to start."""
    encoding = use(job["encoding"])
    items = [Item(f"{n}/{job['rank']}", "p", {}, picture(n, job["side"])) for n in range(job["share"])]

    async def run() -> tuple[float, float]:
        async with RewardClient(
            url, "bench", encoding=encoding, max_items=job["per_request"], read_timeout=300
        ) as asked:
            await asked.info()
            await asyncio.to_thread(start.wait)
            wall, used = time.perf_counter(), time.process_time()
            size = len(items) if job["overlap"] else job["per_request"]
            for n in range(0, len(items), size):
                key = f"{job['key']}/{job['rank']}/{n}"
                await asked.score(items[n : n + size], key=key, deadline=deadline_in(600))
            return time.perf_counter() - wall, time.process_time() - used

    results.put(asyncio.run(run()))


def step(url: str, server: psutil.Process, options: argparse.Namespace, **job: Any) -> tuple[float, float, float]:
    """Slowest client's wall in seconds, client CPU and server CPU in ms per image."""
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(options.clients), context.Queue()
    share = options.images // options.clients
    base = {"side": options.side, "share": share, "key": f"{time.time_ns()}", "overlap": True, "per_request": share}
    jobs = [base | job | {"rank": rank} for rank in range(options.clients)]
    clients = [context.Process(target=client, args=(url, j, start, results)) for j in jobs]
    used = server_cpu(server)
    for process in clients:
        process.start()
    done = [results.get(timeout=600) for _ in clients]
    for process in clients:
        process.join()
    images = share * options.clients
    server_ms = (server_cpu(server) - used) / images * 1000
    return max(w for w, _ in done), sum(c for _, c in done) / images * 1000, server_ms


def loopback(options: argparse.Namespace) -> None:
    """Table 2."""
    print(f"\n2. {options.images} images {options.side}x{options.side}, {options.clients} clients, empty scorer:")
    print("   medians; CPU ms per image           client          server          wall of the step")
    rows: dict[str, list[tuple[float, float, float]]] = {encoding: [] for encoding in ENCODINGS}
    with served("empty", options.workers) as (server, url):
        for _ in range(options.rounds):
            for encoding in ENCODINGS:
                rows[encoding].append(step(url, server, options, encoding=encoding))
    first = [statistics.median(column) for column in zip(*rows[ENCODINGS[0]], strict=True)]
    for encoding, found in rows.items():
        wall, mine, theirs = (statistics.median(column) for column in zip(*found, strict=True))
        print(
            f"   {encoding:28}  {mine:7.2f} ({mine / first[1]:4.2f})  {theirs:7.2f} ({theirs / first[2]:4.2f})"
            f"  {wall * 1000:7.0f} ms ({wall / first[0]:4.2f})"
        )


def splitting(options: argparse.Namespace) -> None:
    """Table 3."""
    share = options.images // options.clients
    cases = {
        f"1 request of {share}": {"per_request": share},
        f"{share} requests of 1, in turn": {"per_request": 1, "overlap": False},
        f"{share} requests of 1, overlapped": {"per_request": 1},
    }
    seconds = options.sleep / 1000
    print(f"\n3. raw images, a scorer that sleeps {options.sleep:g} ms per image, {share} images from one client:")
    for workers in (1, 4):
        alone = argparse.Namespace(**vars(options) | {"clients": 1, "images": share})
        rows: dict[str, list[tuple[float, float, float]]] = {case: [] for case in cases}
        with served("sleepy", workers, seconds) as (server, url):
            for _ in range(options.rounds):
                for case, job in cases.items():
                    rows[case].append(step(url, server, alone, encoding="raw", **job))
        first = 0.0
        for case, found in rows.items():
            wall = statistics.median(w for w, _, _ in found)
            first = first or wall
            print(f"   {workers} at once, {case:32} {wall * 1000:7.0f} ms ({wall / first:4.2f})")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("side", 512), ("images", 64), ("clients", 8), ("workers", 2), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--sleep", type=float, default=50.0, help="milliseconds per image of table 3's scorer")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    stages([picture(n, options.side) for n in range(8)])
    loopback(options)
    splitting(options)


if __name__ == "__main__":
    main()
