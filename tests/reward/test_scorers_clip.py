"""The CLIP scorers on tiny random models that are built here; values come from transformers' own forward."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer, CLIPVisionModelWithProjection

from nftctl.errors import RewardFailed
from nftctl.reward.mixture import load_part
from nftctl.reward.scorers import load_scorer, scorer_revision
from nftctl.reward.scorers.aesthetic import read_head
from nftctl.reward.scorers.clip.model import Preprocessing

SIZE = 16
PROMPTS = ["a red cat", "two dogs", "a red cat"]
IMAGES = [np.random.default_rng(n).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8) for n in range(3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A CLIP folder as `save_pretrained` writes it, with a byte-level vocabulary of single letters."""
    path = tmp_path_factory.mktemp("clip")
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [*letters, *(f"{c}</w>" for c in letters), "<|startoftext|>", "<|endoftext|>"]
    (path / "vocab.json").write_text(json.dumps({word: n for n, word in enumerate(words)}))
    (path / "merges.txt").write_text("#version: 0.2\n")
    CLIPTokenizer(str(path / "vocab.json"), str(path / "merges.txt")).save_pretrained(path)
    half = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config=half | {"vocab_size": len(words), "max_position_embeddings": 12,
                            "bos_token_id": len(words) - 2, "eos_token_id": len(words) - 1},
        vision_config=half | {"image_size": SIZE, "patch_size": 8},
        projection_dim=8,
    )  # fmt: skip
    torch.manual_seed(0)
    CLIPModel(config).save_pretrained(path)
    return path


def reference(folder):
    """(image, text) logits by the whole stock model, with pixels normalised by hand, and its logit scale."""
    model = CLIPModel.from_pretrained(folder).eval()
    mean, std = np.array([0.48145466, 0.4578275, 0.40821073]), np.array([0.26862954, 0.26130258, 0.27577711])
    pixels = torch.tensor(((np.stack(IMAGES) / 255 - mean) / std).transpose(0, 3, 1, 2), dtype=torch.float32)
    tokens = CLIPTokenizer.from_pretrained(folder)(PROMPTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(**tokens, pixel_values=pixels).logits_per_image.diagonal()
        return logits, model.logit_scale.exp()


def test_clip_score_is_the_clipped_cosine(folder):
    logits, scale = reference(folder)
    got = load_scorer("clip_score", str(folder)).score(IMAGES, PROMPTS, [{}] * 3)
    np.testing.assert_allclose([parts["cosine"] for _, parts in got], logits / scale, atol=1e-5)
    np.testing.assert_allclose([score for score, _ in got], 2.5 * (logits / scale).clamp(min=0), atol=1e-5)


def test_pickscore_is_a_26th_of_the_logit(folder):
    logits, _ = reference(folder)
    got = load_part(f"pickscore:{folder}=2").scorer.score(IMAGES, PROMPTS, [{}] * 3)
    np.testing.assert_allclose([score for score, _ in got], logits / 26, atol=1e-5)
    np.testing.assert_allclose([parts["logit"] for _, parts in got], logits, atol=1e-4)


def test_long_prompts_are_cut_and_nothing_is_scored_as_nothing(folder):
    scorer = load_scorer("clip_score", str(folder))
    assert scorer.score([], [], []) == []
    long = scorer.score(IMAGES[:1], ["a" * 500], [{}])
    assert np.isfinite(long[0][0])


def head(folder, tmp_path, **tensors):
    shutil.copytree(folder, tmp_path / "model")
    save_file(tensors, tmp_path / "model" / "head.safetensors")
    return tmp_path / "model"


@pytest.mark.parametrize("half", [False, True])
def test_aesthetic_is_the_head_on_the_unit_embedding(folder, tmp_path, half):
    torch.manual_seed(1)
    first, last = torch.nn.Linear(8, 4), torch.nn.Linear(4, 1)
    # Numbers with gaps, and of two digits: between them were layers without weights.
    named = {"layers.2": first, "layers.10": last}
    tensors = {f"{name}.{k}": v.detach() for name, layer in named.items() for k, v in layer.state_dict().items()}
    place = head(folder, tmp_path, **tensors)
    if half:
        vision = CLIPVisionModelWithProjection.from_pretrained(folder, projection_dim=8)
        shutil.rmtree(place)
        vision.save_pretrained(place)
        save_file(tensors, place / "head.safetensors")
    got = load_scorer("aesthetic", str(place)).score(IMAGES, PROMPTS, [{}] * 3)
    model = CLIPModel.from_pretrained(folder).eval()
    pixels = torch.from_numpy(Preprocessing(folder, SIZE)(IMAGES))
    with torch.no_grad():
        embedding = model.visual_projection(model.vision_model(pixel_values=pixels).pooler_output)
        expected = last(first(torch.nn.functional.normalize(embedding)))[:, 0]
    np.testing.assert_allclose([score for score, _ in got], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"other.weight": (1, 8)}, "no aesthetic head"),
        ({"layers.0.weight": (1, 8)}, "lacks 'layers.0.bias'"),
        ({"layers.0.weight": (2, 8), "layers.0.bias": (2,)}, r"no aesthetic head.*\(8, 2\)"),
        (
            {"layers.0.weight": (4, 8), "layers.0.bias": (4,), "layers.1.weight": (1, 3), "layers.1.bias": (1,)},
            "no aest",
        ),
    ],
)
def test_a_head_that_is_none_is_refused(folder, tmp_path, tensors, says):
    place = head(folder, tmp_path, **{name: torch.zeros(shape) for name, shape in tensors.items()})
    with pytest.raises(RewardFailed, match=says):
        read_head(place)


