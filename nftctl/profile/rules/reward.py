"""Who scores training and evaluations, under which pinned revision, and for how long the run waits."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

from nftctl.profile.artifacts import scorer_names
from nftctl.profile.rules.rule import Facts, Problem, Rule
from nftctl.profile.schema import Provider, Reward
from nftctl.profile.sources import PREFIX, SPECIAL

PATHS = ("/v1/score", "/v1/info", "/api/reward/enqueue", "/api/reward/pull", "/api/reward/ping")
"""What clients append themselves, and what people paste."""
TAKEN = ("std", "group_std", "zero_spread_groups", "dropped_groups")
"""Metrics `reward/<name>` of the whole step."""
TAKEN_IN_EVALUATIONS = ("reward", "std", "samples", "kl_distance")
"""Metrics `eval/<name>` of the whole evaluation."""


def _all(facts: Facts) -> Iterator[tuple[str, Provider]]:
    """Providers of the reward, then of evaluations, each under its key: one is held to what the other is held to."""
    for table, providers in (("reward", facts.profile.reward.providers), ("eval", facts.profile.eval.providers)):
        for index, provider in enumerate(providers):
            yield f"{table}.providers.{index}", provider


def _of_kind(facts: Facts, kind: str) -> Iterator[tuple[str, Provider]]:
    return ((key, provider) for key, provider in _all(facts) if provider.kind == kind)


def _missing(facts: Facts) -> Iterator[Problem]:
    if not facts.profile.reward.providers:
        help = "add [[reward.providers]] with name, url and revision"
        yield Problem("reward.providers", "reward.providers is empty: there is no default provider", help)


def _url_missing(facts: Facts) -> Iterator[Problem]:
    for key, provider in _of_kind(facts, "http"):
        if not provider.url.strip():
            message = f'{key}.url is required for provider "{provider.name}"'
            yield Problem(f"{key}.url", message, against=(f"{key}.kind",))


def _url_invalid(facts: Facts) -> Iterator[Problem]:
    for key, provider in _of_kind(facts, "http"):
        fault = _url_fault(provider.url) if provider.url.strip() else ""
        if fault:
            yield Problem(f"{key}.url", f"{key}.url {fault}", "for example http://127.0.0.1:8000")


def _url_fault(url: str) -> str:
    """What is wrong with a base URL. The URL is not repeated: it may hold a password."""
    try:
        parts = urlsplit(url)
        port_is_fine = parts.port is None or parts.port > 0
    except ValueError as error:
        return f"is not a URL: {error}"
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_fine or not url.isprintable():
        return "must be http://host[:port] or https://host[:port]"
    if parts.username is not None or parts.password is not None:
        return "must hold no credentials: it is written to the run folder; the token comes from the environment"
    if parts.query or parts.fragment:
        return "must be a base address, without ? and #"
    if parts.path.rstrip("/").endswith(PATHS):
        return "must be a base address, without the protocol's own path"
    return ""


def _revision(facts: Facts) -> Iterator[Problem]:
    for key, provider in _of_kind(facts, "http"):
        if not provider.revision.strip():
            why = "it is part of the run's identity" if key.startswith("reward") else "other scores would pass for it"
            message = f'{key}.revision is required for provider "{provider.name}": {why}'
            help = "`nftctl reward-ping` shows what the service declares"
            yield Problem(f"{key}.revision", message, help, against=(f"{key}.kind",))


def _scorer(facts: Facts) -> Iterator[Problem]:
    known = scorer_names()
    for key, provider in _of_kind(facts, "embedded"):
        if provider.scorer not in known:
            close = difflib.get_close_matches(provider.scorer, known, n=1)
            help = f"did you mean {close[0]}?" if close else f"packaged: {', '.join(known)}"
            yield Problem(f"{key}.scorer", f'{key}.scorer = "{provider.scorer}" is not a packaged scorer', help)


def _weights(facts: Facts) -> Iterator[Problem]:
    providers = facts.profile.reward.providers
    if providers and all(provider.weight == 0 for provider in providers):
        yield Problem("reward.providers.0.weight", "every provider has weight 0, so there is no reward to learn from")
    judges = facts.profile.eval.providers
    if judges and all(provider.weight == 0 for provider in judges):
        yield Problem("eval.providers.0.weight", "every provider has weight 0, so eval/reward would always be 0")


def _names(facts: Facts) -> Iterator[Problem]:
    profile = facts.profile
    yield from _names_of("reward", profile.reward.providers, TAKEN)
    yield from _names_of("eval", profile.eval.providers, TAKEN_IN_EVALUATIONS)


def _names_of(table: str, providers: Sequence[Provider], taken: Sequence[str]) -> Iterator[Problem]:
    names = [provider.name for provider in providers]
    for index, name in enumerate(names):
        key = f"{table}.providers.{index}.name"
        if not name.strip():
            yield Problem(key, f"{key} must not be empty")
        elif "/" in name:
            yield Problem(key, f'{key} = "{name}" must hold no /: it names metrics, {table}/<name>/<component>')
        elif name in names[:index] or name in taken:
            yield Problem(key, f'{key} = "{name}" is taken: names label metrics and identity')


def _clip(facts: Facts) -> Iterator[Problem]:
    for key, provider in _all(facts):
        if provider.clip is not None and not provider.clip[0] < provider.clip[1]:
            yield Problem(f"{key}.clip", f"{key}.clip must be [low, high] with low < high")


def _token(facts: Facts) -> Iterator[Problem]:
    for key, provider in _all(facts):
        name = provider.token_env
        if name.startswith(PREFIX) and name not in SPECIAL:
            message = f"{key}.token_env names {name}, which is refused in the environment as an unknown variable"
            yield Problem(
                f"{key}.token_env", message, "NFTCTL_REWARD_TOKEN, or a name that does not begin with NFTCTL_"
            )


def _cosmos(facts: Facts) -> Iterator[Problem]:
    for key, provider in _all(facts):
        cosmos = provider.protocol == "cosmos-rl"
        if cosmos and provider.kind != "http":
            yield Problem(f"{key}.protocol", f'{key}.protocol = "cosmos-rl" is for a running service: kind = "http"')
        for field in ("reward_fn", "score_key"):
            if getattr(provider, field) and not cosmos:
                message = f'{key}.{field} means something to protocol = "cosmos-rl" only'
                yield Problem(f"{key}.{field}", message, f"remove it, or set {key}.protocol")
        parts = [part.strip() for part in provider.score_key.split("+")]
        if cosmos and provider.score_key and (not all(parts) or len(set(parts)) < len(parts)):
            yield Problem(f"{key}.score_key", f"{key}.score_key must be one key, or different keys joined by +")


def _kind(facts: Facts) -> Iterator[Problem]:
    for key, provider in _all(facts):
        if provider.kind == "embedded" and provider.url:
            message = f'{key}.url means something to kind = "http" only: the packaged scorer would be used instead'
            help = f'set {key}.kind = "http", or remove the url'
            yield Problem(f"{key}.url", message, help, against=(f"{key}.kind",))
        if provider.kind == "http" and provider.scorer:
            message = f'{key}.scorer means something to kind = "embedded" only: the service at the url would be used'
            help = f'set {key}.kind = "embedded", or remove the scorer'
            yield Problem(f"{key}.scorer", message, help, against=(f"{key}.kind",))


def _aggregation(facts: Facts) -> Iterator[Problem]:
    if facts.profile.reward.aggregation == "gdpo" and facts.profile.rl.advantage_std == "global":
        message = (
            'rl.advantage_std = "global" is for reward.aggregation = "sum": gdpo normalises by group, then by step'
        )
        yield Problem("rl.advantage_std", message, "remove one of the two")


def _encoding(facts: Facts) -> Iterator[Problem]:
    reward = facts.profile.reward
    # By value, not by origin: in the profile that a run wrote down nothing is left to a default.
    if reward.encoding != "jpeg" and reward.jpeg_quality != Reward().jpeg_quality:
        yield Problem("reward.jpeg_quality", 'reward.jpeg_quality has no effect without reward.encoding = "jpeg"')
    protocols = {provider.protocol for _, provider in _all(facts)}
    if reward.encoding != "png" and protocols == {"cosmos-rl"}:
        message = "reward.encoding has no effect: cosmos-rl sends pixels as they are"
        yield Problem("reward.encoding", message)


def _unused(facts: Facts) -> Iterator[Problem]:
    if facts.profile.eval.providers and not facts.profile.eval.prompt_file:
        message = "there are no held-out prompts, so eval.providers are never asked"
        yield Problem("eval.providers", message, "set eval.prompt_file, or remove eval.providers")


def _deadline(facts: Facts) -> Iterator[Problem]:
    deadline, timeout = facts.profile.reward.deadline_s, facts.profile.grid.collective_timeout_s
    if deadline >= timeout:
        message = f"reward.deadline_s = {deadline:g} must be below grid.collective_timeout_s = {timeout:g}: "
        message += "else a late reward is reported as a lost rank"
        yield Problem("reward.deadline_s", message)


RULES = (
    Rule("reward-missing", "There is no default reward.", _missing),
    Rule("reward-url-missing", "A service is reached by its URL.", _url_missing),
    Rule("reward-url-invalid", "A URL is a plain base address without secrets.", _url_invalid),
    Rule("reward-revision-missing", "The provider's revision is part of the run's identity.", _revision),
    Rule("reward-scorer-unknown", "An embedded provider is a packaged scorer.", _scorer),
    Rule("reward-weights", "At least one score counts.", _weights),
    Rule("reward-names", "Provider names tell metrics apart.", _names),
    Rule("reward-clip", "Bounds are in order.", _clip),
    Rule("reward-token", "The token's variable can be set.", _token),
    Rule("reward-cosmos", "Every key of a provider means something to its protocol.", _cosmos),
    Rule("reward-kind", "A provider is a service or a packaged scorer, never half of each.", _kind),
    Rule("reward-aggregation", "A normalisation that is asked for is applied.", _aggregation),
    Rule("reward-encoding", "An encoding that is asked for is used.", _encoding, "warning"),
    Rule("eval-providers-unused", "Who is named to score evaluations has something to score.", _unused, "warning"),
    Rule("grid-timeout", "A late reward is reported as such, not as a lost rank.", _deadline),
)
