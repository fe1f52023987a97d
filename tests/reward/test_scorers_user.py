"""A function in a person's own file, and several scorers weighed into one."""

import math
import subprocess
import sys

import numpy as np
import pytest
from reward_cases import MeanPixel, flat

from nftctl.errors import RewardFailed
from nftctl.reward.mixture import Mixture, Part, ScorerWrong, load_mixture, split_weight
from nftctl.reward.scorers import scorer_revision
from nftctl.reward.user_scorer import is_user_scorer, load_user_scorer, source_files

IMAGES = [flat((255, 0, 0)), flat((0, 0, 0))]
ASK = (IMAGES, ["p", "q"], [{"n": 1}, {"n": 2}])

FILE = """
import numpy as np
import helper
FILES = ["weights.txt"]
def listed(images, prompts, metadata):
    return [helper.value(m) + len(p) for m, p in zip(metadata, prompts)]
def array(images, prompts, metadata):
    return np.array([i.mean() for i in images], np.float32)
def torn(images, prompts, metadata):
    return [float("nan")] * len(images)
def short(images, prompts, metadata):
    return [1.0]
number = 3
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    (tmp_path / "helper.py").write_text("def value(m): return m['n'] * 10\n")
    (tmp_path / "weights.txt").write_text("1")
    return tmp_path / "mine.py"


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    """Each test's helper is its own."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("helper", None)


@pytest.mark.parametrize(("name", "scores"), [("listed", [11, 21]), ("array", [85, 0])])
def test_a_function_scores(mine, name, scores):
    mixture = load_mixture([f"{mine}:{name}"])
    assert (mixture.name, mixture.components) == (name, ())
    assert mixture.score(*ASK) == [(pytest.approx(score), {}) for score in scores]


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("", "does not say which function"),
        (":nope", "no function 'nope'; it has: array, listed, short, torn"),
        (":number", "no function 'number'"),
    ],
)
def test_what_cannot_be_called_is_said(mine, what, says):
    with pytest.raises(RewardFailed, match=says):
        load_user_scorer(f"{mine}{what}")


def test_files_that_cannot_be_loaded_are_said(mine, tmp_path):
    with pytest.raises(RewardFailed, match="there is no scorer file"):
        load_mixture([f"{tmp_path}/nope.py:f"])
    (tmp_path / "broken.py").write_text("import nowhere_to_be_found\ndef f(*a): return []\n")
    with pytest.raises(RewardFailed, match="cannot be imported: ModuleNotFoundError"):
        load_mixture([f"{tmp_path}/broken.py:f"])
    (tmp_path / "weights.txt").unlink()
    with pytest.raises(RewardFailed, match=r"lists 'weights\.txt' in FILES"):
        load_mixture([f"{mine}:listed"])


def test_names_of_files_and_of_scorers():
    assert is_user_scorer("a/b.py:f")
    assert is_user_scorer("b.py")
    assert not is_user_scorer("clip_score:/models/x.py-torch")
    assert not is_user_scorer("ocr")


def test_the_revision_follows_the_file_its_helpers_and_its_files(mine, tmp_path):
    revision = load_user_scorer(f"{mine}:listed").revision()
    assert load_user_scorer(f"{mine}:listed").revision() == revision
    assert load_user_scorer(f"{mine}:array").revision() != revision
    seen = {revision}
    for name in ("helper.py", "weights.txt", "mine.py"):
        with (tmp_path / name).open("a") as file:
            file.write("# changed")
        seen.add(load_user_scorer(f"{mine}:listed").revision())
    assert len(seen) == 4
    (tmp_path / "unrelated.py").write_text("")
    assert load_user_scorer(f"{mine}:listed").revision() in seen


def test_sources_are_found_wherever_they_are_imported(tmp_path):
    files = {
        "mine.py": "import numpy, a.b\ndef f(*_):\n    from c import d\n",
        "a/__init__.py": "from . import e\n",
        "a/b.py": "import mine\n",
        "a/e.py": "",
        "c.py": "",
        "other.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = [str(path.relative_to(tmp_path)) for path in source_files(tmp_path / "mine.py")]
    assert found == ["mine.py", "a/__init__.py", "a/b.py", "a/e.py", "c.py"]


# ---- mixtures


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("ocr", ("ocr", 1)),
        ("ocr=0.5", ("ocr", 0.5)),
        ("a=b.py:f=-2e-1", ("a=b.py:f", -0.2)),
        ("clip_score:x=0", ("clip_score:x", 0)),
    ],
)
def test_weights(text, parts):
    assert split_weight(text) == parts


