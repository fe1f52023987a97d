"""What a resume restores and what it refuses: one run on one started world, copied and cut as each test needs it."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from safetensors.torch import load_file, save_file

from nftctl.engine import loop
from nftctl.engine.evaluation import Evaluation
from nftctl.engine.loop import request_stop, run_job
from nftctl.engine.plan import JobPlan, plan_launch, plan_resume
from nftctl.engine.saving import Checkpoints
from nftctl.errors import CheckpointUnusable
from nftctl.profile.load import bundled_profiles, load_profile
from nftctl.run.checkpoints import list_steps
from nftctl.run.directory import RunDirectory, find_checkpoint
from nftctl.run.disk import point_link
from nftctl.run.manifest import read_manifest, verify, write_manifest
from nftctl.run.state import RunState
from tests.conftest import Quiet
from tests.engine.test_world import promised, rows_of, tensors_of

pytestmark = pytest.mark.ray

SETS = (
    "data.rows_per_step=4", "rl.sample_steps=4", 'eval.prompt_file=""', "samples.prompts=0", 'job.name="run"',
    "checkpoint.every=2", "data.shuffle=true", 'rl.old.decay="linear"', "optimizer.lr=0.006",
    "optimizer.warmup_steps=6",
)  # fmt: skip
HELD_OUT = ('eval.prompt_file="embedded"', "eval.samples_per_prompt=1", "eval.steps=3")
RATES = [0.001, 0.002, 0.003, 0.004]
"""Six warm-up steps of 0.006 in all, whatever the run's length is."""


def resolved(steps: int, *sets: str) -> Any:
    return load_profile(bundled_profiles()["tiny_t2i_cpu"], sets=[*SETS, *sets], flags={"rl.max_steps": steps}, env={})


def resume_plan(run: Path, steps: int, *sets: str) -> JobPlan:
    opened, checkpoint = find_checkpoint(str(run), run.parent)
    return plan_resume(opened, checkpoint, resolved(steps, *sets), steps=steps)


def watch_draws(worker: Any) -> None:
    """Remember every random tensor of a step from here on, with its key."""
    from nftctl.algorithm import draws

    worker.drawn, original = [], draws.normal

    def normal(shape: tuple[int, ...], *key: Any) -> torch.Tensor:
        value = original(shape, *key)
        worker.drawn.append((key, value.numpy().tobytes()))
        return value

    draws.normal = normal
    worker.unwatch = lambda: setattr(draws, "normal", original)


@dataclass
class Watching(Quiet):
    """A reporter that begins to watch the draws of all ranks once step 2 is done."""

    world: Any = None

    def __post_init__(self) -> None:
        super().__init__()

    def step(self, row: Any, total: int) -> None:
        super().step(row, total)
        if row["step"] == 2:
            self.world.call("apply", watch_draws)


def stop_watching(world: Any) -> list[list[tuple[Any, bytes]]]:
    drawn: list[list[tuple[Any, bytes]]] = world.call("apply", lambda w: w.unwatch() or w.drawn)
    return drawn


@dataclass(frozen=True)
class Straight:
    """A run of four steps that nothing happened to, checkpoints at 2 and 4, events for TensorBoard."""

    path: Path
    rows: list[dict[str, Any]]
    drawn: list[list[tuple[Any, bytes]]]
    tensors: dict[int, dict[str, bytes]] = field(default_factory=dict)


@pytest.fixture(scope="module")
def straight(world4: Any, tmp_path_factory: pytest.TempPathFactory) -> Straight:
    plan = plan_launch(resolved(4), run_dir=tmp_path_factory.mktemp("straight"))
    summary = run_job(plan, Watching(world4), world4)
    drawn = stop_watching(world4)
    tensors = {n: tensors_of(plan.run_path / "checkpoints" / f"step_{n:06d}") for n in (2, 4)}
    return Straight(plan.run_path, [promised(row) for row in rows_of(summary)], drawn, tensors)


@pytest.fixture
def crashed(straight: Straight, tmp_path: Path) -> Path:
    """The same run as a crash in step 5, before the checkpoint of step 4 was whole, would have left it."""
    run = Path(shutil.copytree(straight.path, tmp_path / "run", symlinks=True))
    shutil.rmtree(run / "checkpoints" / "step_000004")
    point_link(run / "checkpoints" / "latest", "step_000002")
    return run


# -- the same run -------------------------------------------------------------------------------------------------


