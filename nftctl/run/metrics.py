"""What every number of metrics.jsonl and evaluations.jsonl means, in what unit, how it should look, and what if not.

The one table of names: docs/metrics.md is generated from it, and a run that writes a number which it does not know
fails the tests. `<provider>` and `<component>` stand for names from the profile and from services.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

STEPS = "metrics.jsonl"
EVALUATIONS = "evaluations.jsonl"


@dataclass(frozen=True)
class Metric:
    """One name, or a pattern of names.

    unit        empty for a plain number
    healthy     what it looks like in a run that learns; empty where that depends on the profile alone
    otherwise   what to look at or to change when it does not
    """

    name: str
    meaning: str
    unit: str = ""
    healthy: str = ""
    otherwise: str = ""
    file: str = STEPS

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches the names that it stands for."""
        return re.compile(re.sub(r"<\w+>", "[^/]+", re.escape(self.name)))

    @property
    def group(self) -> str:
        """The part before the first slash: `train`, `reward`, ...; empty for the step itself."""
        return self.name.partition("/")[0] if "/" in self.name else ""


_LR = "lower `optimizer.lr`, and go on from a checkpoint before it"
_LOOK = "look at `samples/`; raise `rl.kl_beta` or lower `optimizer.lr`"
_SERVICE = "see the service's own log and `nftctl reward-ping --load`"

