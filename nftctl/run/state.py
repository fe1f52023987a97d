"""The counters that say where a run stands; everything random is a function of these and the seed.

Refuses negative numbers, booleans and names it does not know, since a wrong counter would repeat or skip prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from nftctl.errors import CheckpointUnusable


@dataclass(slots=True)
class RunState:
    """Progress of a run since its birth. All counts are absolute and never wrap."""

    step: int = 0
    """Rollouts completed."""
    optimizer_steps: int = 0
    """Optimizer steps completed."""
    cursor: int = 0
    """Source rows consumed by completed steps."""
    policy_version: int = 0
    """Grows with every optimizer step; tells whether `old` is the policy."""
    old_version: int = 0
    """The policy version that the moving old policy was last refreshed from."""
    old_blended: int = 0
    """1 when that refresh kept a share of the old weights, so that `old` equals no policy."""
    old_refreshes: int = 0
    """Refreshes of the moving old policy."""

    def to_dict(self) -> dict[str, int]:
        """The counters by name, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> RunState:
        """Read the counters back. Raises CheckpointUnusable unless each is there once as a whole number >= 0."""
        names = {field.name for field in fields(cls)}
        if set(values) != names:
            parts = [f"lacks {n}" for n in sorted(names - set(values))]
            parts += [f"has unknown {n}" for n in sorted(set(values) - names)]
            raise CheckpointUnusable(f"the run state {', '.join(parts)}")
        for name, value in values.items():
            if type(value) is not int or value < 0:
                raise CheckpointUnusable(f"the run state's {name} is {value!r}, not a count")
        return cls(**{name: int(str(values[name])) for name in names})
