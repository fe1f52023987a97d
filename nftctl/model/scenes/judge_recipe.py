"""Makes the weights of the scenes' judge: `python -m nftctl.model.scenes.judge_recipe` (a few minutes on one core).

Owns the judge's own renderings, which share no code with those that the base learned from: polygons of Pillow, drawn
large and shrunk, turned by any angle, on grounds that are darker and uneven, in stronger tints, with other colours,
things that are no shape, touching things, blur and noise. The scorer that reads the file is NumPy.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageDraw, ImageFilter
from safetensors.numpy import save_file
from torch import Tensor, nn
from torch.nn import functional as F

PLACE = Path(__file__).parents[2] / "reward" / "scorers" / "scenes.safetensors"
SIDE, GRID, SCALE = 32, 16, 4
LAYERS = ((3, 24, 5, 2), (24, 32, 3, 1), (32, 32, 3, 1), (32, 32, 3, 1), (32, 10, 1, 1))
INKS = ((205, 25, 35), (25, 140, 45), (35, 70, 225), (240, 205, 35), (120, 45, 165), (25, 25, 25))
OTHER_INKS = ((245, 140, 30), (240, 130, 190), (60, 200, 210), (130, 80, 40), (140, 140, 140))
NO_SHAPE = 3
Pixels = npt.NDArray[np.uint8]


class Scene:
    """A picture [32, 32, 3] and its answers on the grid: heat [3, 16, 16] and colour [16, 16], -1 where none is."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        level = rng.uniform(195, 255)
        ground = np.clip(level + rng.normal(0, 4, 3), 0, 255)
        self._image = Image.new("RGB", (SIDE * SCALE, SIDE * SCALE), tuple(int(v) for v in ground))
        self._pen = ImageDraw.Draw(self._image)
        self.heat = np.zeros((3, GRID, GRID), np.float32)
        self.colour = np.full((GRID, GRID), -1, np.int64)
        taken: list[tuple[float, float, float]] = []
        for _ in range(rng.integers(1, 6)):
            self._add(taken)
        self.pixels = self._finished()

    def _add(self, taken: list[tuple[float, float, float]]) -> None:
        rng = self._rng
        radius = rng.uniform(2.8, 8.5) if not taken else rng.uniform(2.8, 5.5)
        for _ in range(20):
            x, y = rng.uniform(radius, SIDE - radius, 2)
            if all(np.hypot(x - a, y - b) > radius + r - 0.5 for a, b, r in taken):
                break
        else:
            return
        taken.append((x, y, radius * 1.2))
        shape = int(rng.choice(4, p=(0.28, 0.28, 0.3, 0.14)))
        colour = int(rng.integers(0, len(INKS))) if rng.uniform() < 0.88 else len(INKS)
        self._shape(shape, x, y, radius, self._ink(colour))
        if shape != NO_SHAPE:
            self._answer(shape, colour, x, y, radius)

    def _ink(self, colour: int) -> tuple[int, ...]:
        base = INKS[colour] if colour < len(INKS) else OTHER_INKS[int(self._rng.integers(0, len(OTHER_INKS)))]
        return tuple(int(v) for v in np.clip(np.array(base) + self._rng.normal(0, 12, 3), 0, 255))

    def _shape(self, shape: int, x: float, y: float, radius: float, ink: tuple[int, ...]) -> None:
        rng = self._rng
        if shape == 0:
            box = [(x - radius) * SCALE, (y - radius) * SCALE, (x + radius) * SCALE, (y + radius) * SCALE]
            self._pen.ellipse(box, fill=ink)
            return
        turn = rng.uniform(-0.25, 0.25) if rng.uniform() < 0.8 else rng.uniform(0, 2 * np.pi)
        if shape == NO_SHAPE:
            self._spoilt(x, y, radius, ink, turn)
            return
        corners = 4 if shape == 1 else 3
        first = np.pi / 4 if shape == 1 else -np.pi / 2
        angles = turn + first + np.arange(corners) * 2 * np.pi / corners
        reach = radius * 1.2 * rng.uniform(0.92, 1.08, corners)
        self._polygon(x + reach * np.cos(angles), y + reach * np.sin(angles), ink)

    def _spoilt(self, x: float, y: float, radius: float, ink: tuple[int, ...], turn: float) -> None:
        """Something that is none of the three: a bar, a cross, a half disc, a star, a ring, or scattered crumbs."""
        rng, kind = self._rng, int(self._rng.integers(0, 6))
        if kind in (0, 1):
            for angle in (turn,) if kind == 0 else (turn, turn + np.pi / 2):
                c, s, thin = np.cos(angle), np.sin(angle), 0.3
                u, v = radius * np.array([-1, 1, 1, -1]), radius * thin * np.array([-1, -1, 1, 1])
                self._polygon(x + u * c - v * s, y + u * s + v * c, ink)
        elif kind == 2:
            angles = turn + np.linspace(0, np.pi, 12)
            self._polygon(x + radius * np.cos(angles), y + radius * np.sin(angles), ink)
        elif kind == 3:
            points = int(rng.integers(4, 7))
            angles = turn + np.arange(2 * points) * np.pi / points
            reach = radius * np.where(np.arange(2 * points) % 2, 0.4, 1.2)
            self._polygon(x + reach * np.cos(angles), y + reach * np.sin(angles), ink)
        elif kind == 4:
            box = [(x - radius) * SCALE, (y - radius) * SCALE, (x + radius) * SCALE, (y + radius) * SCALE]
            self._pen.ellipse(box, outline=ink, width=int(radius * SCALE * 0.35) + 1)
        else:
            for dx, dy in rng.uniform(-radius, radius, (6, 2)):
                crumb = rng.uniform(0.5, 1.2)
                box = [(x + dx - crumb) * SCALE, (y + dy - crumb) * SCALE]
                self._pen.ellipse([*box, *(v + 2 * crumb * SCALE for v in box)], fill=ink)

    def _polygon(self, x: npt.NDArray[np.float64], y: npt.NDArray[np.float64], ink: tuple[int, ...]) -> None:
        self._pen.polygon([(float(a * SCALE), float(b * SCALE)) for a, b in zip(x, y, strict=True)], fill=ink)

    def _answer(self, shape: int, colour: int, x: float, y: float, radius: float) -> None:
        # A cell's middle is pixel (2 column + 1, 2 row + 1) of the edges' count.
        cells = np.arange(GRID) * 2 + 1
        near = np.hypot(cells[None] - x, cells[:, None] - y)
        heat = np.exp(-((near / 2) ** 2)).astype(np.float32)
        heat[near == near.min()] = 1
        self.heat[shape] = np.maximum(self.heat[shape], heat)
        self.colour[near < max(1.5, radius / 3)] = colour

    def _finished(self) -> Pixels:
        rng = self._rng
        way = Image.Resampling.BICUBIC if rng.uniform() < 0.5 else Image.Resampling.BOX
        small = self._image.resize((SIDE, SIDE), way)
        if rng.uniform() < 0.5:
            small = small.filter(ImageFilter.GaussianBlur(float(rng.uniform(0.2, 0.7))))
        pixels = np.asarray(small, np.float32)
        slope = rng.normal(0, 4, 2)
        places = np.linspace(-1, 1, SIDE)
        pixels = pixels + (places[:, None] * slope[0] + places * slope[1])[..., None]
        pixels = pixels + rng.normal(0, rng.uniform(0, 10), pixels.shape)
        return np.clip(pixels, 0, 255).round().astype(np.uint8)


