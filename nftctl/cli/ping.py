"""`nftctl reward-ping`: is every reward service there, is it the right one, how fast is it, and can it score an image.

Owns which services are asked, those of training and of evaluations, and what is said about them. All are asked, also
when one has failed; a failure names URL, phase and time, and ends the command with exit code 4. An embedded scorer is
started here as a run would start it.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from nftctl.cli.console import Console, table
from nftctl.cli.probe import Step, Wishes, probe
from nftctl.errors import ExitCode, ProfileRefused, RewardFailed, UsageRefused

if TYPE_CHECKING:
    from nftctl.profile.load import Resolved
    from nftctl.profile.schema import Profile, Provider, Reward

PROTOCOLS = ("nftctl-reward/1", "cosmos-rl")
SECTIONS = {"reward": "training", "eval": "evaluations"}
"""Section of a profile -> who asks the services that it names."""


@dataclass(frozen=True, slots=True)
class Address:
    """A service that no profile names."""

    url: str | None = None
    revision: str | None = None
    protocol: str | None = None
    reward_fn: str | None = None
    score_key: str | None = None


def ping(argument: str | None, address: Address, wishes: Wishes, *, json: bool) -> None:
    """Ask every service of a profile, or the one at an address; exit code 4 when one of them failed."""
    console = Console(json=json)
    if address.url is None:
        _only_with_url(address)
        profile, steps = _from_profile(console, argument)
    elif argument is not None:
        raise UsageRefused("give a profile or --url, not both")
    else:
        profile, steps = _from_address(address), {}
    answers, failures = [], []
    asked = _asked(profile)
    apart = any("eval" in sections for _, sections in asked)
    for provider, sections in asked:
        of = {"sections": sections} if steps else {}
        try:
            answers.append(of | _ask(console, provider, profile, steps.get(sections[0]), wishes))
        except RewardFailed as failure:
            failures.append({"message": failure.message, "hint": failure.hint})
            error = {"name": provider.name, "url": provider.url or None, "ok": False, "error": failures[-1]}
            answers.append(of | error)
            console.error(failure.message, failure.hint)
        for line in _lines(answers[-1], profile.reward, apart=apart):
            console.data(line)
    if not failures:
        console.result("reward-ping", services=answers)
        return
    console.result("reward-ping", exit_code=ExitCode.REWARD, services=answers, error=failures[0])
    raise typer.Exit(ExitCode.REWARD)


def _asked(profile: Profile) -> list[tuple[Provider, list[str]]]:
    """Each service of the profile, with the sections that name it."""
    found = [(provider, ["reward"]) for provider in profile.reward.providers]
    for judge in profile.eval.providers if profile.eval.prompt_file else []:
        known = next((sections for provider, sections in found if _service(provider) == _service(judge)), None)
        if known is None:
            found.append((judge, ["eval"]))
        elif "eval" not in known:
            known.append("eval")
    return found


def _service(provider: Provider) -> dict[str, Any]:
    """What a provider says of the service itself: not how its scores are called and weighed."""
    name = provider.name if provider.protocol == "cosmos-rl" else ""
    own = provider.model_dump(exclude={"name", "weight", "scale", "clip"})
    return own | {"reward_fn": own["reward_fn"] or name, "score_key": own["score_key"] or name}


def _only_with_url(address: Address) -> None:
    given = {"--revision": address.revision, "--protocol": address.protocol, "--reward-fn": address.reward_fn,
             "--score-key": address.score_key}  # fmt: skip
    for option, value in given.items():
        if value is not None:
            raise UsageRefused(f"{option} belongs to --url", hint="a profile pins and names all that itself")


def _from_address(address: Address) -> Profile:
    """A profile with nothing but the service at `address`."""
    from nftctl.profile.schema import Profile, Provider, Reward

    protocol = address.protocol or PROTOCOLS[0]
    if protocol not in PROTOCOLS:
        raise UsageRefused(f"--protocol {protocol!r} is not one of {', '.join(PROTOCOLS)}")
    if protocol == "cosmos-rl" and not address.reward_fn:
        raise UsageRefused("--protocol cosmos-rl needs --reward-fn, the name of what the service is to run")
    if protocol != "cosmos-rl" and (address.reward_fn or address.score_key):
        raise UsageRefused("--reward-fn and --score-key belong to --protocol cosmos-rl")
    provider = Provider(
        name=address.reward_fn or "service",
        protocol=protocol,  # type: ignore[arg-type]
        url=address.url or "",
        revision=address.revision or "",
        reward_fn=address.reward_fn or "",
        score_key=address.score_key or "",
    )
    return Profile(reward=Reward(providers=[provider]))


def _from_profile(console: Console, argument: str | None) -> tuple[Profile, dict[str, Step]]:
    """A profile of which only what concerns its rewards has to be right, and what its sections send."""
    from nftctl.profile.load import find_profile, load_profile
    from nftctl.profile.preflight import check

    path, which = find_profile(argument, os.environ, Path.cwd())
    console.say(which)
    resolved = load_profile(path)
    findings = [f for f in check(resolved) if f.severity == "error" and f.key.startswith(("reward", "eval.providers"))]
    if findings:
        raise ProfileRefused(findings)
    if not resolved.profile.reward.providers:
        raise UsageRefused(f"{resolved.name} has no reward provider", hint="ask a service with --url")
    files = resolved.profile.data.prompt_file, resolved.profile.eval.prompt_file
    return resolved.profile, {"reward": _step(resolved, files[0], "train"), "eval": _step(resolved, files[1], "test")}


def _step(resolved: Resolved, prompts: str, split: Literal["train", "test"]) -> Step:
    """The images of the profile's steps, with the first of these prompts, where there is one."""
    from nftctl.profile.prompts import read_prompts, resolve_prompt_file

    profile = resolved.profile
    model = profile.model
    step = Step(height=model.height, width=model.width, rows=profile.data.rows_per_step, ranks=profile.ranks)
    try:
        first = read_prompts(resolve_prompt_file(prompts, split))[0]
    except ProfileRefused:
        return step
    return replace(step, prompt=first.reward_text, metadata=first.metadata)


