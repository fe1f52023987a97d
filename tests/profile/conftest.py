"""A complete, valid profile in a temporary folder, from which each test departs by a key or two."""

import json
import shutil
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path

import pytest

from nftctl.profile.load import Resolved, load_profile
from nftctl.tensorfile import safetensors_header
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


SD3: dict[str, object] = {
    "rl.profile": "sd35m_nft_paper",
    "rl.init_from": "sd3",
    "rl.sampler_shift": 3,
    "model.system_prompt": False,
    "model.resolution_template": False,
    "model.lora.targets": ["attn.to_q"],
}
"""What makes the complete profile one of the other family."""


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
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
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


SD3_BLOCK = {
    **{
        f"attn.{name}": [HIDDEN, HIDDEN]
        for name in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
    },
    "attn.norm_q": [4],
    "ff.net.0.proj": [INNER, HIDDEN],
    "ff.net.2": [HIDDEN, INNER],
}
"""Tensors of one block of a Stable Diffusion 3 transformer, as far as preflight looks at them."""
TEXT_PARTS = ("", "_2", "_3")


def write_sd3_base(folder: Path) -> Path:
    """A Stable Diffusion 3 folder as seen from outside: headers of two blocks and three text encoders, a VAE."""
    shapes = {f"transformer_blocks.{n}.{name}.weight": shape for n in (0, 1) for name, shape in SD3_BLOCK.items()}
    shapes |= {"context_embedder.weight": [HIDDEN, 6], "time_text_embed.text_embedder.linear_1.weight": [HIDDEN, 5]}
    shapes |= {"pos_embed.pos_embed": [1, 9, HIDDEN]}
    config = {"_class_name": "SD3Transformer2DModel", "patch_size": 2, "in_channels": 16, "num_attention_heads": 2}
    for part in ("transformer", "vae", *(f"{kind}{n}" for kind in ("text_encoder", "tokenizer") for n in TEXT_PARTS)):
        (folder / part).mkdir(parents=True)
        (folder / part / "config.json").write_text("{}")
    (folder / "transformer" / "config.json").write_text(json.dumps(config))
    (folder / "vae" / "config.json").write_text('{"block_out_channels": [8, 8, 8, 8]}')
    tensors = {name: ("F16", shape, bytes(2 * prod(shape))) for name, shape in shapes.items()}
    (folder / "transformer" / WEIGHTS).write_bytes(safetensors_bytes(tensors))
    for n in TEXT_PARTS:
        encoder = safetensors_bytes({"embed.weight": ("F16", [10 + len(n), 3], bytes(2 * 3 * (10 + len(n))))})
        (folder / f"text_encoder{n}" / "model.safetensors").write_bytes(encoder)
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


def write_shards(base: Path, folder: Path) -> None:
    """The transformer of a base as a distributed checkpoint of two files, its tensors cut in halves."""
    infos, raw = safetensors_header(base / "transformer" / WEIGHTS), (base / "transformer" / WEIGHTS).read_bytes()
    folder.mkdir()
    for number in (0, 1):
        tensors, places = {}, {}
        for name, info in infos.items():
            rows, row = info.shape[0] // 2, (info.end - info.begin) // info.shape[0]
            first, last = (0, rows) if number == 0 else (rows, info.shape[0])
            data = raw[info.begin + first * row : info.begin + last * row]
            if data:
                tensors[name] = (info.dtype, [last - first, *info.shape[1:]], data)
                places[name] = {"saved_offsets": [first, *[0] * (len(info.shape) - 1)]}
        content = safetensors_bytes(tensors, {"DCP_SHARDING_INFO": json.dumps(places)})
        (folder / f"model-0000{number + 1}-of-00002.safetensors").write_bytes(content)
    files = {name: f"model-0000{n + 1}-of-00002.safetensors" for n, name in enumerate(("first", "second"))}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (folder / "transformer").mkdir()
    shutil.copy(base / "transformer" / "config.json", folder / "transformer")


def write_place(folder: Path) -> None:
    """What the profiles of these tests point to: a base, eight prompts, and one of each that is not as it should be.

    `bare` lacks VAE and tokenizer, `other` is of another family, `dcp` a pickled distributed checkpoint; `shards` is
    one of safetensors, `nameless` one without a config, `torn-shards` one that lacks a file, `sd3-shards` one of the
    other family. The weights of `hollow` are missing, of `torn` cut off, of `half` one file of two. `sd3` is the other
    family; `sd3-mute` lacks a tokenizer, `sd3-deaf` a text encoder, and `sd3-bare` has no T5 and says so.
    """
    base = write_base(folder / "base")
    (folder / "prompts.txt").write_text("".join(f"prompt {n}\n" for n in range(8)))
    (folder / "prompts.csv").write_text("a\n")
    (folder / "words.txt").write_text("a red seven\na red cat\n")
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
    sd3 = write_sd3_base(folder / "sd3")
    for name in ("sd3-mute", "sd3-deaf", "sd3-bare"):
        shutil.copytree(sd3, folder / name)
    shutil.rmtree(folder / "sd3-mute" / "tokenizer_2")
    (folder / "sd3-deaf" / "text_encoder" / "model.safetensors").unlink()
    shutil.rmtree(folder / "sd3-bare" / "text_encoder_3")
    shutil.rmtree(folder / "sd3-bare" / "tokenizer_3")
    (folder / "sd3-bare" / "model_index.json").write_text(
        '{"text_encoder_3": [null, null], "tokenizer_3": [null, null]}'
    )
    (folder / "vae32").mkdir()
    (folder / "vae32" / "config.json").write_text('{"scale_factor_spatial": 32}')
    (folder / "dcp").mkdir()
    (folder / "dcp" / ".metadata").write_bytes(b"\x80")
    for name, source in (("shards", base), ("nameless", base), ("torn-shards", base), ("sd3-shards", sd3)):
        write_shards(source, folder / name)
    shutil.rmtree(folder / "nameless" / "transformer")
    (folder / "torn-shards" / "model-00002-of-00002.safetensors").unlink()


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