class Net(nn.Module):
    """Five convolutions: pictures [n, 3, 32, 32] in [-1, 1] to [n, 10, 16, 16]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2) for inputs, outputs, kernel, stride in LAYERS
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:  # type: ignore[union-attr]
            x = layer(x).relu()
        answer: Tensor = self.layers[-1](x)
        return answer


def render(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """`count` scenes: pictures uint8 [n, 3, 32, 32], heat [n, 3, 16, 16], colour int64 [n, 16, 16]."""
    rng = np.random.default_rng(seed)
    scenes = [Scene(rng) for _ in range(count)]
    pixels = torch.from_numpy(np.stack([scene.pixels for scene in scenes])).permute(0, 3, 1, 2).contiguous()
    heat = torch.from_numpy(np.stack([scene.heat for scene in scenes]))
    return pixels, heat, torch.from_numpy(np.stack([scene.colour for scene in scenes]))


def error(answer: Tensor, heat: Tensor, colour: Tensor) -> Tensor:
    """Focal loss of the middles, in which neighbours of a middle count for little, and cross-entropy of the colours."""
    p = answer[:, :3].sigmoid().clamp(1e-4, 1 - 1e-4)
    middle = heat == 1
    hit = ((1 - p) ** 2 * p.log())[middle].sum()
    miss = ((1 - heat) ** 4 * p**2 * (1 - p).log())[~middle].sum()
    tone = F.cross_entropy(answer[:, 3:], colour, ignore_index=-1)
    return -(hit + miss) / middle.sum().clamp(min=1) + tone


def train(*, scenes: int, iterations: int, seed: int) -> Net:
    """The judge's network; the same numbers give the same weights on the same machine with the same threads."""
    torch.manual_seed(seed)
    pictures, heat, colour = render(scenes, seed)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=iterations)
    for iteration in range(iterations):
        pick = torch.randint(0, scenes, (64,))
        x, h, c = pictures[pick].float() / 127.5 - 1, heat[pick], colour[pick]
        if iteration % 2:
            x, h, c = x.flip(-1), h.flip(-1), c.flip(-1)
        loss = error(net(x), h, c)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        optimizer.step()
        schedule.step()
        if (iteration + 1) % 200 == 0:
            print(f"iteration {iteration + 1} of {iterations}: loss {loss.item():.3f}", flush=True)
    return net.eval()


def weights(net: Net) -> dict[str, npt.NDArray[np.float16]]:
    """The scorer's tensors: half precision, in matrix form, rows in the order (channel, y, x)."""
    found = {}
    for n, layer in enumerate(net.layers):
        matrix = layer.weight.detach().flatten(1).T  # type: ignore[union-attr, operator]
        found[f"{n}.weight"] = np.ascontiguousarray(matrix.numpy(), np.float16)
        found[f"{n}.bias"] = layer.bias.detach().numpy().astype(np.float16)  # type: ignore[union-attr, operator]
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and write the weight file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PLACE)
    parser.add_argument("--scenes", type=int, default=12_000)
    parser.add_argument("--iterations", type=int, default=2400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    save_file(weights(train(scenes=options.scenes, iterations=options.iterations, seed=options.seed)), options.out)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
