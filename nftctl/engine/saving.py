"""Checkpoints from the driver's side: begin on the ranks that write, train on, then make the folder complete and prune.

A checkpoint counts only when its manifest is written and its folder has its final name. The ranks write one at a time;
hashing, manifest and rename of the one before go on beside the next step, in order. Waits for no rank that stands
still: a rank may write for long, but must answer within the collective time-out.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nftctl.engine.group import Group
from nftctl.engine.plan import JobPlan, plan_versions
from nftctl.run.checkpoints import partial_folder, prune, step_name
from nftctl.run.directory import RunDirectory
from nftctl.run.manifest import STATE_FOLDER, Manifest, commit, write_manifest
from nftctl.run.state import RunState

TAIL = 8
"""Metric rows kept in each manifest."""

PATIENCE_S = 1.0
"""Seconds that a rank may wait for its writer before it answers. Writing may take long, but whoever never answers
stands still, and is found out within the collective time-out."""


class Checkpoints:
    """Writes the checkpoints of one run."""

    def __init__(self, plan: JobPlan, run: RunDirectory, group: Group) -> None:
        self._plan = plan
        self._run = run
        self._group = group
        # Tensors of an adapter are whole on every rank, and rank 0 alone writes them; all others are left in peace.
        self._sharded = plan.profile.model.train == "full"
        self._versions = plan_versions()
        self._open: tuple[Path, Manifest] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="commit")
        self._committing: list[Future[None]] = []
        self.newest: Path | None = plan.resume_from if plan.continues else None
        self.newest_step = plan.state.step if plan.continues else 0

    def begin(self, state: RunState, rows: Sequence[dict[str, Any]]) -> None:
        """Snapshot the state of all ranks; writing goes on in the background until `finish`."""
        self.advance()
        folder = partial_folder(self._run.checkpoints, state.step)
        facts = self._ask("save_begin", state.step, folder / STATE_FOLDER)[0]
        self._open = (folder, self._manifest(state, facts, rows))

    def advance(self) -> None:
        """Between two steps: when the ranks have written, make the checkpoint complete beside the next step."""
        while self._committing and self._committing[0].done():
            self._committing.pop(0).result()
        while not self._written(PATIENCE_S):
            pass

    def advance_if_written(self) -> None:
        """Within a step: the same, unless a rank is still writing; a checkpoint is whole as early as it can be."""
        self._written(0.0)

    def _written(self, wait_s: float) -> bool:
        """Whether no rank is writing any more; what has just been written is made complete in the background."""
        if self._open is None:
            return True
        # Let go of first: what could not be finished must not be taken for finished when it is asked for again.
        (folder, manifest), self._open = self._open, None
        if not all(self._ask("save_finish", wait_s)):
            self._open = folder, manifest
            return False
        self._committing.append(self._thread.submit(self._complete, folder, manifest))
        return True

    def _ask(self, method: str, *args: Any) -> list[Any]:
        """Call `method` on every rank that has a part in the save."""
        return self._group.call(method, *args) if self._sharded else [self._group.call_one(0, method, *args)]

    def finish(self) -> Path | None:
        """Wait until the checkpoint is complete and what retention no longer keeps is gone; the newest one."""
        self.advance()
        self.settle()
        return self.newest

    def settle(self) -> None:
        """Wait for a checkpoint that the ranks have written and that is being made complete; asks nothing of ranks."""
        while self._committing:
            self._committing.pop(0).result()

    def _complete(self, folder: Path, manifest: Manifest) -> None:
        write_manifest(folder, manifest)
        final = self._run.checkpoints / step_name(manifest.step)
        commit(folder, final)
        self.newest, self.newest_step = final, manifest.step
        keep = self._plan.profile.checkpoint
        prune(self._run.checkpoints, keep.keep_last, keep.keep_every)

    def _manifest(self, state: RunState, facts: dict[str, Any], rows: Sequence[dict[str, Any]]) -> Manifest:
        plan = self._plan
        optimizer, old = plan.profile.optimizer, plan.profile.rl.old
        return Manifest(
            run_id=plan.run_id,
            step=state.step,
            state=state.to_dict(),
            world_size=plan.profile.ranks,
            identity=plan.identity,
            identity_hash=plan.identity_hash,
            seed_contract=plan.seed_contract,
            reward=[{"name": name, "revision": revision} for name, revision in plan.revisions.items()],
            schedule={
                "lr": optimizer.lr,
                "warmup_steps": optimizer.warmup_steps,
                "old_decay": old.decay,
                "old_update_every": old.update_every,
            },
            optimizer_entries=facts["optimizer_entries"],
            tensors=facts["tensors"],
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            versions=self._versions,
            metric_tail=[dict(row) for row in rows[-TAIL:]],
        )
