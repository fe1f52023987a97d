"""A CLIP model from a local folder or a hub id: unit embeddings of images and texts, and a hash of what was loaded.

Owns finding the files, the preprocessing as the model's own file describes it, and inference without gradients. Only
safetensors are read: a folder that has its weights as a pickle alone is refused. Needs the extra `nftctl[clip]`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nftctl.errors import RewardFailed
from nftctl.reward.scorers import files_revision

if TYPE_CHECKING:
    import torch

READ = ("*.json", "*.safetensors", "merges.txt")
"""Files of a model folder that can change a score."""

MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
"""Of CLIP's training images; a preprocessor_config.json goes first."""

Images = Sequence[npt.NDArray[np.uint8]]


class Clip:
    """The model in `folder`. Embeddings are float32 [n, d], of length 1."""

    def __init__(self, folder: Path, *, text: bool) -> None:
        """`text=False`: the vision half is enough. Raises RewardFailed without the extra or for a wrong folder."""
        torch, transformers = _libraries()
        try:
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
            whole = text or hasattr(config, "text_config")
            kind = transformers.CLIPModel if whole else transformers.CLIPVisionModelWithProjection
            model, report = kind.from_pretrained(
                folder, local_files_only=True, use_safetensors=True, dtype=torch.float32, output_loading_info=True
            )
            self._tokenizer = (
                transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True) if text else None
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise RewardFailed(f"{folder} is not a CLIP model: {' '.join(str(error).split())[:300]}") from None
        if report["missing_keys"]:
            # Otherwise they would be random numbers.
            raise RewardFailed(f"the weights in {folder} lack {sorted(report['missing_keys'])[0]!r}")
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = model.eval().requires_grad_(False).to(self.device)
        self._look = Preprocessing(folder, (config.vision_config if whole else config).image_size)

    @property
    def scale(self) -> float:
        """exp of the learnt logit scale."""
        return float(self._model.logit_scale.exp())

    def images(self, images: Images) -> torch.Tensor:
        """Unit embeddings [n, d] of uint8 [H, W, 3] images."""
        import torch

        with torch.inference_mode():
            pixels = torch.from_numpy(self._look(images)).to(self.device)
            pooled = self._model.vision_model(pixel_values=pixels).pooler_output
            return _unit(self._model.visual_projection(pooled))

    def texts(self, texts: Sequence[str]) -> torch.Tensor:
        """Unit embeddings [n, d]; longer texts are cut at the length that the model was trained with."""
        import torch

        assert self._tokenizer is not None
        with torch.inference_mode():
            tokens = self._tokenizer(
                list(texts),
                padding="max_length",
                truncation=True,
                max_length=self._model.config.text_config.max_position_embeddings,
                return_tensors="pt",
            ).to(self.device)
            pooled = self._model.text_model(
                input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]
            ).pooler_output
            return _unit(self._model.text_projection(pooled))

    def cosines(self, images: Images, texts: Sequence[str]) -> list[float]:
        """Cosine of each image with its own text, in [-1, 1]."""
        values = (self.images(images) * self.texts(texts)).sum(dim=-1)
        return [float(v) for v in values]


class Preprocessing:
    """uint8 [H, W, 3] images to float32 [n, 3, size, size]: shorter side to `size` (bicubic), middle, normalised."""

    def __init__(self, folder: Path, size: int) -> None:
        path = folder / "preprocessor_config.json"
        given: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.size = size
        self.mean = np.asarray(given.get("image_mean", MEAN), np.float32)
        self.std = np.asarray(given.get("image_std", STD), np.float32)

    def __call__(self, images: Images) -> npt.NDArray[np.float32]:
        """The batch of `images`."""
        pixels = np.stack([self._square(image) for image in images]).astype(np.float32) / np.float32(255)
        return np.ascontiguousarray(((pixels - self.mean) / self.std).transpose(0, 3, 1, 2))

    def _square(self, image: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        from PIL import Image

        height, width = image.shape[:2]
        short = min(height, width)
        new = (self.size * width // short, self.size * height // short)
        resized = np.asarray(Image.fromarray(image).resize(new, Image.Resampling.BICUBIC))
        top, left = (new[1] - self.size) // 2, (new[0] - self.size) // 2
        return resized[top : top + self.size, left : left + self.size]


def find_model(model: str) -> Path:
    """The folder of `model`: itself, or the local snapshot of a hub id, fetched when the hub may be asked.

    Raises RewardFailed when there is none, or when its weights are not safetensors.
    """
    folder = Path(model).expanduser()
    if not folder.is_dir():
        folder = _snapshot(model)
    if not any(folder.glob("*.safetensors")):
        raise RewardFailed(
            f"{folder} holds no .safetensors file", hint="convert its weights; a pickle is never opened here"
        )
    return folder


def model_files(folder: Path) -> list[Path]:
    """Every file of `folder` that can change a score, by name."""
    return sorted(path for pattern in READ for path in folder.glob(pattern))


def revision(sources: Sequence[Path], model: str) -> str:
    """sha256 (hex) over the scorer's `sources`, this file, and the model's files."""
    parts = [files_revision([*sources, Path(__file__)]), files_revision(model_files(find_model(model)))]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def _snapshot(model: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise _missing(str(error)) from None
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise RewardFailed(f"there is no folder {model}", hint="give a local folder or a hub id such as OWNER/NAME")
    try:
        return Path(snapshot_download(model, allow_patterns=list(READ)))
    except Exception as error:  # the hub client has a dozen types for "not there"
        first = " ".join(str(error).split())[:200]
        raise RewardFailed(f"{model} is neither a local folder nor to be had from the hub: {first}") from None


def _libraries() -> tuple[Any, Any]:
    try:
        import torch
        import transformers
    except ImportError as error:
        raise _missing(str(error)) from None
    return torch, transformers


def _missing(why: str) -> RewardFailed:
    return RewardFailed(f"CLIP scorers need torch and transformers: {why}", hint="pip install 'nftctl[clip]'")


def _unit(x: torch.Tensor) -> torch.Tensor:
    unit: torch.Tensor = (x / x.norm(dim=-1, keepdim=True)).float()
    return unit
