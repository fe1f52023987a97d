"""The registry, revisions, and the example scorer."""

import io
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from reward_cases import flat

from nftctl.errors import RewardFailed
from nftctl.reward.scorers import MODELS, SCORERS, files_revision, load_scorer, scorer_revision


def test_an_unknown_name_lists_the_known_ones():
    for ask in (load_scorer, scorer_revision):
        with pytest.raises(RewardFailed, match=r"no scorer 'nope'; packaged are aesthetic, brightness, .*tiny_digits"):
            ask("nope")


def test_only_scorers_around_a_model_take_one():
    for ask in (load_scorer, scorer_revision):
        with pytest.raises(
            RewardFailed, match=r"brightness takes no model, got 'x'; .*clip_score, pickscore, aesthetic"
        ):
            ask("brightness", "x")


@pytest.mark.parametrize("name", sorted(set(SCORERS) - set(MODELS) - {"ocr"}))
def test_every_scorer_is_what_the_registry_says(name):
    scorer = load_scorer(name)
    assert scorer.name == name
    assert scorer.revision() == scorer_revision(name)
    assert len(bytes.fromhex(scorer_revision(name))) == 32
    assert scorer.score([], [], []) == []


def test_a_revision_follows_name_and_content_and_not_the_place(tmp_path):
    def make(folder, name, content):
        (tmp_path / folder).mkdir(exist_ok=True)
        path = tmp_path / folder / name
        path.write_bytes(content)
        return path

    first = files_revision((make("a", "w", b"1"),))
    assert files_revision((make("b", "w", b"1"),)) == first
    assert files_revision((make("a", "w", b"2"),)) != first
    assert files_revision((make("a", "x", b"1"),)) != first


def test_brightness_is_the_mean_of_0_to_1():
    images = [flat((255, 255, 255)), flat((0, 0, 0)), flat((255, 0, 0)), flat((51, 102, 204))]
    got = load_scorer("brightness").score(images, [""] * 4, [{}] * 4)
    expected = [(1, (1, 1, 1)), (0, (0, 0, 0)), (1 / 3, (1, 0, 0)), (7 / 15, (0.2, 0.4, 0.8))]
    for (score, parts), (want, colours) in zip(got, expected, strict=True):
        np.testing.assert_allclose([score, parts["red"], parts["green"], parts["blue"]], [want, *colours])


def test_jpeg_sizes_are_those_of_the_files():
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    images = [flat((90, 90, 90), 64), noise]
    sizes = []
    for image in images:
        out = io.BytesIO()
        Image.fromarray(image).save(out, format="JPEG", quality=95, subsampling=0)
        sizes.append(len(out.getvalue()) / 1000)
    assert sizes[1] > 5 * sizes[0]
    ask = ["", ""], [{}, {}]
    assert load_scorer("jpeg_incompressibility").score(images, *ask) == [(size, {}) for size in sizes]
    assert load_scorer("jpeg_compressibility").score(images, *ask) == [(-size, {}) for size in sizes]
    # The sign is in one file, the encoding in the other; both count.
    assert scorer_revision("jpeg_incompressibility") != scorer_revision("jpeg_compressibility")


def test_asking_for_names_loads_no_scorer():
    code = (
        "import sys, nftctl.reward.scorers as s; sorted(s.SCORERS);"
        "print([m for m in sys.modules if m.startswith(s.__name__)])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout.strip() == "['nftctl.reward.scorers']"


def test_the_reward_side_needs_no_torch_and_the_protocol_no_aiohttp():
    code = (
        "import sys, nftctl.reward.protocol; print('aiohttp' in sys.modules, 'PIL' in sys.modules);"
        "import nftctl.reward.client, nftctl.reward.server; nftctl.reward.server.load_mixture(['tiny_digits']);"
        "print([m for m in ('torch', 'ray', 'diffusers', 'peft', 'transformers') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout.split("\n")[:2] == ["False False", "[]"]
