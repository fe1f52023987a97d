"""`nftctl init`: a commented profile to start from, on top of a bundled one.

The text is written by hand below; only values are filled in. A value that the bundled profile leaves to the operator
stands there to be filled in; every other line is a comment that shows the value in force, so that a new profile means
exactly what the bundled one means. Refuses to overwrite anything.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nftctl.cli.console import Console, show
from nftctl.cli.profiles import find_bundled
from nftctl.errors import UsageRefused

STARTER = """\
# A run of nftctl, on top of the bundled profile that `extends` names. To see that one:
# `nftctl profiles {name}`.
#
# A line such as `# key = value` shows the value in force: take the `#` away and change it. These are the keys that are
# changed most; `nftctl validate {file} --show-resolved` shows all of them and where each value comes from.
# For completion in an editor: `nftctl profiles --schema > profile.schema.json`, and `#:schema ./profile.schema.json`
# as the first line of this file.

extends = "{name}"

[job]
name = {job.name}  # of the run and its folder; empty: this file's name, date and time

[rl]
init_from = {rl.init_from}  # base weights: a folder in diffusers layout, or "embedded"
max_steps = {rl.max_steps}  # rollouts in total; launch --steps N overrides it
group_size = {rl.group_size}  # samples per prompt, and the number of ranks
seed = {rl.seed}  # root of every random number
beta = {rl.beta}  # sharpness of the implicit velocities
kl_beta = {rl.kl_beta}  # pull towards the base; 0: none, and no reference forward
guidance = {rl.guidance}  # 1: conditional only; 0: unconditional
sample_steps = {rl.sample_steps}  # sampler steps per image

[rl.old]
update_every = {rl.old.update_every}  # refresh of the moving old policy, in optimizer steps
decay = {rl.old.decay}  # share of the old weights kept: "copy", "linear", "delayed", "constant"

[model]
vae = {model.vae}  # folder of the VAE, where the base needs one
height = {model.height}  # pixels
width = {model.width}

[model.lora]
rank = {model.lora.rank}
alpha = {model.lora.alpha}  # the update is multiplied by alpha / rank

[data]
prompt_file = {data.prompt_file}  # .txt: a prompt a line; .jsonl: prompt, reward_prompt, metadata; or "embedded"
rows_per_step = {data.rows_per_step}  # prompts per step; every rank makes one sample of each

# Who scores. An array replaces the bundled one as a whole; `nftctl reward-ping {file}` asks each service.
[[reward.providers]]
name = {reward.providers.0.name}  # label in metrics
kind = {reward.providers.0.kind}  # "http": a running service; "embedded": a packaged scorer
url = {reward.providers.0.url}  # its base URL, without a token in it
revision = {reward.providers.0.revision}  # what it declares; pinned, part of the run's identity
scorer = {reward.providers.0.scorer}  # name of the packaged scorer

[optimizer]
lr = {optimizer.lr}
grad_clip = {optimizer.grad_clip}  # largest global gradient norm

[checkpoint]
every = {checkpoint.every}  # steps between checkpoints; 0: only at the end
keep_last = {checkpoint.keep_last}

[eval]
prompt_file = {eval.prompt_file}  # held-out prompts, or "embedded"; empty: no evaluation
"""

COMMENT_COLUMN = 34
ARRAY = "reward.providers"

_VALUE = re.compile(r"(?P<name>\w+) = \{(?P<key>[\w.]+)\}(?P<comment>  # .*)?")


def init(target: Path, base: str, *, json: bool) -> None:
    """Write a starter profile to `target`, a new `.toml` file. Raises UsageRefused, and then nothing was written."""
    from nftctl.profile.diagnose import printable

    console = Console(json=json)
    name = printable(shlex.quote(str(target)))
    text = starter(base, name)
    try:
        _write_new(target, text)
    except FileExistsError:
        other = shlex.quote(str(target.with_name(f"{target.stem}-2.toml")))
        hint = f"nftctl init {other}, or move the old file away"
        raise UsageRefused(f"{name} is there already and is never overwritten", hint=hint) from None
    except OSError as error:
        raise UsageRefused(f"{name} cannot be written: {error.strerror}", hint="give another PATH") from None
    fill_in = [key for key in _lacking(base) if f"{{{key}}}" in STARTER]
    if fill_in:
        console.say(f"yours to fill in: {', '.join(fill_in)}")
    console.say(f"next: nftctl validate {name} && nftctl launch {name}")
    console.data(str(target))
    console.result("init", path=printable(str(target)), extends=base, fill_in=fill_in)


def _write_new(target: Path, text: str) -> None:
    if target.is_dir():
        inside = shlex.quote(str(target / "profile.toml"))
        raise UsageRefused(f"{target} is a folder", hint=f"name the file: nftctl init {inside}")
    if target.suffix != ".toml":
        meant = shlex.quote(f"{target}.toml")
        raise UsageRefused(f'the name of a profile ends in .toml, got "{target}"', hint=f"nftctl init {meant}")
    with target.open("x", encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
        except OSError:
            target.unlink()  # half of it would stand in the way of the next try
            raise


def starter(base: str, file: str) -> str:
    """The text of a profile that extends the bundled profile `base`. Raises UsageRefused if there is no such name."""
    from nftctl.profile.load import load_profile

    dump = load_profile(find_bundled(base), env={}).profile.model_dump()
    text = STARTER.replace("{name}", base).replace("{file}", file)
    return "\n".join(_lines(text, dump, _lacking(base))) + "\n"


def _lacking(base: str) -> list[str]:
    """Keys that the bundled profile leaves empty for the operator: preflight refuses it until they are filled in."""
    from nftctl.profile.load import load_profile
    from nftctl.profile.preflight import check

    resolved = load_profile(find_bundled(base), env={})
    dump = resolved.profile.model_dump()
    return [f.key for f in check(resolved) if f.severity == "error" and _value(dump, f.key) == ""]


def _lines(text: str, dump: Mapping[str, Any], lacking: Sequence[str]) -> Iterator[str]:
    array_is_ours = any(key.startswith(ARRAY) for key in lacking)
    for line in text.splitlines():
        found = _VALUE.fullmatch(line)
        if found is None:
            yield f"# {line}" if line == f"[[{ARRAY}]]" and not array_is_ours else line
            continue
        key = found["key"]
        value, in_array = _value(dump, key), key.startswith(ARRAY)
        if in_array and value == "" and key not in lacking:
            continue  # belongs to the other kind of provider
        active = array_is_ours if in_array else key in lacking
        setting = f"{'' if active else '# '}{found['name']} = {show(value)}"
        yield f"{setting.ljust(COMMENT_COLUMN)}{found['comment']}" if found["comment"] else setting


def _value(dump: Mapping[str, Any], key: str) -> Any:
    here: Any = dump
    for step in key.split("."):
        here = here[int(step)] if isinstance(here, list) else here[step]
    return here