def _ask(console: Console, provider: Provider, profile: Profile, step: Step | None, wishes: Wishes) -> dict[str, Any]:
    token = os.environ.get(provider.token_env, "")
    if provider.kind == "http":
        return asyncio.run(probe(provider, profile.reward, provider.url, provider.revision, token, step, wishes))
    console.say(f"{provider.name}: embedded, a run starts {provider.scorer} itself; starting one to ask it")
    with _embedded(provider, profile) as (url, revision):
        return asyncio.run(probe(provider, profile.reward, url, revision, token, step, wishes))


@contextmanager
def _embedded(provider: Provider, profile: Profile) -> Iterator[tuple[str, str]]:
    """A packaged scorer as a process of its own for the time of the block; yields its URL and revision."""
    from nftctl.engine import services
    from nftctl.reward.scorers import scorer_revision

    revision = provider.revision or scorer_revision(provider.scorer)
    alone = profile.model_copy(update={"reward": profile.reward.model_copy(update={"providers": [provider]})})
    with tempfile.TemporaryDirectory(prefix="nftctl-ping-") as logs, ExitStack() as stack:
        try:
            started = stack.enter_context(services.embedded(alone, {provider.name: revision}, Path(logs)))
        except RewardFailed as failure:
            # The log goes with its folder, so what it ends with has to be said now.
            lines = [line for log in Path(logs).iterdir() for line in log.read_text().splitlines()]
            raise RewardFailed(failure.message.partition("; see")[0], hint="\n".join(lines[-1:])) from None
        yield started[provider.name].endpoint.url, revision


def _lines(answer: dict[str, Any], reward: Reward, *, apart: bool = False) -> Sequence[str]:
    """The answer for people; `apart` says who asks the service, where not all are asked by all."""
    of = " and ".join(SECTIONS[section] for section in answer["sections"]) if apart else ""
    if not answer["ok"]:
        return [f"{answer['name']}{f' ({of})' if of else ''}: failed"]
    latency, toy, load = answer["latency_ms"], answer["toy"], answer["load"]
    times = f"p50 {latency['p50']} ms, p95 {latency['p95']} ms, max {latency['max']} ms over {latency['count']}"
    rows = [
        (answer["name"], f"{answer['url']} ({answer['service']}, {answer['protocol']})"),
        *([("  asked by", of)] if of else []),
        ("  revision", _revision(answer["revision"])),
        ("  latency", times),
        ("  toy image", f"score {toy['score']:.4f} for {toy['prompt']!r}"),
    ]
    if load:
        size = f"{load['images']} images of {load['width']}x{load['height']} from {load['ranks']} ranks"
        speed = f"{load['seconds']:.2f} s, {load['images_per_second']:.4g} images/s; the deadline is"
        rows.append(("  load", f"{size} in {speed} {reward.deadline_s:g} s"))
    return table(rows)


def _revision(revision: dict[str, str | None]) -> str:
    if revision["served"] is None:
        return f"{revision['pinned'] or 'not pinned'} (declared by the profile; the protocol has none)"
    return f"{revision['served']} ({'as pinned' if revision['pinned'] else 'not pinned'})"
