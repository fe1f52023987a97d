"""The objective, its schedule and the sampler: values that exclude or mislead one another."""

from __future__ import annotations

from collections.abc import Iterator

from nftctl.profile.rules.rule import Facts, Problem, Rule

TIME_FLOOR = 1e-3
"""Continuous training times are kept this far from 0 and from 1 when they are drawn."""
DELAYED_UNTIL = 75
"""Optimizer step through which the `delayed` law keeps no old weights."""

_LARGEST_SIGMA = 1 - 1e-6
_MOST_SIGMAS = 10_000  # more than any contract allows; keeps a mistyped number of steps from costing time


def _sampler(facts: Facts) -> Iterator[Problem]:
    found = facts.profile.rl.scheduler_type
    if found != "unipc":
        yield Problem("rl.scheduler_type", f'rl.scheduler_type must be "unipc", got "{found}"')


def _cadence(facts: Facts) -> Iterator[Problem]:
    old, updates = facts.profile.rl.old, facts.profile.rl.updates_per_rollout
    key = "rl.old.update_every"
    if not old.build_old:
        return
    if old.update_every is None:
        message = f"{key} is required while rl.old.build_old is true: it has no default"
        yield Problem(key, message, f"{key} = {updates} refreshes the old policy after every rollout")
    elif old.update_every < 1:
        yield Problem(key, f"{key} must be at least 1, got {old.update_every}: a moving old policy moves")
    elif old.update_every % updates:
        message = f"{key} must be a multiple of rl.updates_per_rollout = {updates}, got {old.update_every}"
        yield Problem(key, message)


def _flat(facts: Facts) -> Iterator[Problem]:
    rl = facts.profile.rl
    steps = (rl.max_steps or 0) * rl.updates_per_rollout
    if rl.old.build_old and rl.old.decay == "delayed" and 0 < steps <= DELAYED_UNTIL:
        message = f'rl.old.decay = "delayed" keeps no old weights until optimizer step {DELAYED_UNTIL}, '
        message += f'and this run ends at {steps}: it is "copy" throughout'
        yield Problem("rl.old.decay", message, 'raise rl.max_steps, or say what happens: rl.old.decay = "copy"')


def _reference(facts: Facts) -> Iterator[Problem]:
    found = facts.profile.rl.ref.update_every
    if found != 0:
        yield Problem("rl.ref.update_every", f"rl.ref.update_every must be 0, got {found}: the reference is frozen")


def _average(facts: Facts) -> Iterator[Problem]:
    if facts.profile.eval.weights == "ema" and facts.profile.rl.ema_decay == 0:
        message = 'eval.weights = "ema", and this run keeps no average of the policy'
        yield Problem("eval.weights", message, "rl.ema_decay = 0.9 keeps one")


def _bounds(facts: Facts) -> Iterator[Problem]:
    rl = facts.profile.rl
    if not rl.advantage_low < 0:
        yield Problem("rl.advantage_low", f"rl.advantage_low must be below 0, got {rl.advantage_low:g}")
    if not rl.advantage_high > 0:
        yield Problem("rl.advantage_high", f"rl.advantage_high must be above 0, got {rl.advantage_high:g}")


def _timesteps(facts: Facts) -> Iterator[Problem]:
    rl = facts.profile.rl
    low, high = rl.train_t_range
    if not 0.0 <= low < high <= 1.0:
        message = f"rl.train_t_range must be [low, high] with 0 <= low < high <= 1, got [{low:g}, {high:g}]"
        yield Problem("rl.train_t_range", message)
    elif rl.timestep_source == "grid":
        there = sum(low <= sigma <= high for sigma in sigmas(min(rl.sample_steps, _MOST_SIGMAS), rl.sampler_shift))
        if rl.timesteps_per_sample > there:
            message = f"rl.timesteps_per_sample = {rl.timesteps_per_sample} asks for more than the {there} sigmas "
            help = "raise rl.sample_steps, or widen rl.train_t_range" if there < rl.sample_steps else ""
            yield Problem("rl.timesteps_per_sample", message + "that the grid has, drawn without replacement", help)
    elif not max(low, TIME_FLOOR) < min(high, 1 - TIME_FLOOR):
        message = f"rl.train_t_range = [{low:g}, {high:g}] is empty once both ends are kept {TIME_FLOOR:g} from 0 and 1"
        yield Problem("rl.train_t_range", message)
    if rl.timestep_source == "grid" and rl.uniform_timestep:
        message = 'rl.uniform_timestep excludes rl.timestep_source = "grid": timesteps follow one law'
        yield Problem("rl.uniform_timestep", message, 'rl.timestep_source = "continuous" draws uniformly')


