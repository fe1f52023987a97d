"""What is taken away works elsewhere: plain diffusers loads it, and makes the velocity of nftctl's policy."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import Cosmos3OmniTransformer, SD3Transformer2DModel, StableDiffusion3Pipeline
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from nftctl.errors import CheckpointUnusable, UsageRefused
from nftctl.model import adapters, export
from nftctl.model.card import loading, write_card
from nftctl.model.family import Family
from nftctl.model.trained import Trained, open_trained, public_name
from nftctl.run.directory import RunDirectory
from nftctl.run.outfolder import Entry, new_folder, write_safetensors
from nftctl.run.stored import StoredTensors
from nftctl.tensorfile import DTYPE_NAMES
from tests.run.make import snapshot

from .bases import build_transformer, stock_velocity, write_pixel_base
from .sd3_bases import write_sd3_base
from .test_sd3_parity import given
from .test_sd3_parity import stock_velocity as sd3_velocity
from .trained_runs import ALPHA, RANK, make_trained

SIGMAS = torch.tensor([0.9, 0.37])
PROMPTS = [[5, 9, 250, 3], [4]]


@dataclass
class Case:
    """A trained run of one family, and how to ask diffusers and nftctl for a velocity."""

    run: RunDirectory
    trained: Trained
    family: Family
    base: Path
    stock: Callable[[Path], Any]
    theirs: Callable[[Any], Tensor]
    conditioning: Callable[[], Any]

    def ours(self, which: adapters.Weights) -> Tensor:
        with torch.no_grad(), adapters.weights(self.family.denoiser, which):
            return self.family.denoiser(self.latents(), SIGMAS, self.conditioning())

    def latents(self) -> Tensor:
        shape = (2, *self.family.latent_shape)
        return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def cosmos3(folder: Path, dtype: str = "float32", *more: str) -> Case:
    base = write_pixel_base(folder / "base", build_transformer(dtype=getattr(torch, dtype)))
    sets = (f'rl.init_from="{base}"', f'model.dtype="{dtype}"', *more)
    run, checkpoint, family = make_trained(folder / "runs", sets=sets)

    def theirs(stock: Any) -> Tensor:
        rows = [
            stock_velocity(stock, ids, x[None], float(s) * 1000)
            for ids, x, s in zip(PROMPTS, case.latents(), SIGMAS, strict=True)
        ]
        return torch.stack([row[0] for row in rows])

    tower: Any = family.encoder
    case = Case(
        run, open_trained(checkpoint), family, base,
        lambda place: Cosmos3OmniTransformer.from_pretrained(
            place, subfolder="transformer", torch_dtype=getattr(torch, dtype)
        ),
        theirs, lambda: tower.tower.run(PROMPTS),
    )  # fmt: skip
    return case


def sd3(folder: Path) -> Case:
    base = write_sd3_base(folder / "base")
    (folder / "prompts.txt").write_text("a\n" * 50)
    sets = (
        f'rl.init_from="{base}"', f'data.prompt_file="{folder}/prompts.txt"', 'model.dtype="float32"',
        "model.height=64", "model.width=64", 'eval.prompt_file=""', 'reward.providers.0.revision="r1"',
    )  # fmt: skip
    run, checkpoint, family = make_trained(folder / "runs", "sd35m_nft_paper_2gpu", sets)
    _, _, prompts = given(2, (8, 8))
    case = Case(
        run, open_trained(checkpoint), family, base,
        lambda place: SD3Transformer2DModel.from_pretrained(place, subfolder="transformer"),
        lambda stock: sd3_velocity(stock, case.latents(), SIGMAS, prompts), lambda: prompts,
    )  # fmt: skip
    return case


@pytest.fixture(scope="module", params=[cosmos3, sd3], ids=["cosmos3", "sd3"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Read only."""
    made: Case = request.param(tmp_path_factory.mktemp(request.param.__name__))
    return made


