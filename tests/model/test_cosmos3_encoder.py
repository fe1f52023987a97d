"""Prompts: upstream's tokens, one encoding each, and a memory that is bounded."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan, Cosmos3OmniPipeline

from nftctl.errors import CheckpointUnusable, ProfileRefused
from nftctl.model.cosmos3 import split
from nftctl.model.cosmos3_encoder import Cosmos3PromptEncoder, PromptCache
from nftctl.model.cosmos3_tokens import Cosmos3Tokens, load_tokenizer
from nftctl.model.registry import load_family
from nftctl.profile.prompts import read_prompts
from nftctl.profile.schema import Model

from .bases import build_tokenizer, build_transformer

PROMPTS = ["a red seven", "", "one sentence. Another one.", '{"subject": "кот", "n": 3}', "ends with dots..."]


def letters(prompt: str, negative: bool) -> list[int]:
    """A stand-in for a tokenizer: one id a letter, and one for the branch."""
    return [*(ord(c) % 200 for c in prompt), 201 if negative else 202]


def encoder(cache_bytes: int = 1 << 30) -> Cosmos3PromptEncoder:
    return Cosmos3PromptEncoder(split(build_transformer())[0], letters, cache_bytes=cache_bytes)


@pytest.mark.parametrize("system_prompt", [True, False])
@pytest.mark.parametrize("resolution_template", [True, False])
def test_tokens_are_those_of_the_pipeline(system_prompt: bool, resolution_template: bool) -> None:
    tokenizer = build_tokenizer()
    vae = AutoencoderKLWan(base_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    pipeline = Cosmos3OmniPipeline(build_transformer(), tokenizer, vae, None, enable_safety_checker=False)
    tokens = Cosmos3Tokens(
        tokenizer, height=48, width=80, system_prompt=system_prompt, resolution_template=resolution_template
    )
    for prompt in PROMPTS:
        for negative in ("blurry", "", None):
            want = pipeline.tokenize_prompt(
                prompt,
                negative,
                num_frames=1,
                height=48,
                width=80,
                use_system_prompt=system_prompt,
                add_resolution_template=resolution_template,
            )
            assert (tokens(prompt, False), tokens(negative or "", True)) == want


def test_a_structured_prompt_gives_the_tokens_of_the_pipeline_s_own_json(tmp_path: Path) -> None:
    """The pipeline writes one kind of structured prompt itself; as an object in a file it comes to the same tokens."""
    written = Cosmos3OmniPipeline._build_action_json_prompt(
        'a "кот" sits', view_point="ego_view", num_frames=1, fps=24.0, height=48, width=80
    )
    assert json.loads(written)["actions"][0]["description"] == 'a "кот" sits.'
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": json.loads(written)}, ensure_ascii=False, indent=None))
    (prompt,) = read_prompts(tmp_path / "p.jsonl")
    assert prompt.text == written
    tokenizer = build_tokenizer()
    vae = AutoencoderKLWan(base_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    pipeline = Cosmos3OmniPipeline(build_transformer(), tokenizer, vae, None, enable_safety_checker=False)
    tokens = Cosmos3Tokens(tokenizer, height=48, width=80, system_prompt=True, resolution_template=True)
    assert tokens(prompt.text, False) == pipeline.tokenize_prompt(written, num_frames=1, height=48, width=80)[0]


def test_the_plain_template_is_spelled_out() -> None:
    tokenizer = build_tokenizer()
    tokens = Cosmos3Tokens(tokenizer, height=48, width=80, system_prompt=False, resolution_template=False)
    text = "<|user|>a red seven<|end|><|assistant|><|end|><|vision_start|>"
    assert tokens("a red seven", False) == tokenizer(text)["input_ids"]
    stated = Cosmos3Tokens(tokenizer, height=48, width=80, system_prompt=False, resolution_template=True)
    assert "48x80" in tokenizer.decode(stated("a red seven", False))
    assert stated("a red seven", False) != stated("a red seven", True)


@pytest.mark.parametrize(
    ("remove", "named"),
    [("chat", "a chat template"), ("eos", "an end-of-sequence token"), ("vision", "vision_start")],
)
def test_a_tokenizer_that_cosmos_cannot_use_is_refused(remove: str, named: str, tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    if remove == "chat":
        tokenizer.chat_template = None
    elif remove == "eos":
        tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    if remove == "vision":
        file = tmp_path / "tokenizer.json"
        file.write_text(file.read_text().replace("<|vision_start|>", "<|other|>"))
    with pytest.raises(CheckpointUnusable, match=named):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(("negative", "key"), [(False, "data.prompt_file"), (True, "rl.negative_prompt")])
@pytest.mark.parametrize("stated", [True, False])
def test_what_the_chat_template_refuses_is_the_prompt_s_fault(negative: bool, key: str, stated: bool) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no (set model.resolution_template = false; or else)') }}"
    tokens = Cosmos3Tokens(tokenizer, height=48, width=80, system_prompt=False, resolution_template=stated)
    e = Cosmos3PromptEncoder(split(build_transformer())[0], tokens)
    with pytest.raises(ProfileRefused) as refused:
        e.check("x" * 100, negative=negative)
    (finding,) = refused.value.findings
    assert (finding.code, finding.key) == ("prompt-refused", key)
    advice = "set model.resolution_template = false; " if stated else ""
    assert finding.message == f'the base\'s tokenizer refuses the prompt "{"x" * 80}...": no ({advice}or else)'
    assert (e.encoded, e.visits) == (0, 0)


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointUnusable, match="no tokenizer"):
        load_tokenizer(tmp_path)


def test_every_unique_prompt_is_encoded_once() -> None:
    e = encoder()
    first = e.encode(["a", "bb", "a"])
    assert e.encoded == 2
    assert first[0] is first[2]
    again = e.encode(["bb", "a"])
    assert e.encoded == 2
    assert again == [first[1], first[0]]
    e.encode(["a"], negative=True)
    assert e.encoded == 3
    assert [c.rows for c in first] == [1, 1, 1]
    assert first[1].lengths == (3,)


def test_a_prompt_is_the_same_bit_for_bit_whatever_came_with_it() -> None:
    alone = encoder().encode(["bb"])[0]
    beside = encoder().encode(["a longer one", "bb"])[1]
    assert torch.equal(alone.keys, beside.keys)
    assert torch.equal(alone.values, beside.values)


def test_the_memory_is_bounded_and_forgets_the_longest_unused() -> None:
    one = encoder().encode(["aa"])[0].nbytes
    e = encoder(cache_bytes=2 * one)
    e.encode(["aa"])
    e.encode(["bb"])
    e.encode(["aa"])
    e.encode(["cc"])
    assert e.encoded == 3
    e.encode(["aa"])
    assert e.encoded == 3
    e.encode(["bb"])
    assert e.encoded == 4


def test_one_that_is_wanted_is_not_forgotten_for_another_of_the_same_call() -> None:
    one = encoder().encode(["aa"])[0].nbytes
    e = encoder(cache_bytes=2 * one)
    e.encode(["aa", "bb"])
    e.encode(["cc", "aa"])  # what is longest unused is bb, whatever was before
    assert e.encoded == 3
    e.encode(["aa", "cc"])
    assert e.encoded == 3


def test_what_has_to_go_goes_before_its_room_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    one = encoder().encode(["aa"])[0].nbytes
    e = encoder(cache_bytes=3 * one)
    gone, used, kept = (weakref.ref(cache) for cache in e.encode(["aa", "bb", "cc"]))
    seen: list[list[bool]] = []
    run = e._run

    def look(prompts: Sequence[str], negative: bool) -> list[PromptCache]:
        seen.append([ref() is not None for ref in (gone, used, kept)])
        return run(prompts, negative)

    monkeypatch.setattr(e, "_run", look)
    e.encode(["dd", "bb"])
    assert seen == [[False, True, True]]
    e.encode(["ee", "ff", "bb", "gg", "hh"])  # more than there is room for: what is wanted now stays nevertheless
    assert seen[1:] == [[False, True, False]]
    assert e.encoded == 3 + 1 + 4
    e.encode(["bb", "gg", "hh"])
    assert e.encoded == 8


def test_a_prompt_larger_than_the_memory_still_works() -> None:
    e = encoder(cache_bytes=1)
    assert [c.lengths for c in e.encode(["aa", "bbb"])] == [(3,), (4,)]


def test_the_encoder_is_frozen_and_its_output_carries_no_graph() -> None:
    e = encoder()
    cache = e.encode(["a"])[0]
    assert not cache.keys.requires_grad
    assert not any(p.requires_grad for p in e.tower.parameters())


def test_a_batch_pads_to_the_longest_and_keeps_the_order() -> None:
    caches = encoder().encode(["a", "bbbb", "cc"])
    joined = PromptCache.batch(caches)
    assert joined.lengths == (2, 5, 3)
    assert joined.keys.shape == (3, 3, 2, 5, 12)
    assert torch.equal(joined.keys[:, 2:, :, :3], caches[2].keys)
    assert not joined.keys[:, 0, :, 2:].any()
    nested = PromptCache.batch([joined, caches[0]])
    assert nested.lengths == (2, 5, 3, 2)


@pytest.mark.parametrize("ids", [[], [300], [-1], [3, 5000]], ids=str)
def test_ids_that_the_embedding_does_not_hold_are_refused(ids: list[int]) -> None:
    tower, _ = split(build_transformer())
    with pytest.raises(CheckpointUnusable, match="embeds ids 0 to 299"):
        tower.run([[1, 2], ids])


@pytest.mark.parametrize("changes", [{}, {"num_hidden_layers": 1}], ids=str)
def test_prompts_that_pass_unit_by_unit_are_those_of_the_forward(changes: dict[str, int]) -> None:
    tower, _ = split(build_transformer(**changes))
    prompts = [[5, 9, 250], [3], [7, 7, 1, 0, 299, 4]]
    order: list[torch.nn.Module] = []

    @contextmanager
    def unit(module: torch.nn.Module) -> Iterator[None]:
        order.append(module)
        yield

    together = tower.run_each(prompts, unit)
    assert order == [tower.embed_tokens, *tower.layers]
    for ids, cache in zip(prompts, together, strict=True):
        alone = tower(torch.tensor([ids]), [len(ids)])
        assert cache.lengths == alone.lengths == (len(ids),)
        assert torch.equal(cache.keys, alone.keys)
        assert torch.equal(cache.values, alone.values)


def test_a_batch_of_the_tower_has_gradients() -> None:
    tower, _ = split(build_transformer())
    cache = tower.run([[1, 2, 3], [4]])
    (cache.keys.sum() + cache.values.sum()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in tower.parameters())
    assert tower.embed_tokens.weight.grad[[1, 2, 3, 4]].any(dim=1).all()


def test_the_family_encodes_by_the_profile(pixel_base: Path, make_model: Callable[..., Model]) -> None:
    lengths = []
    for system_prompt in (True, False):
        model = make_model(system_prompt=system_prompt, resolution_template=False)
        family = load_family(model, str(pixel_base), "cosmos3", torch.device("cpu"))
        lengths.append(family.encoder.encode(["a red seven"])[0].keys.shape[3])  # type: ignore[attr-defined]
    assert lengths[1] == 1 + len("a red seven") + 4
    assert lengths[0] > lengths[1]