@pytest.mark.parametrize("text", ["ocr=", "ocr=much", "ocr=nan", "ocr=inf"])
def test_a_weight_that_is_no_number_is_refused(text):
    with pytest.raises(RewardFailed, match="not a number"):
        load_mixture([text])


def test_one_scorer_is_served_as_it_is():
    mixture = load_mixture(["brightness"])
    assert (mixture.name, mixture.components) == ("brightness", ("red", "green", "blue"))
    assert mixture.revision() == scorer_revision("brightness")
    assert mixture.score(*ASK)[0] == (pytest.approx(1 / 3), {"red": 1, "green": 0, "blue": 0})


def test_several_are_weighed_and_added_and_each_is_told(mine):
    mixture = load_mixture(["brightness=3", f"{mine}:listed=0.5", f"{mine}:array=0"])
    assert mixture.name == "3 brightness + 0.5 listed + 0 array"
    first = mixture.score(*ASK)[0]
    assert first[0] == pytest.approx(1 + 5.5)
    assert first[1] == pytest.approx(
        {
            "brightness": 1 / 3,
            "brightness.red": 1,
            "brightness.green": 0,
            "brightness.blue": 0,
            "listed": 11,
            "array": 85,
        }
    )
    assert tuple(first[1]) == mixture.components


def test_the_revision_of_a_sum_follows_scorers_and_weights(mine):
    def revision(*specs):
        return load_mixture(specs).revision()

    first = revision("brightness=3", f"{mine}:array")
    assert revision("brightness=3", f"{mine}:array=1") == first
    others = [("brightness=3",), ("brightness=2", f"{mine}:array"), ("brightness=3", f"{mine}:listed"), ("brightness",)]
    assert len({first, *(revision(*specs) for specs in others)}) == 5


def test_nothing_and_the_same_twice_are_refused():
    with pytest.raises(RewardFailed, match="no scorer to serve"):
        load_mixture([])
    with pytest.raises(RewardFailed, match="brightness is there twice"):
        load_mixture(["brightness", "brightness=2"])


@pytest.mark.parametrize(("name", "says"), [("torn", "by torn is nan"), ("short", "1 results for 2 images")])
def test_a_wrong_part_never_gets_into_the_sum(mine, name, says):
    with pytest.raises(ScorerWrong, match=says):
        load_mixture(["brightness", f"{mine}:{name}=0"]).score(*ASK)


class Overflowing(MeanPixel):
    def score(self, images, prompts, metadata):
        return [(1e308, {"red": 0.0, "green": 0.0, "blue": 0.0}) for _ in images]


def test_a_sum_of_finite_parts_may_still_overflow_and_is_seen_by_the_encoder():
    # Encoding refuses it: see test_server for what a client is told.
    assert math.isinf(Mixture([Part(Overflowing(), 10.0)]).score(*ASK)[0][0])


def test_a_table_holds_what_was_asked_for_unweighted(mine):
    mixture = load_mixture(["brightness=3", f"{mine}:array=0.5"])
    assert mixture.table(["array"], *ASK) == {"array": {"array": [85, 0]}}
    table = mixture.table(["array", "brightness"], *ASK)["brightness"]
    assert set(table) == {"brightness", "red", "green", "blue"}
    np.testing.assert_allclose(table["brightness"], [1 / 3, 0])


def test_a_file_named_like_a_module_hides_nothing(tmp_path):
    (tmp_path / "json.py").write_text("def f(images, prompts, metadata): return [0.5 for _ in images]\n")
    code = (
        "from nftctl.reward.mixture import load_mixture as l; import json;"
        f"print(l(['{tmp_path}/json.py:f']).score([1], [''], [{{}}]), json.dumps(1))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout == "[(0.5, {})] 1\n"
