"""Saves are snapshots, files are plain safetensors, and a load is exact or refused. Real gloo groups, real files."""

from __future__ import annotations

import errno
import json
import os
import pickle
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load as read_tensors
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from nftctl.engine import checkpoint
from nftctl.engine.checkpoint import (
    Saver,
    Snapshot,
    describe,
    load,
    load_optimizer,
    optimizer_like,
    optimizer_state,
)
from nftctl.errors import CheckpointUnusable, TrainingFailed
from nftctl.tensorfile import ITEM_BYTES, safetensors_header
from tests.model.world import run_world

ONE_FILE = "shard-00001-model-00001-of-00001.safetensors"


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    """The save group of a world of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.new_group(backend="gloo")
    dist.destroy_process_group()


def make_state(seed: int = 0) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {
        "policy.layers.0.lora_A": torch.randn(4, 6, generator=rng),
        "policy.layers.0.lora_B": torch.randn(6, 4, generator=rng).to(torch.bfloat16),
        "old.layers.0.lora_A": torch.randn(3, 4, 6, generator=rng)[1],
        "old.transposed": torch.randn(5, 2, generator=rng).t(),
        "optim.layers.0.lora_A.step": torch.tensor(17.0),
    }


def like(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(value) for name, value in state.items()}


def save(group: dist.ProcessGroup, state: dict[str, torch.Tensor], folder: Path) -> None:
    saver = Saver(group)
    saver.begin(state, folder)
    saver.finish()


def assert_bitwise(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype
        assert torch.equal(got[name], value), name


def test_a_round_trip_is_bitwise_and_leaves_the_targets_alone(group: dist.ProcessGroup, tmp_path: Path) -> None:
    state = make_state()
    save(group, state, tmp_path / "state")
    targets = like(state)
    assert_bitwise(load(tmp_path / "state", targets), state)
    assert all(not value.any() for value in targets.values())


def test_only_safetensors_are_written(group: dist.ProcessGroup, tmp_path: Path) -> None:
    state = make_state()
    save(group, state, tmp_path / "state")
    assert [path.name for path in (tmp_path / "state").iterdir()] == [ONE_FILE]
    raw = (tmp_path / "state" / ONE_FILE).read_bytes()
    header = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
    assert set(header) == {*state, "__metadata__"}
    assert header["optim.layers.0.lora_A.step"]["shape"] == []
    assert_bitwise(load_file(tmp_path / "state" / ONE_FILE), state)


def test_later_updates_do_not_reach_the_files(group: dist.ProcessGroup, tmp_path: Path) -> None:
    saver = Saver(group)
    for attempt in range(5):
        state = make_state(attempt) | {"policy.large": torch.randn(512, 1024)}
        expected = {name: value.clone() for name, value in state.items()}
        saver.begin(state, tmp_path / str(attempt))
        assert saver.busy
        for value in state.values():
            value.add_(1)
        saver.finish()
        assert_bitwise(load(tmp_path / str(attempt), like(state)), expected)


def test_a_snapshot_is_a_sound_file_of_what_the_tensors_were(tmp_path: Path) -> None:
    state = {"odd": torch.ones(3, dtype=torch.bfloat16), "flags": torch.tensor([True, False, True])} | make_state()
    state |= {"empty": torch.zeros(0, 4), "wide": torch.ones(2, dtype=torch.int64)}
    state["trained"] = torch.nn.Parameter(torch.ones(2))
    before = {name: value.detach().clone() for name, value in state.items()}
    snapshot = Snapshot(state)
    for value in state.values():
        value.detach().zero_()
    content = b"".join(snapshot.pieces())
    assert_bitwise(read_tensors(content), before)  # by the format's own library
    (tmp_path / ONE_FILE).write_bytes(content)
    found = safetensors_header(tmp_path / ONE_FILE)
    assert all(info.begin % ITEM_BYTES[info.dtype] == 0 for info in found.values())


def test_what_is_not_a_tensor_is_refused_before_anything_is_written(group: dist.ProcessGroup, tmp_path: Path) -> None:
    saver = Saver(group)
    with pytest.raises(TypeError, match=r"not optim\.lr, step$"):
        saver.begin(make_state() | {"step": 3, "optim.lr": 0.1}, tmp_path / "state")  # type: ignore[dict-item]
    assert not saver.busy
    assert not (tmp_path / "state").exists()


def test_one_save_at_a_time_and_only_into_an_empty_folder(group: dist.ProcessGroup, tmp_path: Path) -> None:
    saver = Saver(group)
    saver.begin(make_state(), tmp_path / "a")
    with pytest.raises(RuntimeError, match="has not been finished"):
        saver.begin(make_state(), tmp_path / "b")
    saver.finish()
    saver.finish()
    with pytest.raises(CheckpointUnusable, match="is not empty"):
        saver.begin(make_state(), tmp_path / "a")


def test_a_writer_is_waited_for_as_long_as_is_said_and_given_up_in_the_end(
    group: dist.ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, sound, saver = threading.Event(), os.fsync, Saver(group)
    monkeypatch.setattr(os, "fsync", lambda descriptor: gate.wait(60) and sound(descriptor))
    assert saver.finish(0.0)  # nothing is being written
    saver.begin(make_state(), tmp_path / "a")
    assert not saver.finish(0.0)
    assert not saver.finish(0.01)
    assert saver.busy
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "WRITING_S", 0.0)
        with pytest.raises(CheckpointUnusable, match="still being written"):
            saver.finish(0.0)
    gate.set()
    assert saver.finish(60.0)
    assert not saver.busy
    assert_bitwise(load(tmp_path / "a", like(make_state())), make_state())


def test_a_full_disk_is_named_and_the_saver_stays_usable(
    group: dist.ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    saver = Saver(group)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        saver.begin(make_state(), tmp_path / "a")
        with pytest.raises(CheckpointUnusable, match=r"rank 0 could not write .* no space is left on the device"):
            saver.finish()
    assert not saver.busy
    saver.begin(make_state(), tmp_path / "b")
    saver.finish()


def test_an_impossible_folder_is_a_checkpoint_error(group: dist.ProcessGroup, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    saver = Saver(group)
    saver.begin(make_state(), tmp_path / "file" / "state")
    with pytest.raises(CheckpointUnusable, match="Not a directory"):
        saver.finish()


def test_a_save_that_fails_otherwise_is_a_training_error(
    group: dist.ProcessGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("Connection closed by peer")

    saver = Saver(group)
    shards = {"base.sharded": distribute_tensor(sharded(), init_device_mesh("cpu", (1,)), [Shard(0)])}
    with monkeypatch.context() as patch:
        patch.setattr(dist, "gather_object", broken)
        saver.begin(make_state() | shards, tmp_path / "a")
        with pytest.raises(TrainingFailed, match="Connection closed by peer"):
            saver.finish()


def test_every_difference_is_listed(group: dist.ProcessGroup, tmp_path: Path) -> None:
    state = make_state()
    save(group, state | {"old.extra": torch.ones(2)}, tmp_path / "state")
    wanted = like(state) | {"policy.absent": torch.zeros(1)}
    wanted["policy.layers.0.lora_A"] = torch.zeros(4, 6, dtype=torch.float64)
    wanted["policy.layers.0.lora_B"] = torch.zeros(4, 6, dtype=torch.bfloat16)
    with pytest.raises(CheckpointUnusable) as caught:
        load(tmp_path / "state", wanted)
    lines = caught.value.message.splitlines()[1:]
    assert [line.strip() for line in lines] == [
        "tensor policy.absent: missing",
        "tensor old.extra: not in this run",
        "tensor policy.layers.0.lora_A: dtype F32, this run says F64",
        "tensor policy.layers.0.lora_B: shape [6, 4], this run says [4, 6]",
    ]


def test_empty_truncated_and_malformed_folders_are_refused(group: dist.ProcessGroup, tmp_path: Path) -> None:
    state = make_state()
    (tmp_path / "empty").mkdir()
    save(group, state, tmp_path / "cut")
    whole = (tmp_path / "cut" / ONE_FILE).read_bytes()
    for content in (whole[:-1], whole[:20], b""):
        (tmp_path / "cut" / ONE_FILE).write_bytes(content)
        with pytest.raises(CheckpointUnusable, match=ONE_FILE):
            load(tmp_path / "cut", like(state))
    with pytest.raises(CheckpointUnusable, match=r"policy\.layers\.0\.lora_A: missing"):
        load(tmp_path / "empty", like(state))


class Hostile:
    """Unpickling it writes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return (Path.write_text, (self.mark, "executed"))


