"""Draws the scenes that prompts ask for: flat, anti-aliased circles, squares and triangles on a light ground.

Owns place, size, turn, tint and ground of what is drawn, all of it vectorised over a batch, on any device, from one
explicit generator. No two things touch each other or the border. Refuses nothing: its inputs are its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nftctl.model.scenes.words import COLOURS, Scene

SIZE = 32
"""Side of a picture in pixels."""
MOST = 4
"""Things of a scene."""
TRIES = 64
"""Layouts that are drawn for every picture; the first that fits is taken."""
REACH = (1.0, 1.2, 1.3)
"""How far a circle, a square and a triangle of radius 1 reach from their middle."""
_RADII = ((5.0, 8.0), (4.2, 6.2), (3.8, 5.2), (3.5, 4.5))
"""Smallest and largest radius in pixels where there are one, two, three or four things."""
_TURN = 0.15
_TINT = 0.02


@dataclass(frozen=True, slots=True)
class Wanted:
    """Scenes as tensors. `colour`, `shape` and `group` (0 first, 1 second, -1 nothing) are int64 [n, MOST].

    `relation` int64 [n] is an index into RELATIONS, or -1.
    """

    colour: Tensor
    shape: Tensor
    group: Tensor
    relation: Tensor

    def __getitem__(self, rows: Tensor) -> Wanted:
        return Wanted(self.colour[rows], self.shape[rows], self.group[rows], self.relation[rows])


def wanted(scenes: Sequence[Scene], device: torch.device | str = "cpu") -> Wanted:
    """What the scenes want, in their order."""
    rows = []
    for scene in scenes:
        things = [(g.colour, g.shape, n) for n, g in enumerate(scene.groups) for _ in range(g.count)]
        rows.append(things + [(0, 0, -1)] * (MOST - len(things)))
    colour, shape, group = torch.tensor(rows, device=device).unbind(-1)
    relation = torch.tensor([-1 if s.second is None else s.relation for s in scenes], device=device)
    return Wanted(colour, shape, group, relation)


class Layout(NamedTuple):
    """Middles [n, MOST] in pixels, x to the right and y down, and radii [n, MOST]."""

    x: Tensor
    y: Tensor
    radius: Tensor


def lay_out(want: Wanted, generator: torch.Generator) -> Layout:
    """Places and sizes that keep the relation, clear of each other and of the border.

    Where none of the tries fits, the things of the nearest one shrink until they are clear of each other.
    """
    n, device = len(want.relation), want.relation.device
    there = (want.group >= 0)[:, None]
    counts = there.sum(-1).squeeze(1)
    low, high = torch.tensor(_RADII, device=device)[counts - 1].unbind(-1)
    draws = torch.rand((3, n, TRIES, MOST), generator=generator, device=device)
    radius = low[:, None, None] + (high - low)[:, None, None] * draws[0]
    reach = radius * torch.tensor(REACH, device=device)[want.shape][:, None]
    along, across = (reach + 0.5 + (SIZE - 1 - 2 * reach) * place for place in draws[1:])
    apart = _nearness(along, across, reach, there) if MOST > 1 else torch.full((n, TRIES), 9.0, device=device)
    fit = torch.minimum(apart, _order(along, radius, want))
    best = torch.where(fit >= 1, 1.0, fit).argmax(1)
    pick = torch.arange(n, device=device), best
    along, across, radius = along[pick], across[pick], radius[pick] * apart[pick].clamp(max=1)[:, None]
    # Drawn as "left of"; the other three are its mirror image and the two turned by a right angle.
    kind = want.relation[:, None]
    along = torch.where((kind == 1) | (kind == 3), SIZE - along, along)
    upright = kind >= 2
    return Layout(torch.where(upright, across, along), torch.where(upright, along, across), radius)


def _nearness(x: Tensor, y: Tensor, reach: Tensor, there: Tensor) -> Tensor:
    """Smallest distance over the smallest one allowed, over all pairs that are there [n, TRIES]."""
    first, second = torch.triu_indices(MOST, MOST, 1, device=x.device)
    gap = torch.hypot(x[..., first] - x[..., second], y[..., first] - y[..., second])
    ratio = gap / (reach[..., first] + reach[..., second] + 1)
    return torch.where(there[..., first] & there[..., second], ratio, 9.0).amin(-1)


def _order(along: Tensor, radius: Tensor, want: Wanted) -> Tensor:
    """1 or more where all of the first group stand clearly before all of the second; 9 where no relation is asked."""
    first, second = (want.group == 0)[:, None], (want.group == 1)[:, None]
    end = torch.where(first, along, -1e3).amax(-1)
    start = torch.where(second, along, 1e3).amin(-1)
    size = torch.where(first | second, radius, 0.0).amax(-1)
    return torch.where(want.relation[:, None] >= 0, (start - end) / (1.3 * size), 9.0)


def draw(want: Wanted, generator: torch.Generator) -> Tensor:
    """Pictures float32 [n, 3, SIZE, SIZE] in [0, 1]."""
    n, device = len(want.relation), want.relation.device
    layout = lay_out(want, generator)
    turn = (2 * torch.rand((n, MOST), generator=generator, device=device) - 1) * _TURN
    cover = _cover(layout, want, turn)
    pigment = torch.tensor(list(COLOURS.values()), device=device)[want.colour]
    pigment = pigment + _TINT * torch.randn(pigment.shape, generator=generator, device=device)
    light = 0.92 + 0.07 * torch.rand((n, 1), generator=generator, device=device)
    ground = light + 0.01 * torch.randn((n, 3), generator=generator, device=device)
    picture = ground[:, :, None, None].expand(n, 3, SIZE, SIZE)
    for thing in range(MOST):
        share = cover[:, thing, None]
        picture = picture * (1 - share) + pigment[:, thing, :, None, None] * share
    return picture.clamp(0, 1)


def _cover(layout: Layout, want: Wanted, turn: Tensor) -> Tensor:
    """Share of every pixel that every thing covers [n, MOST, SIZE, SIZE], by its signed distance to the outline."""
    middle = torch.arange(SIZE, device=turn.device) + 0.5
    x, y = middle - layout.x[..., None, None], middle[:, None] - layout.y[..., None, None]
    c, s = turn.cos()[..., None, None], turn.sin()[..., None, None]
    u, v, r = x * c + y * s, y * c - x * s, layout.radius[..., None, None]
    circle = torch.hypot(u, v) - r
    # Half a side of 0.85 and a corner at 1.3: all three shapes of one radius look about equally large.
    square = torch.maximum(u.abs(), v.abs()) - 0.85 * r
    slope = 0.75**0.5
    triangle = torch.maximum(v, u.abs() * slope - v / 2) - 0.65 * r
    distance = torch.stack((circle, square, triangle), -1)
    distance = distance.gather(-1, want.shape[..., None, None, None].expand(*distance.shape[:-1], 1)).squeeze(-1)
    return (0.5 - distance).clamp(0, 1) * (want.group >= 0)[..., None, None]
