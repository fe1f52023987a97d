"""What loading a base takes of a host's memory: what is kept, and no second copy of any part beside it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nftctl.model import rehearsal, shapes
from nftctl.model.rehearsal import Shape, write_base
from tests.conftest import clean_environment

PROGRAM = """
import gc, json, sys, threading, time
import torch
from nftctl.model.registry import load_family
from nftctl.profile.schema import Model

small, base = sys.argv[1:]
cpu = torch.device("cpu")

def load(folder, dtype, unread):
    model = Model(height=64, width=64, dtype=dtype, decode_dtype=dtype)
    return load_family(model, folder, "cosmos3", cpu, unread=unread)

def anonymous():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("RssAnon:")) * 1024

def watch():
    while not done.is_set():
        peaks.append(anonymous())
        time.sleep(0.0005)

load(small, "float32", True)  # whatever is imported late is there now
found = {}
for name, dtype, unread in (("mapped", "bfloat16", True), ("cast", "float32", True), ("all", "float32", False)):
    family = None
    gc.collect()
    before, peaks, done = anonymous(), [], threading.Event()
    watcher = threading.Thread(target=watch)
    watcher.start()
    family = load(base, dtype, unread)
    done.set()
    watcher.join()
    kept = [*family.encoder.tower.parameters(), *family.decoder.vae.parameters()]
    found[name] = [sum(p.nbytes for p in kept), max(peaks + [anonymous()]) - before]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base`, about 140 MB in bfloat16, and the tiny one beside it."""
    folder = tmp_path_factory.mktemp("bases")
    tower = {"hidden_size": 640, "intermediate_size": 1920, "num_attention_heads": 5, "num_key_value_heads": 1}
    shape = Shape({**tower, "num_hidden_layers": 4, "vocab_size": 16384}, {**shapes.SMALL_VAE, "base_dim": 40})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(rehearsal.SHAPES, "probe", shape)
        write_base("probe", folder / "base")
    write_base("cosmos3-tiny", folder / "small")
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_prompt_encoder_and_decoder_are_read_tensor_by_tensor(bases: Path) -> None:
    """By how much a process's anonymous memory grows at the most, beside the bytes of prompt encoder and decoder."""
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(bases / "small"), str(bases / "base")],
        capture_output=True, text=True, check=True, env=clean_environment(),
    )  # fmt: skip
    facts = json.loads(answer.stdout.splitlines()[-1])
    kept, peak = facts["mapped"]
    assert kept > 75e6
    # In the precision of their files they stay mapped, but for what single frames are decoded with: copies of slices.
    assert peak < 0.15 * kept
    # In another there is one copy; a second one beside it would be half as much again, or more.
    kept, peak = facts["cast"]
    assert 0.9 * kept < peak < 1.1 * kept
    # The measure sees what is too much: the denoiser, which this time nobody left for later.
    kept, peak = facts["all"]
    assert peak > 1.25 * kept