def test_pickles_in_the_folder_are_never_opened(group: dist.ProcessGroup, tmp_path: Path) -> None:
    state, mark = make_state(), tmp_path / "mark"
    payload = pickle.dumps(Hostile(mark))
    save(group, state, tmp_path / "state")
    for name in (".metadata", "__0_0.distcp", "extra.pt", "pytorch_model.bin"):
        (tmp_path / "state" / name).write_bytes(payload)
    assert_bitwise(load(tmp_path / "state", like(state)), state)
    (tmp_path / "state" / "shard.safetensors").write_bytes(payload)
    with pytest.raises(CheckpointUnusable, match=r"shard\.safetensors"):
        load(tmp_path / "state", like(state))
    assert not mark.exists()
    pickle.loads(payload)  # the payload does work
    assert mark.exists()


def test_description_is_what_the_manifest_lists() -> None:
    assert describe({"b": torch.zeros(2, 3, dtype=torch.bfloat16), "a": torch.tensor(1.0)}) == {
        "a": {"dtype": "F32", "shape": []},
        "b": {"dtype": "BF16", "shape": [2, 3]},
    }


# -- optimizer ---------------------------------------------------------------------------------------------------


def make_optimizer(seed: int = 0) -> tuple[torch.optim.AdamW, dict[str, torch.nn.Parameter]]:
    rng = torch.Generator().manual_seed(seed)
    names = {name: torch.nn.Parameter(torch.randn(3, 2, generator=rng)) for name in ("b", "a", "c")}
    return torch.optim.AdamW(list(names.values()), lr=0.1, weight_decay=0.01, foreach=True), names


