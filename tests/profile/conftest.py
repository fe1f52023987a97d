"""A complete, valid profile in a temporary folder, from which each test departs by a key or two."""

import json
import shutil
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path

import pytest

from nftctl.profile.load import Resolved, load_profile
from tests.run.make import safetensors_bytes

REMOVED = object()

COMPLETE: dict[str, object] = {
    "rl.modality": "image",
    "rl.profile": "cosmos3_nft_t2i_public",
    "rl.init_from": "base",
    "rl.max_steps": 5,
    "rl.old.update_every": 1,
    "data.prompt_file": "prompts.txt",
}
PROVIDER: dict[str, object] = {"name": "judge", "url": "http://127.0.0.1:8000", "revision": "r1"}


def toml_of(values: Mapping[str, object], providers: list[dict[str, object]]) -> str:
    """Dotted keys as lines, then the providers. JSON's strings, numbers, lists and booleans are TOML's."""
    lines = [f"{key} = {_value(value)}" for key, value in values.items() if value is not REMOVED]
    for provider in providers:
        lines.append("[[reward.providers]]")
        lines += [f"{key} = {_value(value)}" for key, value in provider.items() if value is not REMOVED]
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_value(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


HIDDEN, HEADS, INNER = 8, 4, 16
LAYER = {
    "self_attn.add_q_proj": [HIDDEN, HIDDEN],
    "self_attn.add_k_proj": [HEADS, HIDDEN],
    "self_attn.add_v_proj": [HEADS, HIDDEN],
    "self_attn.to_add_out": [HIDDEN, HIDDEN],
    "self_attn.norm_added_q": [4],
    "self_attn.to_q": [HIDDEN, HIDDEN],
    "self_attn.to_k": [HEADS, HIDDEN],
    "self_attn.to_v": [HEADS, HIDDEN],
    "self_attn.to_out": [HIDDEN, HIDDEN],
    "mlp.up_proj": [INNER, HIDDEN],
    "mlp_moe_gen.gate_proj": [INNER, HIDDEN],
    "mlp_moe_gen.up_proj": [INNER, HIDDEN],
    "mlp_moe_gen.down_proj": [HIDDEN, INNER],
}
"""Tensors of one layer of a Cosmos3 transformer, as far as preflight looks at them."""
WEIGHTS = "diffusion_pytorch_model.safetensors"


def weights_bytes(layers: tuple[int, ...] = (0, 1), *, roots: bool = True) -> bytes:
    """A safetensors file of zeros with these layers, and the modules outside the layers."""
    shapes = {f"layers.{n}.{name}.weight": shape for n in layers for name, shape in LAYER.items()}
    if roots:
        shapes |= {"proj_in.weight": [HIDDEN, 64], "proj_out.weight": [64, HIDDEN], "embed_tokens.weight": [9, HIDDEN]}
    return safetensors_bytes({name: ("BF16", shape, bytes(2 * prod(shape))) for name, shape in shapes.items()})


def write_base(folder: Path) -> Path:
    """A diffusers folder as seen from outside: headers of two layers, a VAE and a tokenizer."""
    for part in ("transformer", "vae", "tokenizer"):
        (folder / part).mkdir(parents=True)
        (folder / part / "config.json").write_text("{}")
    config = {"_class_name": "Cosmos3OmniTransformer", "latent_channel": 16, "latent_patch_size": 2}
    (folder / "transformer" / "config.json").write_text(json.dumps(config))
    (folder / "transformer" / WEIGHTS).write_bytes(weights_bytes())
    (folder / "model_index.json").write_text("{}")
    return folder


def split_weights(folder: Path) -> None:
    """The same tensors in two files behind an index, as large bases come."""
    transformer = folder / "transformer"
    (transformer / WEIGHTS).unlink()
    parts = {"one.safetensors": weights_bytes((0,), roots=False), "two.safetensors": weights_bytes((1,))}
    for name, content in parts.items():
        (transformer / name).write_bytes(content)
    (transformer / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": dict(enumerate(parts))}))


def write_place(folder: Path) -> None:
    """What the profiles of these tests point to: a base, eight prompts, and one of each that is not as it should be.

    `bare` lacks VAE and tokenizer, `other` is of another family, `dcp` a distributed checkpoint; the weights of
    `hollow` are missing, of `torn` cut off, of `half` one file of two.
    """
    base = write_base(folder / "base")
    (folder / "prompts.txt").write_text("".join(f"prompt {n}\n" for n in range(8)))
    (folder / "prompts.csv").write_text("a\n")
    (folder / "twice.txt").write_text("".join(f"prompt {n}\n" for n in (0, 1, 2, 1, 0)))
    for name in ("bare", "other", "hollow", "torn", "half", "split"):
        shutil.copytree(base, folder / name)
    shutil.rmtree(folder / "bare" / "vae")
    shutil.rmtree(folder / "bare" / "tokenizer")
    (folder / "other" / "transformer" / "config.json").write_text('{"_class_name": "SD3Transformer2DModel"}')
    (folder / "hollow" / "transformer" / WEIGHTS).unlink()
    (folder / "torn" / "transformer" / WEIGHTS).write_bytes(weights_bytes()[:-1])
    split_weights(folder / "split")
    split_weights(folder / "half")
    (folder / "half" / "transformer" / "two.safetensors").unlink()
    (folder / "dcp").mkdir()
    (folder / "dcp" / ".metadata").write_bytes(b"\x80")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with everything that the profiles of these tests point to."""
    monkeypatch.chdir(tmp_path)
    write_place(tmp_path)
    return tmp_path


@pytest.fixture
def load(place: Path) -> Callable[..., Resolved]:
    """Write the complete profile with some keys changed, and load it without an environment."""

    def write_and_load(
        changes: Mapping[str, object] = {}, providers: list[dict[str, object]] | None = None, **options: object
    ) -> Resolved:
        text = toml_of({**COMPLETE, **changes}, [PROVIDER] if providers is None else providers)
        Path("profile.toml").write_text(text)
        return load_profile(Path("profile.toml"), **{"env": {}, **options})

    return write_and_load
