"""A complete, valid profile in a temporary folder, from which each test departs by a key or two."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from nftctl.profile.load import Resolved, load_profile

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


def write_base(folder: Path) -> Path:
    """A diffusers folder as seen from outside, with a VAE and a tokenizer."""
    for part in ("transformer", "vae", "tokenizer"):
        (folder / part).mkdir(parents=True)
        (folder / part / "config.json").write_text("{}")
    (folder / "transformer" / "config.json").write_text('{"_class_name": "Cosmos3OmniTransformer"}')
    (folder / "model_index.json").write_text("{}")
    return folder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a base and eight prompts."""
    monkeypatch.chdir(tmp_path)
    write_base(tmp_path / "base")
    (tmp_path / "prompts.txt").write_text("".join(f"prompt {n}\n" for n in range(8)))
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
