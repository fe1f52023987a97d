"""Who is blamed when ranks fail together, and for how long the others are waited for. Ray is not started."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, RayTaskError

from nftctl.engine import group as group_module
from nftctl.engine.group import Group, _Failures
from nftctl.engine.lost import RanksLost
from nftctl.engine.seats import Node
from nftctl.errors import CheckpointUnusable, RewardFailed, TrainingFailed


def raised(cause: Exception) -> BaseException:
    """What Ray hands to the driver when an actor's method raised `cause`."""
    return RayTaskError("train", "traceback text", cause).as_instanceof_cause()


DIED = ActorDiedError()
ECHO = raised(RuntimeError("[gloo/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"))
LATE = raised(RuntimeError("Timed out waiting 120000ms for recv operation to complete"))
ODD = raised(ValueError("shapes do not match"))
OURS = raised(TrainingFailed("step 3: the gradient norm is nan", rank=2))
REWARD = raised(RewardFailed("reward service http://x: HTTP 400"))
LOST = raised(RewardFailed("reward service http://x: the connection was lost (ConnectionResetError: Connection reset)"))
STAGE = "2026-11-29 12:00:00,000 INFO nftctl.stage"
SAVE = raised(TrainingFailed("the checkpoint could not be written: Connection closed by peer"))


@pytest.mark.parametrize(
    ("failures", "blamed"),
    [
        ({0: ECHO, 1: ECHO, 2: DIED}, 2),  # the dead one, not those that noticed
        ({0: ODD, 3: DIED}, 3),
        ({0: ECHO, 1: OURS, 2: ODD}, 1),  # what nftctl understands says most
        ({0: ECHO, 1: LATE, 2: ODD}, 2),
        ({0: SAVE, 1: ODD}, 1),
        ({0: ECHO, 1: LOST}, 1),  # a service's lost connection is no echo of another rank
        ({0: SAVE, 1: LOST}, 1),
        ({2: REWARD, 1: REWARD, 3: OURS}, 1),  # equals: the lowest rank
        ({3: ECHO, 2: LATE}, 2),
    ],
)
def test_the_cause_is_blamed_and_not_a_neighbour(failures: dict[int, BaseException], blamed: int) -> None:
    assert _Failures(failures).worst() == (blamed, failures[blamed])


class Script:
    """Stands in for ray.wait and ray.get: references become ready in the given order, then nothing more."""

    def __init__(self, order: list[tuple[str, Any]]) -> None:
        self.left, self.values = [name for name, _ in order], dict(order)
        self.timeouts: list[float | None] = []

    def wait(self, refs: list[str], num_returns: int, timeout: float | None) -> tuple[list[str], list[str]]:
        self.timeouts.append(timeout)
        if self.left:
            return [self.left.pop(0)], []
        assert timeout is not None, "it would wait for ever"
        time.sleep(timeout)
        return [], refs

    def get(self, ref: str) -> Any:
        if isinstance(self.values[ref], BaseException):
            raise self.values[ref]
        return self.values[ref]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """`ranks(order, timeout)`: calls three ranks whose answers come as scripted."""
    monkeypatch.setattr(group_module, "GRACE_S", 0.05)

    group = Group([], "cpu", tmp_path, 0.2)
    group.members = [{"rank": n, "pid": 100 + n, "host": "here"} for n in range(3)]

    def call(order: list[tuple[str, Any]], timeout: float = 0.2) -> tuple[list[Any], Script]:
        script = Script(order)
        monkeypatch.setattr(ray, "wait", script.wait)
        monkeypatch.setattr(ray, "get", script.get)
        group._timeout_s = timeout
        return group._wait({"a": 0, "b": 1, "c": 2}, "train"), script

    call.group = group  # type: ignore[attr-defined]
    return call


def test_a_start_that_an_interrupt_broke_in_the_import_of_ray_has_nothing_to_shut_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as after an import that failed: the next one raises
    Group([], "cpu", None, 1.0).shutdown()


NODES = [
    Node(host, ip, host == "a", "", {}, {}, id=f"id {host}")
    for host, ip in (("a", "10.0.0.1"), ("b", "10.0.0.2"), ("b", "10.0.0.2"))
]
HERE = "`train` (pid 101 on node 10.0.0.2 (b))"
WAITED = "within the 0 s that ranks wait for each other (late: [1, 2])"


@pytest.mark.parametrize(
    ("died", "dead", "said"),
    [
        (True, {"id b": "no health"}, f"rank 1 died in {HERE}: node 10.0.0.2 (b) is gone, with ranks 1-2: no health"),
        (True, {}, f"rank 1 died in {HERE}: its process ended without an exception"),
        (False, {"id a": "x"}, f"rank 1 did not finish {HERE} {WAITED}: node 10.0.0.1 (a) is gone, with rank 0: x"),
    ],
)
def test_a_lost_node_is_named_with_its_ranks(
    ranks: Any, monkeypatch: pytest.MonkeyPatch, died: bool, dead: dict[str, str], said: str
) -> None:
    asked: list[set[str]] = []
    monkeypatch.setattr(group_module, "dead_nodes", lambda ids: asked.append(ids) or dead)
    ranks.group._seats = tuple(NODES)
    with pytest.raises(RanksLost) as caught:
        ranks([("a", "first"), ("b", DIED)] if died else [("a", "first")])
    assert caught.value.message == said
    assert asked == [{"id a", "id b"}]
    assert not ranks.group.whole