def advance(optimizer: torch.optim.AdamW, names: dict[str, torch.nn.Parameter], skip: tuple[str, ...] = ()) -> None:
    for name, parameter in names.items():
        parameter.grad = None if name in skip else parameter.detach().sin()
    optimizer.step()


def resume(
    group: dist.ProcessGroup, folder: Path, optimizer: torch.optim.AdamW, names: dict[str, torch.nn.Parameter]
) -> tuple[torch.optim.AdamW, dict[str, torch.nn.Parameter]]:
    """Save optimizer and parameters, then load both into new ones."""
    tensors, entries = optimizer_state(optimizer, names)
    save(group, tensors | {f"policy.{n}": p for n, p in names.items()}, folder)
    other, fresh = make_optimizer(seed=99)
    wanted = optimizer_like(fresh, entries)
    loaded = load(folder, wanted | {f"policy.{n}": p for n, p in fresh.items()})
    with torch.no_grad():
        for name, parameter in fresh.items():
            parameter.copy_(loaded[f"policy.{name}"])
    load_optimizer(other, fresh, loaded, entries)
    return other, fresh


def test_optimizer_goes_on_to_the_bit(group: dist.ProcessGroup, tmp_path: Path) -> None:
    optimizer, names = make_optimizer()
    for _ in range(3):
        advance(optimizer, names)
    other, fresh = resume(group, tmp_path / "state", optimizer, names)
    for _ in range(3):
        advance(optimizer, names)
        advance(other, fresh)
    assert_bitwise({n: p.detach() for n, p in fresh.items()}, {n: p.detach() for n, p in names.items()})
    assert_bitwise(optimizer_state(other, fresh)[0], optimizer_state(optimizer, names)[0])
    assert other.state[fresh["a"]]["step"].item() == 6


def test_state_before_the_first_step_is_absent_and_stays_absent(group: dist.ProcessGroup, tmp_path: Path) -> None:
    optimizer, names = make_optimizer()
    assert optimizer_state(optimizer, names) == ({}, [])
    other, fresh = resume(group, tmp_path / "state", optimizer, names)
    assert optimizer_state(other, fresh) == ({}, [])
    advance(optimizer, names)
    advance(other, fresh)
    assert torch.equal(fresh["b"], names["b"])


def test_a_parameter_without_gradient_has_no_entry(group: dist.ProcessGroup, tmp_path: Path) -> None:
    optimizer, names = make_optimizer()
    advance(optimizer, names, skip=("a",))
    tensors, entries = optimizer_state(optimizer, names)
    assert entries == ["b", "c"]
    assert sorted(tensors) == [f"optim.{n}.{m}" for n in ("b", "c") for m in ("exp_avg", "exp_avg_sq", "step")]
    other, fresh = resume(group, tmp_path / "state", optimizer, names)
    assert optimizer_state(other, fresh)[1] == ["b", "c"]
    advance(optimizer, names)
    advance(other, fresh)
    assert other.state[fresh["a"]]["step"].item() == 1
    assert torch.equal(fresh["a"], names["a"])


def test_loading_clears_what_was_there_and_keeps_the_hyperparameters() -> None:
    optimizer, names = make_optimizer()
    advance(optimizer, names)
    tensors, _ = optimizer_state(optimizer, names)
    other, fresh = make_optimizer()
    advance(other, fresh)
    other.param_groups[0]["lr"] = 0.7
    load_optimizer(other, fresh, tensors, ["b"])
    assert optimizer_state(other, fresh)[1] == ["b"]
    assert other.param_groups[0]["lr"] == 0.7