def test_images_are_shrunk_to_the_middle_square(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [0, 0, 0], "image_std": [0.5, 0.5, 0.5]}')
    wide = np.zeros((32, 64, 3), np.uint8)
    wide[:, 16:48] = 255
    got = Preprocessing(tmp_path, SIZE)([wide, wide.transpose(1, 0, 2)])
    assert got.shape == (2, 3, SIZE, SIZE)
    np.testing.assert_allclose(got[:, :, 4:-4, 4:-4], 2)
    assert got.dtype == np.float32


def test_the_revision_follows_every_file_and_not_the_place(folder, tmp_path):
    names = ("clip_score", "pickscore")
    first = {name: scorer_revision(name, str(folder)) for name in names}
    assert len(set(first.values())) == 2
    assert load_scorer("clip_score", str(folder)).revision() == first["clip_score"]
    copy = shutil.copytree(folder, tmp_path / "elsewhere")
    assert scorer_revision("clip_score", str(copy)) == first["clip_score"]
    weights = load_file(copy / "model.safetensors")
    weights["logit_scale"] += 1
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    assert scorer_revision("clip_score", str(copy)) != first["clip_score"]


def test_what_is_no_model_is_said(folder, tmp_path):
    with pytest.raises(RewardFailed, match="there is no folder /nowhere/at/all"):
        load_scorer("clip_score", "/nowhere/at/all")
    with pytest.raises(RewardFailed, match=r"nobody/nothing is neither a local folder nor to be had from the hub"):
        load_scorer("pickscore", "nobody/nothing")
    with pytest.raises(RewardFailed, match="aesthetic needs a model"):
        load_scorer("aesthetic")
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(RewardFailed, match=r"holds no \.safetensors file"):
        load_scorer("clip_score", str(tmp_path))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(RewardFailed, match="is not a CLIP model"):
        load_scorer("clip_score", str(tmp_path))
    shutil.copytree(folder, tmp_path / "partial")
    weights = load_file(tmp_path / "partial" / "model.safetensors")
    del weights["visual_projection.weight"]
    save_file(weights, tmp_path / "partial" / "model.safetensors", {"format": "pt"})
    with pytest.raises(RewardFailed, match=r"lack 'visual_projection\.weight'"):
        load_scorer("clip_score", str(tmp_path / "partial"))
    weights["visual_projection.weight"] = torch.zeros(3, 16)
    save_file(weights, tmp_path / "partial" / "model.safetensors", {"format": "pt"})
    with pytest.raises(RewardFailed, match=r"is not a CLIP model: .*mismatch"):
        load_scorer("clip_score", str(tmp_path / "partial"))