def test_after_a_crash_the_run_is_the_one_that_had_none(
    world4: Any, straight: Straight, crashed: Path, reporter: Any
) -> None:
    """Rows, draws on every rank, tensors; metrics and events hold each step once, and what is done again is said."""
    world4.call("apply", watch_draws)
    try:
        summary = run_job(resume_plan(crashed, 4), reporter, world4)
    finally:
        drawn = stop_watching(world4)
    assert len(drawn) == 4
    for rank, values in enumerate(drawn):
        mine = [entry for entry in values if entry[0][1] in ("rollout", "train_eps")]
        assert mine[0] == straight.drawn[rank][0]
        assert mine == straight.drawn[rank]
    assert [promised(row) for row in rows_of(summary)] == straight.rows
    assert tensors_of(Path(summary["checkpoint"])) == straight.tensors[4]
    assert [row["step"] for row in rows_of(summary)] == [1, 2, 3, 4]
    assert [step for step, _ in events(crashed)] == [1, 2, 3, 4]
    assert [note for note in reporter.notes if "done again" in note] == [
        "steps 3 to 4 had been taken after that checkpoint and are done again; 2 rows of metrics.jsonl are replaced"
    ]


def events(run: Path) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run / "tensorboard"))
    accumulator.Reload()
    return [(e.step, e.value) for e in accumulator.Scalars("train/reward_mean")]


def test_a_total_raised_on_resuming_changes_no_rate_and_no_bit(
    world4: Any, straight: Straight, reporter: Any, tmp_path: Path
) -> None:
    """Launched for two steps, resumed for four. The first save was read while step 3 of the other run went on."""
    halted = run_job(plan_launch(resolved(2), run_dir=tmp_path), reporter, world4)
    assert tensors_of(Path(halted["checkpoint"])) == straight.tensors[2]
    resumed = run_job(resume_plan(Path(halted["run"]), 4), reporter, world4)
    assert [row["train/lr"] for row in rows_of(resumed)] == pytest.approx(RATES, rel=1e-12)
    assert [promised(row) for row in rows_of(resumed)] == straight.rows
    assert tensors_of(Path(resumed["checkpoint"])) == straight.tensors[4]
    assert not any("done again" in note for note in reporter.notes)


def test_events_that_cannot_be_written_are_one_warning_and_change_nothing(
    world4: Any, straight: Straight, crashed: Path, reporter: Any
) -> None:
    shutil.rmtree(crashed / "tensorboard")
    (crashed / "tensorboard").write_text("in the way")
    summary = run_job(resume_plan(crashed, 4), reporter, world4)
    assert len(reporter.warnings) == 1
    assert "TensorBoard" in reporter.warnings[0]
    assert [promised(row) for row in rows_of(summary)] == straight.rows


def optimizer_bits(worker: Any) -> dict[str, bytes]:
    """AdamW's step and moments on this rank, under the names of a checkpoint."""
    from nftctl.engine.checkpoint import optimizer_state

    tensors, _ = optimizer_state(worker.roles.policy.optimizer, worker.roles.policy.parameters)
    return {name: value.numpy().tobytes() for name, value in tensors.items()}


def test_a_save_before_the_first_optimizer_step_is_resumed(
    world4: Any, straight: Straight, reporter: Any, tmp_path: Path
) -> None:
    plan, run = built(world4, tmp_path, reporter)
    saves = Checkpoints(plan, run, world4)
    saves.begin(RunState(), [])
    saved = saves.finish()
    assert saved is not None
    assert verify(saved) == []
    assert read_manifest(saved).optimizer_entries == []
    summary = run_job(resume_plan(run.path, 2), reporter, world4)
    assert [promised(row) for row in rows_of(summary)] == straight.rows[:2]
    assert tensors_of(Path(summary["checkpoint"])) == straight.tensors[2]


def built(world: Any, folder: Path, reporter: Any, *sets: str) -> tuple[JobPlan, RunDirectory]:
    """A fresh run whose ranks have built their roles and taken no step: asked to stop before the first."""
    plan = plan_launch(resolved(2, *sets), run_dir=folder)
    request_stop(signal.SIGTERM)
    summary = run_job(plan, reporter, world)
    assert summary["steps"]["to"] == 0
    return plan, RunDirectory.open(plan.run_path)