@pytest.fixture(scope="module")
def pixels(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """The Cosmos3 case alone, read only."""
    return cosmos3(tmp_path_factory.mktemp("pixels"))


def close(a: Tensor, b: Tensor) -> bool:
    return float((a - b).norm() / b.norm()) <= 1e-5


# -- the adapter ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["policy", "old", "ema"])
def test_plain_diffusers_loads_the_adapter_and_makes_the_same_velocity(
    case: Case, which: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    count = export.write_adapter(case.trained, which, tmp_path / "out", "some/base@main")
    stock = case.stock(case.base)
    with torch.no_grad():
        base = case.theirs(stock)
    before = set(stock.state_dict())
    with caplog.at_level(logging.WARNING, logger="diffusers"):
        logging.getLogger("diffusers").propagate = True
        stock.load_lora_adapter(tmp_path / "out", use_safetensors=True)
    assert [record.message for record in caplog.records if "key" in record.message.lower()] == []
    added = {name: value for name, value in stock.state_dict().items() if "lora_" in name}
    # Every tensor of the file is in the model, and the model has none besides: nothing missing, nothing unexpected.
    stored = load_file(tmp_path / "out" / export.ADAPTER_FILE)
    renamed = {re.sub(r"\.(lora_[AB])\.\w+\.weight$", r".\1.weight", name): value for name, value in added.items()}
    assert renamed.keys() == {name.removeprefix("transformer.") for name in stored}
    assert len(renamed) == len(stored) == count
    assert all(torch.equal(value, stored[f"transformer.{name}"]) for name, value in renamed.items())
    assert {name.replace(".base_layer", "") for name in stock.state_dict() if "lora_" not in name} == before
    with torch.no_grad():
        theirs = case.theirs(stock)
    assert close(theirs, case.ours(which))
    assert not close(theirs, base)
    assert close(base, case.ours("reference"))


def test_alpha_is_carried_although_it_is_not_the_rank(pixels: Case, tmp_path: Path) -> None:
    export.write_adapter(pixels.trained, "policy", tmp_path / "out", "b")
    stock = pixels.stock(pixels.base)
    stock.load_lora_adapter(tmp_path / "out", use_safetensors=True)
    config = stock.peft_config["default_0"]
    assert (config.r, config.lora_alpha) == (RANK, ALPHA)
    layer = stock.layers[0].self_attn.add_q_proj
    assert layer.scaling == {"default_0": 1.5}


def test_the_header_says_where_the_adapter_comes_from(pixels: Case, tmp_path: Path) -> None:
    export.write_adapter(pixels.trained, "old", tmp_path / "out", "some/base@main")
    with safe_open(tmp_path / "out" / export.ADAPTER_FILE, "pt") as file:
        metadata, names = file.metadata(), list(file.keys())
    manifest = pixels.trained.manifest
    config = json.loads(metadata.pop("lora_adapter_metadata"))
    assert metadata == {
        "format": "pt", "run_id": manifest.run_id, "step": "3", "weights": "old", "identity": manifest.identity_hash,
        "base_fingerprint": manifest.identity["base.fingerprint"], "nftctl_version": "0.1.0", "rank": "4",
        "alpha": "6.0", "base_model": "some/base@main",
    }  # fmt: skip
    assert (config["transformer.r"], config["transformer.lora_alpha"]) == (4, 6)
    assert all(key.startswith("transformer.") for key in config)
    assert config["transformer.target_modules"] == sorted(
        {re.sub(r"^transformer\.|\.lora_[AB]\.weight$", "", name) for name in names}
    )


def test_stable_diffusion_loads_it_by_its_pipeline_s_own_line(tmp_path: Path) -> None:
    made = sd3(tmp_path)
    export.write_adapter(made.trained, "policy", tmp_path / "out", "b")
    pipeline = StableDiffusion3Pipeline.from_pretrained(made.base)
    pipeline.load_lora_weights(tmp_path / "out")
    assert pipeline.get_list_adapters() == {"transformer": ["default_0"]}
    with torch.no_grad():
        assert close(made.theirs(pipeline.transformer), made.ours("policy"))


# -- folded in, and beside the base ---------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["policy", "old", "ema"])
def test_the_merged_folder_is_a_base_of_its_own(case: Case, which: Any, tmp_path: Path) -> None:
    changed = export.write_merged(case.trained, which, case.base, tmp_path / "out")
    stock, info = type(case.stock(case.base)).from_pretrained(
        tmp_path / "out", subfolder="transformer", output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    with torch.no_grad():
        theirs = case.theirs(stock)
    assert close(theirs, case.ours(which))
    assert not close(theirs, case.ours("reference"))
    old, new = snapshot(case.base), snapshot(tmp_path / "out")
    assert changed == len(case.trained.adapted(which))
    # Only the transformer's weights are other bytes; every other file of the base is there as it was.
    assert {name for name in old if old[name] != new.get(name)} == {"transformer/diffusion_pytorch_model.safetensors"}
    assert old.keys() == new.keys()
    before, after = (load_file(f / "transformer" / export.STEM) for f in (case.base, tmp_path / "out"))
    other = {name for name in before if not torch.equal(before[name], after[name])}
    assert other == {f"{module}.weight" for module in case.trained.adapted(which)}


def test_a_bfloat16_base_is_summed_in_float32_and_rounded_once(tmp_path: Path) -> None:
    made = cosmos3(tmp_path, "bfloat16")
    export.write_merged(made.trained, "policy", made.base, tmp_path / "out")
    before, after = (load_file(f / "transformer" / export.STEM) for f in (made.base, tmp_path / "out"))
    assert {name: value.dtype for name, value in after.items()} == {n: v.dtype for n, v in before.items()}
    stored = adapters.policy_parameters(made.family.denoiser)
    for module in made.trained.adapted("policy"):
        a, b = stored[f"{module}.lora_A"].double(), stored[f"{module}.lora_B"].double()
        exact = before[f"{module}.weight"].double() + 1.5 * b @ a
        unit = 2.0 ** (torch.floor(torch.log2(exact.abs())) - 7)
        assert ((after[f"{module}.weight"].double() - exact).abs() <= 0.501 * unit).all()
    said = "The adapter was added in float32, and the sum was rounded once to the base's bfloat16: pictures differ"
    assert said in card(made, "merged", tmp_path / "out")


def test_weights_split_into_files_stay_split_behind_the_same_index(pixels: Case, tmp_path: Path) -> None:
    split = tmp_path / "split"
    pixels.stock(pixels.base).save_pretrained(split / "transformer", max_shard_size="60KB")
    (split / "model_index.json").write_text('{"transformer": ["diffusers", "Cosmos3OmniTransformer"]}')
    files = sorted(path.name for path in (split / "transformer").glob("*.safetensors"))
    assert len(files) > 2
    export.write_merged(pixels.trained, "policy", split, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out/transformer").glob("*.safetensors")) == files
    with torch.no_grad():
        assert close(pixels.theirs(pixels.stock(tmp_path / "out")), pixels.ours("policy"))


def test_the_pipeline_folder_is_the_base_untouched_with_the_adapter_beside_it(case: Case, tmp_path: Path) -> None:
    export.write_pipeline(case.trained, "policy", case.base, tmp_path / "out", "b")
    old, new = snapshot(case.base), snapshot(tmp_path / "out")
    assert new.keys() - old.keys() == {f"adapter/{export.ADAPTER_FILE}"}
    weights = "transformer/diffusion_pytorch_model.safetensors"
    assert {name for name in old if old[name] != new[name]} <= {weights}
    first, second = (load_file(f / weights) for f in (case.base, tmp_path / "out"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    stock = case.stock(tmp_path / "out")
    stock.load_lora_adapter(tmp_path / "out/adapter", use_safetensors=True)
    with torch.no_grad():
        assert close(case.theirs(stock), case.ours("policy"))


def test_whole_trained_weights_take_the_place_of_the_base_s(tmp_path: Path) -> None:
    made = cosmos3(tmp_path / "made", "bfloat16", 'model.train="full"')
    trained = dict(made.family.denoiser.named_parameters())
    assert made.trained.adapted("policy") == []
    count = export.write_pipeline(made.trained, "policy", made.base, tmp_path / "out", "b")
    before, after = (load_file(f / "transformer" / export.STEM) for f in (made.base, tmp_path / "out"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    # All of the denoiser, in the base's own dtypes, and nothing of the prompt encoder.
    assert changed == set(trained) == {name.removeprefix("policy.") for name in made.trained.copy("policy").values()}
    assert count == len(changed) < len(before)
    assert {name: value.dtype for name, value in after.items()} == {n: v.dtype for n, v in before.items()}
    stored = StoredTensors(made.trained.folder.rglob("*.safetensors"))
    for name in changed:
        value = export.tensor_of(stored, f"policy.{name}")
        assert value.dtype == torch.float32
        assert torch.equal(after[name], value.to(after[name].dtype))
    assert not (tmp_path / "out/adapter").exists()
    for to in ("lora", "merged"):
        with pytest.raises(UsageRefused, match="whole weights and no adapter"):
            export.refuse_unfit(made.trained, to, "policy")
    text = card(made, "diffusers", tmp_path / "out")
    assert "Trained in float32, each weight was rounded once to the base's bfloat16: pictures differ" in text
    assert "A whole pipeline with the trained denoiser" in text
    assert "| trained | all weights of the denoiser |" in text
    assert "adapter rank" not in text
    assert "adapted modules" not in text
    assert "load_lora" not in text


def test_weights_that_were_not_kept_are_refused(tmp_path: Path) -> None:
    made = cosmos3(tmp_path / "made", "float32", "rl.old.build_old=false", "rl.ema_decay=0.0")
    assert made.trained.has("policy")
    for which in ("old", "ema"):
        with pytest.raises(CheckpointUnusable, match=f"holds no {which}") as refused:
            export.write_adapter(made.trained, which, tmp_path / "out", "b")
        assert refused.value.hint == "it holds policy"
        with pytest.raises(CheckpointUnusable, match=f"holds no {which}"):
            export.refuse_unfit(made.trained, "diffusers", which)


class FewTensors(StoredTensors):
    """Tensors that lie in no file."""

    def __init__(self, values: dict[str, Tensor]) -> None:
        self.values = values
        self.forms = {n: (DTYPE_NAMES[str(v.dtype)[6:]], tuple(v.shape)) for n, v in values.items()}

    def read(self, name: str) -> Any:
        return self.values[name].numpy()

    def chunks(self, name: str) -> Any:
        return [self.values[name].numpy().tobytes()]


def test_a_vae_that_the_profile_named_goes_into_the_folder(vae_base: Path, tmp_path: Path) -> None:
    own = tmp_path / "other-vae"
    own.mkdir()
    for file in (vae_base / "vae").iterdir():
        (own / file.name).write_bytes(file.read_bytes())
    (own / "note.txt").write_text("mine")
    (tmp_path / "prompts.txt").write_text("a\nb\nc\nd\n")
    sets = (
        f'rl.init_from="{vae_base}"', f'model.vae="{own}"', f'data.prompt_file="{tmp_path}/prompts.txt"',
        "model.height=16", "model.width=16", 'model.dtype="float32"', 'reward.providers.0.revision="r1"',
    )  # fmt: skip
    _, checkpoint, _ = make_trained(tmp_path / "runs", "cosmos3_nft_t2i_public", sets)
    trained = open_trained(checkpoint)
    export.write_merged(trained, "policy", trained.base(), tmp_path / "out")
    assert (tmp_path / "out/vae/note.txt").read_text() == "mine"
    assert export.absent_parts(tmp_path / "out") == []
    from diffusers import Cosmos3OmniPipeline

    pipeline = Cosmos3OmniPipeline.from_pretrained(tmp_path / "out", enable_safety_checker=False)
    assert pipeline.vae.config.z_dim == 16
    (own / "note.txt").write_text("changed")
    with pytest.raises(CheckpointUnusable, match="not the vae of the training any more"):
        export.copy_parts(trained, vae_base, tmp_path / "second")
    assert 'Cosmos3OmniPipeline.from_pretrained("FOLDER"' in loading(trained, "merged", "b")


# -- the card -------------------------------------------------------------------------------------------------------


def card(made: Case, to: str, folder: Path, weights: str = "policy", base: str = "nvidia/Cosmos3-Nano@main") -> str:
    folder.mkdir(exist_ok=True)
    write_card(made.trained, to, weights, base, folder)
    return (folder / "README.md").read_text()


def test_the_card_tells_recipe_rewards_and_how_to_load(case: Case, tmp_path: Path) -> None:
    text = card(case, "lora", tmp_path / "out")
    manifest = case.trained.manifest
    assert "base_model: nvidia/Cosmos3-Nano\n" in text
    assert "for 3 steps" in text
    assert "| adapter rank, alpha | 4, 6 |" in text
    # Evaluations after the checkpoint's step are not its own.
    assert "| held-out, fixed noise | step 0 | step 3 |" in text
    assert "| `eval/reward` | 0.2500 | 0.5000 |" in text
    assert "0.7500" not in text
    for entry in manifest.reward:
        assert f"| `{entry['name']}` | 1 | `{entry['revision']}` |" in text
    assert manifest.run_id in text
    assert "![reward over the run's steps](reward.svg)" in text
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["README.md", "reward.svg"]
    line = {
        "cosmos3": 'transformer.load_lora_adapter("FOLDER", use_safetensors=True)',
        "sd3": 'pipe.load_lora_weights("FOLDER")',
    }[case.trained.contract.family]
    assert line in text
    assert "## Licence" in text


def test_the_lines_on_the_card_run(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    export.write_adapter(case.trained, "policy", Path("FOLDER"), "b")
    Path("BASE").symlink_to(case.base)
    lines = loading(case.trained, "lora", "a folder")
    space: dict[str, Any] = {}
    exec(lines, space)
    stock = space["transformer"] if "transformer" in space else space["pipe"].transformer
    with torch.no_grad():
        assert close(case.theirs(stock), case.ours("policy"))


@pytest.mark.parametrize(("packaged", "folder"), [("digits", "tiny"), ("scenes", "scenes")])
def test_an_adapter_of_a_packaged_base_says_where_that_is_and_under_which_licence(
    packaged: str, folder: str, pixels: Case, tmp_path: Path
) -> None:
    name = public_name(f"embedded:{packaged}")
    text = card(pixels, "lora", tmp_path / "out", base=name)
    assert text.startswith("---\nlicense: cc-by-4.0\n")
    assert f"in its folder `model/{folder}/base`; profiles call it `embedded:{packaged}`" in text
    assert "The base is under cc-by-4.0, which goes with these weights" in text
    assert f'\nbase = files("nftctl") / "model/{folder}/base"\n' in text
    assert '.from_pretrained(base, subfolder="transformer")' in text
    export.write_merged(pixels.trained, "policy", pixels.base, tmp_path / "merged")
    assert "rounded" not in card(pixels, "merged", tmp_path / "merged")  # a base in float32
    # A whole pipeline needs no base, and is as free as it.
    assert "importlib" not in loading(pixels.trained, "merged", name)
    assert "license: cc-by-4.0" in card(pixels, "merged", tmp_path / "merged", base=name)
    assert "cc-by" not in card(pixels, "lora", tmp_path / "other", base="mine")


@pytest.mark.parametrize("to", ["lora", "merged"])
def test_the_lines_for_a_packaged_base_find_it_and_draw(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, checkpoint, _ = make_trained(tmp_path / "runs", "scenes_t2i_cpu")
    trained = open_trained(checkpoint)
    name = export.base_name(trained, "")
    monkeypatch.chdir(tmp_path)
    if to == "lora":
        export.write_adapter(trained, "policy", Path("FOLDER"), name)
    else:
        export.write_merged(trained, "policy", trained.base(), Path("FOLDER"))
    space: dict[str, Any] = {}
    exec(loading(trained, to, name), space)
    assert ("base" in space) == (to == "lora")
    write_card(trained, to, "policy", name, Path("FOLDER"))
    off = "use_system_prompt=False, add_resolution_template=False"
    assert f"call the pipeline with `{off}`" in Path("FOLDER/README.md").read_text()
    call = f'pipe("a red circle", num_frames=1, height=32, width=32, num_inference_steps=1, guidance_scale=1.0, {off})'
    (picture,) = eval(call, space).video
    assert picture.size == (32, 32)


def test_the_card_names_no_place_of_this_machine(case: Case, tmp_path: Path) -> None:
    for to in ("lora", "merged", "diffusers"):
        name = export.base_name(case.trained, "")
        assert name == "base"
        text = card(case, to, tmp_path / to, base=name)
        assert not re.search(r"(?<![\w.])/(?:tmp|home|root|var|usr)", text)
        assert str(case.run.path.parent) not in text
        assert str(Path.cwd()) not in text
        assert "http" not in text
        assert "base_model" not in text


def test_old_weights_do_not_boast_of_the_policy_s_scores(pixels: Case, tmp_path: Path) -> None:
    assert "scores of the trained policy, not of the moving old policy" in card(pixels, "lora", tmp_path / "a", "old")
    assert "These are scores of" not in card(pixels, "lora", tmp_path / "b")
    eval_of_ema = Trained(
        pixels.trained.folder, pixels.trained.manifest, pixels.run, {"eval": {"weights": "ema"}}
    )  # fmt: skip
    pixels_ema = replace(pixels, trained=eval_of_ema)
    assert "These are scores of the running average" in card(pixels_ema, "lora", tmp_path / "c")


def test_pictures_after_the_last_step_are_shown_only_where_they_are_of_this_step(
    pixels: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "before_after.png" not in card(pixels, "lora", tmp_path / "a")
    monkeypatch.setattr(pixels.trained.manifest, "step", 9)
    assert "](before_after.png)" in card(pixels, "lora", tmp_path / "b")
    assert (tmp_path / "b" / "before_after.png").read_bytes() == b"the last grids"


@pytest.mark.parametrize(
    ("given_name", "shown"),
    [
        ("embedded", "nftctl's embedded tiny base"),
        ("/a/b/Cosmos3-Nano", "Cosmos3-Nano"),
        ("/c/hub/models--nvidia--Cosmos3-Nano/snapshots/0123abcd", "nvidia/Cosmos3-Nano@0123abcd"),
        ("nvidia/Cosmos3-Nano@main", "nvidia/Cosmos3-Nano@main"),
    ],
)
def test_a_base_is_named_without_its_place(given_name: str, shown: str) -> None:
    assert public_name(given_name) == shown


# -- refusals -------------------------------------------------------------------------------------------------------


def test_another_base_is_refused(pixels: Case, tmp_path: Path) -> None:
    other = write_pixel_base(tmp_path / "other", build_transformer(seed=1))
    with pytest.raises(CheckpointUnusable, match="is not the base that"):
        pixels.trained.base(str(other))
    with pytest.raises(CheckpointUnusable, match="is not there"):
        pixels.trained.base(str(tmp_path / "nowhere"))
    assert pixels.trained.base(str(pixels.base)) == pixels.base


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    made = cosmos3(tmp_path)
    shard = made.trained.folder / "state/shard-0.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x01")
    with pytest.raises(CheckpointUnusable, match=r"shard-0\.safetensors: altered"):
        open_trained(made.trained.folder)


def test_a_pair_of_another_rank_or_half_a_pair_is_refused(pixels: Case, tmp_path: Path) -> None:
    values = {"policy.a.lora_A": torch.zeros(4, 3), "policy.a.lora_B": torch.zeros(5, 3)}
    trained = Trained(pixels.trained.folder, pixels.trained.manifest, None)
    trained.__dict__["tensors"] = FewTensors(values)
    with pytest.raises(CheckpointUnusable, match=r"a is \[5, 3\] x \[4, 3\], the rank is 4"):
        export.write_adapter(trained, "policy", tmp_path / "out", "b")
    del values["policy.a.lora_B"]
    trained.__dict__["tensors"] = FewTensors(values)
    with pytest.raises(CheckpointUnusable, match=r"not an adapter of pairs of A and B: a.lora_B"):
        export.write_adapter(trained, "policy", tmp_path / "out", "b")


def test_pickles_hidden_files_and_stray_weights_of_the_base_stay_behind(pixels: Case, tmp_path: Path) -> None:
    base = tmp_path / "base"
    for name, content in snapshot(pixels.base).items():
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_bytes(content)  # type: ignore[arg-type]
    for name in ("tokenizer/x.bin", "tokenizer/.secret.json", "transformer/x.pt", "stray.safetensors", "unused/a.json"):
        (base / name).parent.mkdir(exist_ok=True)
        (base / name).write_bytes(b"x")
    (base / "transformer/other.fp16.safetensors").write_bytes(b"x")
    (base / "LICENSE.md").write_text("terms")
    (base / "README.md").write_text("about the base")
    export.write_pipeline(pixels.trained, "policy", base, tmp_path / "out", "b")
    new = snapshot(tmp_path / "out")
    assert new.keys() - snapshot(pixels.base).keys() == {
        f"adapter/{export.ADAPTER_FILE}", "LICENSE.md", "README.base.md"
    }  # fmt: skip
    assert new["README.base.md"] == b"about the base"


# -- files ----------------------------------------------------------------------------------------------------------


def test_a_file_is_written_tensor_by_tensor(tmp_path: Path) -> None:
    alive: list[str] = []
    most = 0

    def chunks(name: str) -> Any:
        nonlocal most
        alive.append(name)
        most = max(most, len(alive))
        yield b"ab"
        yield b"cd"
        alive.remove(name)

    entries = [Entry(f"t{i}", ("U8", (2, 2)), lambda i=i: chunks(f"t{i}")) for i in range(5)]
    write_safetensors(tmp_path / "x.safetensors", entries, {"format": "pt"})
    assert most == 1
    loaded = load_file(tmp_path / "x.safetensors")
    assert list(loaded) == [f"t{i}" for i in range(5)]
    assert loaded["t3"].tolist() == [[97, 98], [99, 100]]
    with pytest.raises(CheckpointUnusable, match="t has 2 bytes, its form needs 4"):
        write_safetensors(tmp_path / "y.safetensors", [Entry("t", ("U8", (4,)), lambda: [b"ab"])], {})


def test_blocks_are_put_together_and_a_hole_is_refused(tmp_path: Path) -> None:
    whole = torch.arange(12, dtype=torch.int16).reshape(3, 4)
    for number, (first, part) in enumerate([(0, whole[:2]), (2, whole[2:])]):
        info = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [first, 0]}})}
        raw = part.contiguous().numpy().tobytes()
        entry = Entry("w", ("I16", tuple(part.shape)), lambda raw=raw: [raw])
        write_safetensors(tmp_path / f"{number}.safetensors", [entry], info)
    paths = sorted(tmp_path.glob("*.safetensors"))
    stored = StoredTensors(paths)
    assert stored.forms == {"w": ("I16", (3, 4))}
    assert b"".join(stored.chunks("w")) == whole.numpy().tobytes()
    with pytest.raises(CheckpointUnusable, match="w"):
        StoredTensors(paths[1:])


def test_a_new_folder_is_whole_or_not_there(tmp_path: Path) -> None:
    def fail() -> None:
        with new_folder(tmp_path / "a/b") as draft:
            (draft / "x").write_text("1")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert [path.name for path in tmp_path.rglob("*")] == ["a"]
    (tmp_path / "a/b").mkdir()
    with new_folder(tmp_path / "a/b") as draft:
        (draft / "x").write_text("1")
    assert snapshot(tmp_path) == {"a/b/x": b"1"}
    for taken in ("a", "a/b/x"):
        with pytest.raises(UsageRefused, match="is there already"), new_folder(tmp_path / taken):
            pass
    with pytest.raises(UsageRefused, match="cannot be written to"), new_folder(tmp_path / "a/b/x/y"):
        pass
