"""Which profiles methods can be compared on: said before any process is started. Imports no torch."""

from __future__ import annotations

from nftctl.errors import Finding, ProfileRefused
from nftctl.learning.splits import Splits, split_prompts
from nftctl.learning.trials import LEAST_TIMES
from nftctl.profile.schema import Profile


def refuse_unfit(profile: Profile) -> Splits:
    """Raise ProfileRefused for a profile that nothing can be compared on; returns its prompts."""
    for refuse in (refuse_full, refuse_times, refuse_providers):
        refuse(profile)
    return split_prompts(profile)


def refuse_full(profile: Profile) -> None:
    """Raise ProfileRefused for a profile that trains all weights."""
    if profile.model.train != "lora":
        message = f"the profile trains {profile.model.train}, and methods are compared on one adapter"
        raise ProfileRefused([Finding("learning-train", "model.train", message, help='set it to "lora"')])


def refuse_times(profile: Profile) -> None:
    """Raise ProfileRefused where a trial could not draw its training times."""
    rl = profile.rl
    low, high = rl.train_t_range
    if rl.timestep_source == "grid" and (rl.sample_steps < LEAST_TIMES or (low, high) != (0.0, 1.0)):
        message = f"trials train on as many as {LEAST_TIMES} of the sampler's times and more, and here are fewer"
        help = 'set rl.timestep_source to "continuous", or take more sampler steps and the whole of train_t_range'
        raise ProfileRefused([Finding("learning-timesteps", "rl.timestep_source", message, help=help)])


def refuse_providers(profile: Profile) -> None:
    """Raise ProfileRefused unless every provider is a packaged scorer and the reward their weighted sum."""
    findings = []
    for section, providers in (("reward", profile.reward.providers), ("eval", profile.eval.providers)):
        for i, provider in enumerate(providers):
            if provider.kind != "embedded":
                message = f"{provider.name} is a service, and here every run scores in its own process"
                help = "take a profile whose providers are all embedded"
                findings.append(Finding("learning-reward", f"{section}.providers.{i}.kind", message, help=help))
    if profile.reward.aggregation != "sum":
        message = f"the reward is {profile.reward.aggregation}, and methods can be compared on a sum alone"
        findings.append(Finding("learning-reward", "reward.aggregation", message, help='set it to "sum"'))
    if findings:
        raise ProfileRefused(findings)