def test_a_parameter_that_never_had_a_gradient_has_no_state_before_and_after(
    world4: Any, straight: Straight, crashed: Path, reporter: Any
) -> None:
    run_job(resume_plan(crashed, 2), reporter, world4)  # loads step 2 and takes no step
    name = "layers.0.self_attn.to_add_out.lora_A"

    def forget(worker: Any) -> None:
        del worker.roles.policy.optimizer.state[worker.roles.policy.parameters[name]]

    world4.call("apply", forget)
    before = world4.call("apply", optimizer_bits)
    plan = resume_plan(crashed, 2)
    saves = Checkpoints(plan, RunDirectory.open(crashed), world4)
    saves.begin(plan.state, [])
    saved = saves.finish()
    assert saved is not None
    assert name not in read_manifest(saved).optimizer_entries
    assert len(read_manifest(saved).optimizer_entries) == 31
    run_job(resume_plan(crashed, 2), reporter, world4)
    assert world4.call("apply", optimizer_bits) == before
    assert all(len(rank) == 31 * 3 for rank in before)
    run_job(resume_plan(crashed, 3), reporter, world4)
    after = world4.call("apply", optimizer_bits)
    assert [torch.frombuffer(bytearray(rank[f"optim.{name}.step"]), dtype=torch.float32).item() for rank in after] == [
        1.0
    ] * 4


def test_evaluation_right_after_a_resume_is_the_one_before_the_save(world4: Any, tmp_path: Path, reporter: Any) -> None:
    held_out = (*HELD_OUT, "optimizer.warmup_steps=0")
    plan = plan_launch(resolved(2, *held_out), run_dir=tmp_path)
    summary = run_job(plan, reporter, world4)
    after = summary["eval"]["after"]
    assert after["eval/reward"] != summary["eval"]["before"]["eval/reward"]
    run_job(plan_launch(resolved(1, 'job.name="other"', "rl.seed=9"), run_dir=tmp_path), reporter, world4)
    # Builds and loads; no step is left to take, and the scorer is up for the time of the run alone.
    looking = Between(world4, lambda method: evaluation.score(world4, 2) if method == "build" else None)
    evaluation = Evaluation.of(plan.profile, plan.prompt_path)
    run_job(resume_plan(plan.run_path, 2, *held_out), reporter, looking)  # type: ignore[arg-type]
    assert looking.seen == [after]


class Between:
    """The world, with something done after each call; what that gave is kept, unless it was nothing."""

    def __init__(self, world: Any, then: Callable[[str], Any]) -> None:
        self._world, self._then = world, then
        self.seen: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)

    def call(self, method: str, *args: Any) -> list[Any]:
        answers: list[Any] = self._world.call(method, *args)
        self._done(method)
        return answers

    def call_one(self, rank: int, method: str, *args: Any) -> Any:
        answer = self._world.call_one(rank, method, *args)
        self._done(method)
        return answer

    def _done(self, method: str) -> None:
        self.seen += [found] if (found := self._then(method)) is not None else []


# -- who is trained -------------------------------------------------------------------------------------------------


def look_at_adapters(worker: Any) -> dict[str, Any]:
    """What requires gradients, what the optimizer holds, dtypes, and the bits of the base on this rank."""
    import hashlib

    from nftctl.model import shard

    denoiser, policy = worker.roles.family.denoiser, worker.roles.policy
    shard.release(denoiser)  # what a step gathered stays gathered
    named = dict(denoiser.named_parameters())
    held = {id(p) for group in policy.optimizer.param_groups for p in group["params"]}
    base = hashlib.sha256()
    for name in sorted(n for n in named if "lora_" not in n):
        base.update(named[name].to_local().detach().contiguous().view(torch.uint8).numpy().tobytes())
    return {
        "trainable": sorted(n for n, p in named.items() if p.requires_grad),
        "optimized": sorted(n for n, p in named.items() if id(p) in held),
        "policy": sorted(n for n in named if ".policy." in n),
        "lora_dtypes": {str(p.dtype) for n, p in named.items() if "lora_" in n},
        "with_gradient": sorted(n for n, p in named.items() if p.grad is not None and ".policy." not in n),
        "base": base.hexdigest(),
    }