@pytest.mark.parametrize(
    ("failure", "lost"),
    [(DIED, True), (ECHO, True), (LATE, True), (SAVE, True), (ODD, False), (OURS, False), (REWARD, False)],
)
def test_only_what_another_attempt_may_outlive_is_a_loss(ranks: Any, failure: BaseException, lost: bool) -> None:
    with pytest.raises((TrainingFailed, RewardFailed)) as caught:
        ranks([("a", failure), ("b", failure), ("c", failure)])
    assert isinstance(caught.value, RanksLost) == lost


def test_answers_come_in_rank_order(ranks: Any) -> None:
    answers, script = ranks([("c", "third"), ("a", "first"), ("b", "second")])
    assert answers == ["first", "second", "third"]
    # The first rank may take any time: a long step is no failure.
    assert script.timeouts[0] is None
    assert all(timeout is not None and timeout <= 0.2 for timeout in script.timeouts[1:])


def test_stragglers_are_named_once_the_first_is_done(ranks: Any, tmp_path: Path) -> None:
    with pytest.raises(
        TrainingFailed, match=r"rank 1 did not finish `train` \(pid 101 on here\) within the 0 s .*\(late: \[1, 2\]\)"
    ) as caught:
        ranks([("a", "done")])
    assert caught.value.rank == 1
    assert caught.value.log == str(tmp_path / "rank_1.log")


def test_a_rank_that_is_called_alone_has_the_time_out_from_the_beginning(
    ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = SimpleNamespace(save_begin=SimpleNamespace(remote=lambda *args: "b"))
    ranks.group.actors = [None, actor, None]
    monkeypatch.setattr(ray, "wait", Script([]).wait)
    with pytest.raises(TrainingFailed, match=r"rank 1 did not finish `save_begin` .*\(late: \[1\]\)"):
        ranks.group.call_one(1, "save_begin", 7)
    assert not ranks.group.whole


def test_a_failure_is_told_after_the_grace_though_others_never_answer(ranks: Any) -> None:
    with pytest.raises(RewardFailed, match="HTTP 400"):
        ranks([("b", REWARD)], timeout=3600)


def test_within_the_grace_a_better_culprit_wins(ranks: Any, tmp_path: Path) -> None:
    with pytest.raises(TrainingFailed, match=r"rank 2 died in `train` \(pid 102 on here\)") as caught:
        ranks([("a", ECHO), ("c", DIED)], timeout=3600)
    assert (caught.value.rank, caught.value.log) == (2, str(tmp_path / "rank_2.log"))


def test_the_silent_rank_is_blamed_and_not_those_that_waited_for_it(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "rank_1.log").write_text(f"{STAGE}: step 6: optimizer\n{STAGE}: step 7: backward 2 of 3\nodd words\n")
    with pytest.raises(
        TrainingFailed, match=r"rank 1 did not finish step 7, backward 2 of 3 \(pid 101 on here\) .*\(late: \[1\]\)"
    ) as caught:
        ranks([("a", LATE), ("c", ECHO)], timeout=3600)
    assert (caught.value.rank, caught.value.log) == (1, str(tmp_path / "rank_1.log"))
    # Without a time-out among them, those that lost a connection say nothing of who is late.
    with pytest.raises(TrainingFailed, match=r"rank 0 failed in `train` .*Connection closed by peer"):
        ranks([("a", ECHO), ("c", ECHO)], timeout=3600)


@pytest.mark.parametrize(("fault", "word"), [(DIED, "died"), (ODD, "failed")])
def test_the_blame_says_what_the_rank_itself_had_begun(ranks: Any, tmp_path: Path, fault: Any, word: str) -> None:
    (tmp_path / "rank_0.log").write_text(f"{STAGE}: step 7: optimizer\n")
    (tmp_path / "rank_2.log").write_text(f"{STAGE}: step 7: backward\nstep 9: no stage line\n")
    with pytest.raises(TrainingFailed, match=rf"rank 2 {word} in step 7, backward \(pid 102 on here\)"):
        ranks([("a", 1), ("c", fault), ("b", 1)])


@pytest.mark.parametrize(
    ("order", "whole"),
    [
        ([("a", 1), ("b", 1), ("c", 1)], True),
        ([("a", OURS), ("b", OURS), ("c", OURS)], True),
        ([("a", 1), ("b", ODD), ("c", 1)], True),
        ([("a", ODD)], False),  # the others wait in a collective for ever
        ([("a", 1), ("b", DIED), ("c", 1)], False),
        ([("a", ECHO), ("b", ODD), ("c", ECHO)], False),
    ],
)
def test_a_group_knows_whether_it_can_be_called_again(ranks: Any, order: Any, whole: bool) -> None:
    group = ranks.group
    group.whole = not whole
    with contextlib.suppress(TrainingFailed):
        ranks(order)
    assert group.whole is whole


def test_an_error_of_ours_arrives_as_it_was_raised(ranks: Any, tmp_path: Path) -> None:
    with pytest.raises(TrainingFailed, match=r"^step 3: the gradient norm is nan$") as caught:
        ranks([("a", OURS), ("b", OURS), ("c", OURS)])
    assert caught.value.rank == 2  # the rank it names itself
    assert caught.value.log
    damaged = raised(CheckpointUnusable("tensor x: missing", hint="choose another"))
    with pytest.raises(CheckpointUnusable) as unusable:
        ranks([("a", damaged), ("b", damaged), ("c", damaged)])
    assert unusable.value.hint == "choose another"


def test_an_error_of_anybody_else_is_told_with_rank_and_type(ranks: Any) -> None:
    with pytest.raises(
        TrainingFailed, match=r"rank 1 failed in `train` \(pid 101 on here\): ValueError: shapes do not"
    ):
        ranks([("a", 1), ("b", ODD), ("c", 1)])
