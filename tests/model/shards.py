"""Distributed checkpoints cut by hand: every tensor in blocks over several files, as ranks of a world write them."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

from nftctl.run.outfolder import Entry, write_safetensors
from nftctl.run.stored import StoredTensors
from nftctl.tensorblocks import SHARDING_KEY
from nftctl.tensorfile import weight_files


def shard_name(rank: int) -> str:
    """The file of a rank, counted from 1, in the spelling of torch's writer."""
    return f"shard-{rank:05d}-model-00001-of-00001.safetensors"


def cut(base: Path, folder: Path, ranks: int) -> Path:
    """Write a pipeline folder's transformer as `ranks` files, each with its rows of every tensor, and the config."""
    stored = StoredTensors(weight_files(base / "transformer"))
    folder.mkdir(parents=True)
    for rank in range(ranks):
        entries, offsets = [], {}
        for name, (dtype, shape) in stored.forms.items():
            rows = -(-shape[0] // ranks)
            first, last = min(rank * rows, shape[0]), min((rank + 1) * rows, shape[0])
            if first < last:
                data = stored.read(name)[first:last].tobytes()
                entries.append(Entry(name, (dtype, (last - first, *shape[1:])), partial(list, [data])))
                offsets[name] = {"saved_offsets": [first, *[0] * (len(shape) - 1)]}
        write_safetensors(folder / shard_name(rank + 1), entries, {SHARDING_KEY: json.dumps(offsets)})
    (folder / "transformer").mkdir()
    shutil.copy(base / "transformer" / "config.json", folder / "transformer")
    return folder
