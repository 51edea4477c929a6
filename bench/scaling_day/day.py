"""A day of load for expert workers: the curve of a day, noise, and bursts.

The load is work: seconds of a device's time that are asked for in a second, so 2.5 keeps two and a
half expert workers busy. `load.csv` beside this file is the day of SEED, a value a minute.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path

SEED = 7
MINUTES = 24 * 60
NUM_BURSTS = 7
FILE = Path(__file__).parent / "load.csv"

_NIGHT = 0.6
_DAY = 3.2
_PEAK_AT_MIN = 14.5 * 60
_NOISE = 0.06
_NOISE_MEMORY = 0.8


@dataclass(frozen=True)
class Burst:
    """More load for a while."""

    begin_min: int
    num_min: int
    work: float


def bursts(seed: int = SEED) -> tuple[Burst, ...]:
    """When they come; two never come at once."""
    draw = random.Random(f"bursts {seed}")
    apart = MINUTES // NUM_BURSTS
    return tuple(
        Burst(
            apart * n + draw.randrange(apart // 2),
            draw.randrange(4, 31),
            1.5 + 2.5 * draw.random(),
        )
        for n in range(NUM_BURSTS)
    )


def make_day(seed: int = SEED) -> list[float]:
    """[minutes] work."""
    draw = random.Random(f"noise {seed}")
    noise, day = 0.0, []
    for minute in range(MINUTES):
        noise = _NOISE_MEMORY * noise + _NOISE * (2 * draw.random() - 1)
        height = (1 + math.cos(2 * math.pi * (minute - _PEAK_AT_MIN) / MINUTES)) / 2
        work = (_NIGHT + _DAY * height**1.5) * (1 + noise)
        work += sum(
            burst.work for burst in bursts(seed)
            if burst.begin_min <= minute < burst.begin_min + burst.num_min
        )  # fmt: skip
        day.append(round(work, 3))
    return day


def read_day() -> list[float]:
    """[minutes] work of the committed day."""
    lines = FILE.read_text(encoding="ascii").splitlines()[1:]
    return [float(line.split(",")[1]) for line in lines]


def write_day() -> None:
    """Writes the committed day anew."""
    lines = ["minute,work", *(f"{minute},{work}" for minute, work in enumerate(make_day()))]
    FILE.write_text("\n".join(lines) + "\n", encoding="ascii")