METRICS: tuple[Metric, ...] = (
    Metric("step", "Rollouts done since the run's birth, this one included.", "rollouts"),
    # -- training
    Metric(
        "train/reward_mean",
        "Mean reward of the step's samples, over groups that have all their scores.",
        "reward",
        "rises over tens of steps; single steps differ by their prompts",
        "compare `eval/reward`, whose prompts and noise are fixed; if that does not rise either, see "
        "`reward/group_std`, `policy/distance` and `optimizer.lr`",
    ),
    Metric(
        "train/loss",
        "`train/policy_loss` + `train/kl_loss`: what the gradient is of.",
        "",
        "steady; it is not what is improved, and need not fall",
        _LR,
    ),
    Metric(
        "train/policy_loss",
        "NFT loss over all (sample, timestep) pairs, times `rl.policy_loss_scale`. Both branches are normalised by "
        "their own error, so it measures no progress.",
        "",
        "within a few tenths of where it began",
        _LR,
    ),
    Metric(
        "train/kl_loss",
        "`rl.kl_beta` times the mean squared distance of the policy's velocity to the reference's.",
        "",
        "0 without `rl.kl_beta`; else grows slowly, well below the policy loss",
        "raise `rl.kl_beta`, or lower `optimizer.lr`",
    ),
    Metric(
        "train/positive_error",
        "Mean absolute error of x0, of the positive branch before its floor.",
        "latent units",
        "near `train/negative_error`, and of the size it had at step 1",
        _LR,
    ),
    Metric(
        "train/negative_error",
        "The same of the negative branch.",
        "latent units",
        "near `train/positive_error`, and equal to it where old is the policy",
        "far above it: the policy has run away from old; see `train/old_gap`",
    ),
    Metric(
        "train/old_gap",
        "Mean squared distance of the policy's velocity to old's.",
        "",
        "exactly 0 where old was just copied from the policy; else small and above 0",
        "0 for many steps with a blended old: see `rl.old`; growing without end: refresh old more, or lower "
        "`optimizer.lr`",
    ),
    Metric(
        "train/grad_norm",
        "Norm of the gradient over all ranks before it is clipped, mean over the step's optimizer steps.",
        "",
        "within some factor of its running median; above `optimizer.grad_clip` it is clipped",
        "ten times the usual: " + _LR,
    ),
    Metric("train/lr", "Learning rate of the step's last optimizer step, warm-up included.", "", "as the profile says"),
    Metric(
        "train/advantage_mean",
        "Mean advantage after the clamp.",
        "",
        "near 0",
        "far from 0: the bounds clamp one side; see the two shares below",
    ),
    Metric(
        "train/advantage_clamped_low",
        "Share of samples whose advantage is below `rl.advantage_low`.",
        "share",
        "below a tenth; together with the other below a half",
        "widen `rl.advantage_low` and `rl.advantage_high`",
    ),
    Metric(
        "train/advantage_clamped_high",
        "Share of samples whose advantage is above `rl.advantage_high`.",
        "share",
        "below a tenth; together with the other below a half",
        "widen `rl.advantage_low` and `rl.advantage_high`",
    ),
    Metric(
        "train/optimality_mean",
        "Mean r, the weight of the positive branch.",
        "share",
        "near 0.5",
        "see `train/advantage_mean`",
    ),
    Metric(
        "train/optimality_second_moment",
        "Mean r². 0.25 says that every sample counts as neither good nor bad.",
        "share",
        "above 0.25",
        "exactly 0.25: no group has a spread of rewards; see `reward/zero_spread_groups`",
    ),
    # -- weights
    Metric(
        "policy/distance",
        "How far the adapted weights are from the reference's, relative to those. Absent where no reference is kept.",
        "share",
        "grows slowly from 0",
        "does not move: raise `optimizer.lr`, see `model.lora.targets`; leaps: " + _LR,
    ),
    Metric(
        "old/share",
        "Share of itself that old kept at this step's refresh; 1 when it was not refreshed, 0 when it was copied.",
        "share",
        "as `rl.old.decay` has it",
    ),
    Metric("old/refreshes", "Refreshes of old since the run's birth.", "refreshes", "grows with every refresh due"),
    Metric(
        "old/version",
        "Optimizer steps of the policy that old was last refreshed from.",
        "optimizer steps",
        "follows the policy",
        "stands still: see `rl.old.update_every`",
    ),
    Metric(
        "old/age",
        "Optimizer steps since old was last refreshed.",
        "optimizer steps",
        "below `rl.old.update_every`",
        "grows without end: old is never refreshed; see `rl.old`",
    ),
    Metric(
        "forwards/planned",
        "Denoiser rows that this step must cost a rank: a guided velocity is two.",
        "rows",
        "equal to `forwards/executed`",
        "a difference is a fault of nftctl: please report it",
    ),
    Metric("forwards/executed", "Denoiser rows that it did cost.", "rows", "equal to `forwards/planned`"),
    Metric(
        "forwards/skipped",
        "Denoiser rows that were left out in training, where old is the policy or the penalty has no weight.",
        "rows",
        "the more, the cheaper the step; results are the same to the bit",
    ),
    # -- rewards
    Metric(
        "reward/std",
        "Standard deviation of the reward over all samples of the step.",
        "reward",
        "above 0",
        "0: the scorer says the same of every image",
    ),
    Metric(
        "reward/group_std",
        "Mean over groups of the standard deviation within a group: what there is to learn from.",
        "reward",
        "above 0, and not much below `reward/std`",
        "near 0: samples of one prompt hardly differ; take prompts of middling difficulty, or a finer scorer",
    ),
    Metric(
        "reward/zero_spread_groups",
        "Groups whose samples all have one reward; they teach nothing.",
        "groups",
        "few of `data.rows_per_step`",
        "prompts that are always or never right teach nothing: change them, or the scorer",
    ),
    Metric(
        "reward/dropped_groups",
        "Groups left out because a score failed (`reward.on_failure`).",
        "groups",
        "0",
        _SERVICE,
    ),
    Metric(
        "reward/<provider>",
        "Mean raw score of a provider, before scale, clip and weight.",
        "score",
        "rises with the reward, if it has a weight",
        "falls while others rise: the weights trade it away; raise `reward.providers.0.weight` of that one",
    ),
    Metric("reward/<provider>/std", "Standard deviation of its scores over all samples.", "score", "above 0"),
    Metric(
        "reward/<provider>/group_std",
        "Mean standard deviation of its scores within a group.",
        "score",
        "above 0",
        "0: it does not tell samples of one prompt apart",
    ),
    Metric("reward/<provider>/failures", "Samples that it failed to score.", "samples", "0", _SERVICE),
    Metric(
        "reward/<provider>/<component>",
        "Mean of a component that the service reports beside its score. `judge` is one that nothing is trained on.",
        "",
        "a judge rises with the reward",
        "a judge that falls while the reward rises: reward hacking; " + _LOOK,
    ),
    # -- images
    Metric(
        "images/saturation",
        "Share of channel values at an end of their range, over the step's samples.",
        "share",
        "near where it began; 0.15 more is an alarm",
        _LOOK,
    ),
    Metric(
        "images/high_frequency",
        "Fine detail: root mean square of what 2x2 squares lose when each is evened out.",
        "of the range",
        "between half and twice of where it began",
        "grain or blur: " + _LOOK,
    ),
    Metric(
        "images/diversity",
        "Mean distance between thumbnails of samples of one prompt.",
        "of the range",
        "above half of where it began",
        "samples grow alike: " + _LOOK,
    ),
    # -- time
    Metric("timer/step", "The whole step, without checkpoints and looks.", "s", "steady"),
    Metric("timer/sample", "Sampling and decoding; images go to the scorers meanwhile.", "s", "most of a step"),
    Metric("timer/prepare", "What training needs and rewards are not needed for, while scores come.", "s"),
    Metric(
        "timer/reward_exposed",
        "Waiting for scores after everything else was done.",
        "s",
        "near 0: scoring hides behind sampling",
        "a faster service, or more workers of it (`nftctl reward-serve --workers`)",
    ),
    Metric("timer/train", "Forward, backward and optimizer steps.", "s"),
    Metric(
        "timer/reward/<provider>",
        "The slowest score of a provider in the step.",
        "s",
        "far below `reward.deadline_s`",
        _SERVICE,
    ),
    Metric(
        "timer/samples_per_second_per_rank",
        "Samples that a rank made, by the time of the whole step.",
        "samples/s",
        "steady",
    ),
    # -- machines
    Metric("system/reward_requests", "Requests to reward services since this attempt began, all ranks.", "requests"),
    Metric(
        "system/reward_retries",
        "Requests that were repeated, all ranks.",
        "requests",
        "few, and not rising with every step",
        _SERVICE,
    ),
    Metric("system/reward_images", "Images sent to reward services, all ranks.", "images"),
    Metric(
        "system/gpu_peak_sample_gb",
        "Most GPU memory that tensors took in sampling, largest rank. GPUs only.",
        "GB",
        "steady, below the GPU's size",
        "`model.decode_slicing`, a smaller `model.rollout_micro_batch`, or more sharding",
    ),
    Metric(
        "system/gpu_peak_train_gb",
        "The same in training. GPUs only.",
        "GB",
        "steady, below the GPU's size",
        "a smaller `model.train_micro_batch`, `model.gradient_checkpointing`, or more sharding",
    ),
    Metric(
        "system/rss_peak_gb",
        "Most memory that a rank's process has taken so far, largest rank.",
        "GB",
        "level after the first steps",
        "rising with every step: something is kept that should not be: please report it",
    ),
    Metric(
        "system/rows_played",
        "Denoiser rows that recorded CUDA graphs played, all ranks. Only with `model.cuda_graphs` on GPUs.",
        "rows",
        "nearly `forwards/executed` times ranks, from the third step on",
        "shapes of batches change from step to step",
    ),
    Metric(
        "system/least_seconds",
        "Time that the matrix products and attention of the step take at the rate of products that the device reached "
        "when the run began, all ranks together. Only on GPUs.",
        "s",
        "level",
    ),
    Metric(
        "system/mfu",
        "Share of the step's time that the arithmetic needs at the least: `system/least_seconds` per rank over "
        "`timer/step`. Only on GPUs.",
        "",
        "0.5 and more for large images and large models",
        "`nftctl bench` says where the rest goes",
    ),
    # -- evaluations
    Metric("step", "Rollouts done when the model was looked at; 0 is the base.", "rollouts", file=EVALUATIONS),
    Metric(
        "eval/reward",
        "Mean reward of held-out prompts from fixed noise: what moves it is the policy alone.",
        "reward",
        "rises",
        "falls while `train/reward_mean` rises: reward hacking; " + _LOOK,
        EVALUATIONS,
    ),
    Metric("eval/std", "Standard deviation of that reward over the samples.", "reward", file=EVALUATIONS),
    Metric("eval/samples", "Images that were scored.", "images", "the same at every evaluation", file=EVALUATIONS),
    Metric(
        "eval/kl_distance",
        "Mean squared distance of the policy's velocity to the reference's on held-out samples.",
        "",
        "below 0.5, growing slowly",
        "raise `rl.kl_beta`, or lower `optimizer.lr`",
        EVALUATIONS,
    ),
    Metric(
        "eval/<provider>",
        "Mean raw score of a provider, of those that only judge too.",
        "score",
        "rises",
        "a judge that falls while the reward rises: reward hacking; " + _LOOK,
        EVALUATIONS,
    ),
    Metric(
        "eval/<provider>/<component>",
        "Mean of a component that the service reports beside its score.",
        file=EVALUATIONS,
    ),
)


def metric_of(key: str, file: str = STEPS) -> Metric | None:
    """What is known of a key of a row; a name of its own goes before a pattern. None for a stranger."""
    known = [metric for metric in METRICS if metric.file == file]
    exact = next((metric for metric in known if metric.name == key), None)
    return exact or next((metric for metric in known if metric.pattern.fullmatch(key)), None)
