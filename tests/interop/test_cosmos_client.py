"""A client that knows only the cosmos-rl wire format scores against `nftctl reward-serve`."""

import ast
import json
import os
import subprocess
import sys
import urllib.error
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from .cosmos_client import Client

HERE = Path(__file__).parent
TOKEN = "sentinel-c05m05"

MINE = """
def tags(images, prompts, metadata):
    return [float(m["geneval_tags"]) + 10 * m["geneval_only_strict"] for m in metadata]
def broken(images, prompts, metadata):
    raise RuntimeError("out of order")
"""


@contextmanager
def served(*arguments, **env):
    command = [sys.executable, "-m", "nftctl", "reward-serve", "--port", "0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | env) as process:
        try:
            yield process.stdout.readline().removeprefix("listening on ").strip()
        finally:
            process.terminate()
            assert process.wait(20) == 0


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """brightness and two functions of a file, behind a token."""
    mine = tmp_path_factory.mktemp("mine") / "mine.py"
    mine.write_text(MINE)
    scorers = ("brightness=7", f"{mine}:tags", f"{mine}:broken", "jpeg_compressibility")
    options = [part for scorer in scorers for part in ("--scorer", scorer)]
    with served(*options, NFTCTL_REWARD_TOKEN=TOKEN) as address:
        yield address


def images(*colours):
    """float [B, 3, 8, 8] in 0..1."""
    return np.broadcast_to(np.array(colours, float)[:, :, None, None], (len(colours), 3, 8, 8))


def test_it_is_there(url):
    assert Client(url).ping() == {"message": "Ping request received"}


def test_scores_are_those_of_the_images_and_unweighted(url):
    client = Client(url, TOKEN)
    batch = images((1, 0, 0), (0, 0, 0), (1, 1, 1), (0.2, 0.4, 0.6))
    # The server's own weight, 7, is for the other protocol; here the client weighs.
    assert client.score(batch, ["p"] * 4, {"brightness": 1.0}) == pytest.approx([1 / 3, 0, 1, 0.4])
    assert client.score(batch, ["p"] * 4, {"brightness": 2.0}) == pytest.approx([2 / 3, 0, 2, 0.8])
    assert client.score(batch, ["p"] * 4, {"brightness": 1.0}, {"brightness": "red+blue"}) == pytest.approx(
        [1, 0, 2, 0.8]
    )


def test_a_result_says_what_was_scored(url):
    client = Client(url, TOKEN)
    ticket = client.enqueue(images((1, 0, 0), (0, 0, 0)), ["p", "q"], {"brightness": 1.0, "jpeg_compressibility": 1.0})
    assert set(ticket) == {"uuid"}
    result = client.wait(ticket, "brightness")
    assert set(result["scores"]) == {"brightness", "red", "green", "blue"}
    assert result["input_info"]["shape"] == [2, 8, 8, 3]
    assert (float(result["input_info"]["min"]), float(result["input_info"]["max"])) == (0, 255)
    assert (result["type"], float(result["duration"]) >= 0) == ("brightness", True)
    assert all(score < 0 for score in client.wait(ticket, "jpeg_compressibility")["scores"]["jpeg_compressibility"])
    # A lost reply can be asked for again.
    assert client.pull(ticket, "brightness") == result


def test_rewards_of_no_weight_are_not_run_and_what_is_not_there_is_400(url):
    client = Client(url, TOKEN)
    ticket = client.enqueue(images((1, 1, 1)), ["p"], {"brightness": 1.0, "broken": 0.0})
    client.wait(ticket, "brightness")
    assert client.pull(ticket, "broken") is None
    assert client.pull(ticket, "jpeg_compressibility") is None
    # Without a type it is dance_grpo that is asked for.
    assert client.pull(ticket, None) is None
    assert client.pull({"uuid": "0" * 36}, "brightness") is None


def test_extras_reach_the_scorer_image_by_image(url):
    client = Client(url, TOKEN)
    ticket = client.enqueue(
        images((0, 0, 0), (1, 1, 1)), ["p", "q"], {"tags": 1}, geneval_tags=["3", "4"], geneval_only_strict=True
    )
    assert client.wait(ticket, "tags")["scores"] == {"tags": [13.0, 14.0]}


def test_a_scorer_that_fails_is_500_to_the_pull_and_never_a_score(url):
    client = Client(url, TOKEN)
    ticket = client.enqueue(images((1, 1, 1)), ["p"], {"broken": 1.0})
    with pytest.raises(urllib.error.HTTPError) as caught:
        client.wait(ticket, "broken")
    with caught.value as error:
        assert error.code == 500
        assert json.loads(error.read()) == {"message": "RuntimeError: out of order"}


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        (
            {"rewards": {"hpsv3": 1.0}},
            400,
            "'hpsv3' is not served here; served are: brightness, tags, broken, jpeg_compr",
        ),
        ({"rewards": {"brightness": 0.0}}, 400, "no reward of positive weight"),
        ({"prompts": ["p", "q"]}, 400, "1 images for 2 prompts"),
        ({"media_type": "latent"}, 400, "image only"),
        ({"prompts": ["p"] * 65}, 413, "at most 64"),
    ],
)
def test_what_cannot_be_scored_is_refused_at_once(url, change, code, says):
    asked = {"images": images((1, 1, 1)), "prompts": ["p"], "rewards": {"brightness": 1.0}} | change
    with pytest.raises(urllib.error.HTTPError) as caught:
        Client(url, TOKEN).enqueue(**asked)
    with caught.value as error:
        assert error.code == code
        assert says in json.loads(error.read())["message"]


def test_the_token_guards_enqueue_and_pull(url):
    stranger = Client(url, "another")
    for ask in (lambda: stranger.enqueue(images((1, 1, 1)), ["p"], {"brightness": 1.0}),
                lambda: stranger.pull({"uuid": "x"}, "brightness")):  # fmt: skip
        with pytest.raises(urllib.error.HTTPError) as caught:
            ask()
        with caught.value as error:
            assert error.code == 401


def test_it_runs_as_a_process_and_against_worker_processes():
    with served("--scorer", "brightness", "--workers", "2") as address:
        command = [sys.executable, str(HERE / "cosmos_client.py"), address, "brightness", "a", "b", "c"]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(shown.stdout)["scores"] == pytest.approx([0, 0.5, 1], abs=0.003)


@pytest.mark.parametrize(
    "path", sorted(p for p in HERE.glob("*.py") if not p.stem.startswith("test_")), ids=lambda p: p.stem
)
def test_the_other_side_imports_nothing_of_nftctl(path):
    tree = ast.walk(ast.parse(path.read_text()))
    names = [n.name for node in tree if isinstance(node, ast.Import) for n in node.names]
    names += [node.module or "." for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    assert not [name for name in names if name.split(".")[0] in ("nftctl", "tests", "")]