def test_foreign_names_and_states_are_refused() -> None:
    optimizer, names = make_optimizer()
    with pytest.raises(CheckpointUnusable, match="unknown parameters: gone"):
        optimizer_like(names, ["a", "gone"])
    with pytest.raises(ValueError, match="one to one"):
        optimizer_state(optimizer, {"a": names["a"]})
    other = torch.optim.AdamW(list(names.values()), amsgrad=True)
    advance(other, names)
    with pytest.raises(ValueError, match="max_exp_avg_sq"):
        optimizer_state(other, names)


# -- two ranks ---------------------------------------------------------------------------------------------------


def sharded(seed: int = 5) -> torch.Tensor:
    """The whole of a tensor that two ranks share unevenly."""
    return torch.randn(7, 3, generator=torch.Generator().manual_seed(seed))


def _rank(rank: int, parent: str) -> None:
    folder = Path(parent) / "state"
    mesh = init_device_mesh("cpu", (2,))
    saver = Saver(dist.new_group(backend="gloo"))
    state = make_state() | {"base.sharded": distribute_tensor(sharded(), mesh, [Shard(0)])}
    saver.begin(state, folder)
    for value in state.values():
        value.mul_(-3)
    # Training goes on with collectives on the default group while the save runs on its own.
    for _ in range(20):
        dist.all_reduce(torch.ones(1000))
    saver.finish()
    targets = {name: torch.zeros_like(value) for name, value in state.items()}
    loaded = load(folder, targets)
    whole = loaded.pop("base.sharded").full_tensor()
    assert torch.equal(whole, sharded())
    assert_bitwise(loaded, make_state())
    # One rank cannot write: both hear of it, with the rank that failed.
    # Whole tensors are rank 0's to write, and the other rank takes no part.
    saver.begin(make_state(), folder.with_name("whole"))
    assert saver.busy == (rank == 0)
    saver.finish()
    if rank == 1:
        os.fsync = _full  # type: ignore[assignment]
    saver.begin(state, folder.with_name("full"))
    with pytest.raises(CheckpointUnusable, match=r"rank 1 could not write .* no space"):
        saver.finish()


def _full(_: int) -> None:
    raise OSError(errno.ENOSPC, "full")


@pytest.fixture(scope="module")
def two_rank_save(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that two ranks saved, mutated at once and loaded again."""
    parent = tmp_path_factory.mktemp("two")
    run_world(_rank, 2, parent)
    return parent / "state"


def test_two_ranks_write_each_replicated_tensor_once(two_rank_save: Path) -> None:
    names = [f"shard-0000{i}-model-00001-of-00001.safetensors" for i in (1, 2)]
    assert sorted(path.name for path in two_rank_save.iterdir()) == names
    held = []
    for name in names:
        with safe_open(two_rank_save / name, framework="pt") as file:
            held.append(set(file.keys()))
    assert held[0] & held[1] == {"base.sharded"}
    assert held[0] | held[1] == {*make_state(), "base.sharded"}


def test_whole_tensors_are_written_by_one_rank(two_rank_save: Path) -> None:
    folder = two_rank_save.with_name("whole")
    assert [path.name for path in folder.iterdir()] == [ONE_FILE]
    assert_bitwise(load(folder, like(make_state())), make_state())


def test_two_rank_files_load_in_one_process(two_rank_save: Path) -> None:
    state = make_state() | {"base.sharded": sharded()}
    assert_bitwise(load(two_rank_save, like(state)), state)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("lost", [1, 2])
def test_a_missing_shard_passes_the_reader_and_is_refused_here(two_rank_save: Path, tmp_path: Path, lost: int) -> None:
    kept = two_rank_save / f"shard-0000{3 - lost}-model-00001-of-00001.safetensors"
    (tmp_path / kept.name).write_bytes(kept.read_bytes())
    with pytest.raises(CheckpointUnusable, match=r"base\.sharded: (shape|its 1 blocks)"):
        load(tmp_path, like({"base.sharded": sharded()}))
    if lost == 1:
        # What is refused above: the reader fills the second half and leaves the first as it was.
        target = {"base.sharded": torch.full((7, 3), 99.0)}
        dcp_load(target, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
        assert target["base.sharded"][:4].eq(99.0).all()
        assert torch.equal(target["base.sharded"][4:], sharded()[4:])


def test_overlapping_blocks_are_refused(two_rank_save: Path, tmp_path: Path) -> None:
    for path in two_rank_save.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    save_file({"base.sharded": sharded()}, tmp_path / "more.safetensors")
    with pytest.raises(CheckpointUnusable, match=r"base\.sharded: its 3 blocks"):
        load(tmp_path, like(make_state() | {"base.sharded": sharded()}))