def test_only_the_policy_adapter_is_trained_after_build_step_and_resume(
    world4: Any, crashed: Path, reporter: Any, tmp_path: Path
) -> None:
    built(world4, tmp_path / "fresh", reporter)
    seen = [world4.call("apply", look_at_adapters)]
    run_job(resume_plan(crashed, 2), reporter, world4)
    seen.append(world4.call("apply", look_at_adapters))
    run_job(resume_plan(crashed, 3), reporter, world4)  # rollout under old, forwards of old, a step, a refresh
    seen.append(world4.call("apply", look_at_adapters))
    for ranks in seen:
        for rank in ranks:
            assert len(rank["policy"]) == 32
            assert rank["trainable"] == rank["optimized"] == rank["policy"]
            assert rank["with_gradient"] == []
            assert rank["lora_dtypes"] == {"torch.float32"}
    for ranks in zip(*seen, strict=True):
        assert len({rank["base"] for rank in ranks}) == 1


def test_a_base_in_bfloat16_trains_an_adapter_in_float32(world4: Any, tmp_path: Path, reporter: Any) -> None:
    summary = run_job(
        plan_launch(resolved(2, 'model.dtype="bfloat16"', "rl.kl_beta=0.1"), run_dir=tmp_path), reporter, world4
    )
    rows = rows_of(summary)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["train/grad_norm"] > 0 for row in rows)
    assert all(rank["lora_dtypes"] == {"torch.float32"} for rank in world4.call("apply", look_at_adapters))
    manifest = read_manifest(Path(summary["checkpoint"]))
    assert {entry["dtype"] for entry in manifest.tensors.values()} == {"F32"}


def test_the_base_that_was_loaded_is_the_one_that_is_trained_on(
    world4: Any, straight: Straight, tmp_path: Path, reporter: Any
) -> None:
    """Another base, of random numbers, is loaded in full as well, and its first step is clearly another one."""
    from nftctl.profile.prompts import base_folder

    other = tmp_path / "base"
    shutil.copytree(base_folder("embedded"), other)
    (weights,) = (other / "transformer").glob("*.safetensors")
    rng = torch.Generator().manual_seed(0)
    tensors = {n: torch.randn(t.shape, generator=rng).mul(0.05).to(t.dtype) for n, t in load_file(weights).items()}
    weights.unlink()
    save_file(tensors, weights)
    summary = run_job(plan_launch(resolved(1, f'rl.init_from="{other}"'), run_dir=tmp_path), reporter, world4)
    (said,) = [note for note in reporter.notes if "base tensors loaded" in note]
    loaded, _, expected = said.split(": ")[1].split()[:3]
    assert int(loaded) == int(expected) > 50
    trained, random = straight.rows[0]["train/loss"], promised(rows_of(summary)[0])["train/loss"]
    assert abs(random - trained) > 0.2 * trained


# -- refused ------------------------------------------------------------------------------------------------------


def rewrite(run: Path, change: Callable[[dict[str, torch.Tensor], list[str]], None]) -> Path:
    """The checkpoint of step 2 with other tensors, and a manifest that is true of them."""
    folder = run / "checkpoints" / "step_000002"
    manifest = read_manifest(folder)
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted((folder / "state").glob("*.safetensors")):
        tensors |= {name: value.clone() for name, value in load_file(path).items()}
        path.unlink()
    change(tensors, manifest.optimizer_entries)
    save_file(tensors, folder / "state" / "all.safetensors")
    manifest.tensors = {n: {"dtype": "F32", "shape": list(t.shape)} for n, t in tensors.items()}
    (folder / "manifest.json").unlink()
    write_manifest(folder, manifest)
    assert verify(folder) == []
    return folder


def add(tensors: dict[str, torch.Tensor], entries: list[str]) -> None:
    tensors |= {f"{part}.more.lora_A": torch.zeros(2) for part in ("policy", "old")}


def drop(tensors: dict[str, torch.Tensor], entries: list[str]) -> None:
    name = "layers.0.self_attn.to_add_out.lora_A"
    for key in (f"policy.{name}", f"old.{name}", *(f"optim.{name}.{m}" for m in ("exp_avg", "exp_avg_sq", "step"))):
        del tensors[key]
    entries.remove(name)