def sigmas(steps: int, shift: float) -> list[float]:
    """The rollout's noise levels: s u / (1 + (s - 1) u), u from 1 towards 1/1000 in `steps` steps, end left out.

    Written as s u / (s u + (1 - u)), which is the same and has no zero below the line for any s > 0.
    """
    times = (1.0 - (1.0 - 1e-3) * i / steps for i in range(steps))
    return [min(shift * u / (shift * u + (1.0 - u)), _LARGEST_SIGMA) for u in times]


def _max_steps(facts: Facts) -> Iterator[Problem]:
    found = facts.profile.rl.max_steps
    if found is None:
        help = "set it in the profile, or give --steps to launch"
        yield Problem("rl.max_steps", "rl.max_steps is required: it has no default", help)
    elif found < 1:
        yield Problem("rl.max_steps", f"rl.max_steps must be at least 1, got {found}")


def _betas(facts: Facts) -> Iterator[Problem]:
    betas = facts.profile.optimizer.betas
    if not all(0.0 <= beta < 1.0 for beta in betas):
        message = f"optimizer.betas must lie in [0, 1), got [{', '.join(f'{beta:g}' for beta in betas)}]"
        yield Problem("optimizer.betas", message)


def _guidance(facts: Facts) -> Iterator[Problem]:
    for key, value in (("rl.guidance", facts.profile.rl.guidance), ("eval.guidance", facts.profile.eval.guidance)):
        if value == 0:
            message = f"{key} = 0 samples without the prompt: guidance is v_uncond + g (v_cond - v_uncond)"
            yield Problem(key, message, f"{key} = 1 turns guidance off and keeps the prompt")


def _tau(facts: Facts) -> Iterator[Problem]:
    rl = facts.profile.rl
    steepness = rl.advantage_high / 2
    if rl.r_map == "sigmoid" and 0 < rl.r_tau < steepness:
        factor = steepness / rl.r_tau
        message = f"rl.r_tau = {rl.r_tau:g} makes the sigmoid map {factor:g} times as steep at 0 as the linear map"
        yield Problem("rl.r_tau", message, f"rl.r_tau = {steepness:g} has the same slope")


RULES = (
    Rule("sampler-type", "UniPC is the one sampler of this algorithm.", _sampler),
    Rule("moving-old-cadence", "A moving old policy is refreshed between rollouts.", _cadence),
    Rule("reference-not-frozen", "The reference never moves.", _reference),
    Rule("advantage-bounds", "The clamp leaves room on both sides of zero.", _bounds),
    Rule("timestep-law", "Training timesteps follow one law, and the grid has enough of them.", _timesteps),
    Rule("ema-missing", "An average of the policy is there to be evaluated.", _average),
    Rule("max-steps-missing", "A run has an end.", _max_steps),
    Rule("optimizer-betas", "Moment decays lie in [0, 1).", _betas),
    Rule("old-decay-flat", "A delayed law that never sets in is another law.", _flat, "warning"),
    Rule("guidance-zero", "Guidance 0 is unconditional, not off.", _guidance, "warning"),
    Rule("sigmoid-tau", "A small temperature multiplies the gradients of small advantages.", _tau, "warning"),
)