def narrow(tensors: dict[str, torch.Tensor], entries: list[str]) -> None:
    name = "layers.0.self_attn.to_add_out.lora_A"
    tensors[f"old.{name}"] = tensors[f"old.{name}"][:1]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (add, ["tensor policy.more.lora_A: not in this run", "tensor old.more.lora_A: not in this run"]),
        (
            drop,
            [
                "tensor policy.layers.0.self_attn.to_add_out.lora_A: missing",
                "tensor old.layers.0.self_attn.to_add_out.lora_A: missing",
            ],
        ),
        (narrow, ["tensor old.layers.0.self_attn.to_add_out.lora_A: shape [1, "]),
    ],
)
def test_a_whole_checkpoint_of_other_tensors_is_refused_with_every_name(
    world4: Any, crashed: Path, reporter: Any, change: Any, named: list[str]
) -> None:
    """Such a checkpoint would be skipped over in silence by the reader below; nothing of it is loaded."""
    folder = rewrite(crashed, change)
    before = (folder / "manifest.json").read_bytes()
    with pytest.raises(CheckpointUnusable) as refused:
        run_job(resume_plan(crashed, 4), reporter, world4)
    assert all(name in refused.value.message for name in named), refused.value.message
    assert refused.value.message.count("\n") == len(named)
    assert (folder / "manifest.json").read_bytes() == before
    assert reporter.rows == []


# -- stopped ------------------------------------------------------------------------------------------------------


def stop_after(stage: str, number: int) -> Callable[[str], None]:
    """A SIGTERM that arrives with the end of the n-th call of one stage, before the driver does anything else."""
    left = [number]

    def then(method: str) -> None:
        left[0] -= method == stage
        if method == stage and not left[0]:
            request_stop(signal.SIGTERM)

    return then


@pytest.fixture(autouse=True)
def no_signal() -> Iterator[None]:
    yield
    request_stop(0)


@pytest.mark.parametrize("stage", ["train", "evaluate"])
def test_a_stop_when_no_step_is_left_is_a_finished_run(
    world4: Any, crashed: Path, tmp_path: Path, reporter: Any, stage: str
) -> None:
    """In the last step, and in the look that comes after it; before the first step there is nothing to finish."""
    stages: dict[str, str] = {}
    saved: dict[str, int] = {}
    stop = stop_after(stage, 1)

    def then(method: str) -> None:
        stop(method)
        stages[method] = loop.stage()
        saved[method] = list_steps(crashed / "checkpoints")[-1][0]

    plan = resume_plan(crashed, 3, *HELD_OUT)
    summary = run_job(plan, reporter, Between(world4, then))  # type: ignore[arg-type]
    assert (summary["stopped"], summary["interrupt"], summary["steps"]["to"]) == (None, "SIGTERM", 3)
    assert Path(summary["checkpoint"]).name == "step_000003"
    assert orjson.loads((crashed / "logs/latest/ending.json").read_bytes()) == {
        "state": "finished", "reason": "", "exit_code": 0,
    }  # fmt: skip
    assert [stages[name] for name in ("build", "train", "evaluate")] == ["starting", "stepping", "ending"]
    assert saved["evaluate"] == 3  # whoever has enough of the last look loses no step


@pytest.mark.parametrize(
    ("stage", "number", "ends"),
    [
        ("sample", 2, 2), ("score", 3, 3), ("train", 3, 3),
        # A save goes on while the next step is taken, and is finished after it.
        ("save_begin", 1, 2), ("save_finish", 1, 3), ("evaluate", 2, 2),
    ],
)  # fmt: skip
def test_a_stop_in_any_stage_ends_at_a_step_with_a_whole_checkpoint(
    world4: Any, straight: Straight, tmp_path: Path, reporter: Any, stage: str, number: int, ends: int
) -> None:
    looks = (*HELD_OUT, "eval.every=2") if stage == "evaluate" else ()
    plan = plan_launch(resolved(4, *looks), run_dir=tmp_path)
    stopped = run_job(plan, reporter, Between(world4, stop_after(stage, number)))  # type: ignore[arg-type]
    assert (stopped["stopped"], stopped["steps"]["to"]) == ("SIGTERM", ends)
    checkpoint = Path(stopped["checkpoint"])
    assert checkpoint.name == f"step_{ends:06d}"
    assert verify(checkpoint) == []
    assert [promised(row) for row in rows_of(stopped)] == straight.rows[:ends]
    if ends == 2:
        assert tensors_of(checkpoint) == straight.tensors[2]
        return
    resumed = run_job(resume_plan(plan.run_path, 4), reporter, world4)
    assert (resumed["stopped"], resumed["steps"]) == (None, {"from": 3, "to": 4, "total": 4})
    assert [promised(row) for row in rows_of(resumed)] == straight.rows
    assert tensors_of(Path(resumed["checkpoint"])) == straight.tensors[4]
