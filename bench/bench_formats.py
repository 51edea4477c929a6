"""Speed of decoding quantised weights on one core: `python bench/bench_formats.py`.

Prints the fastest of repeated calls for a matrix of 2048 x 7168, an expert's of DeepSeek-V3.
"""

from __future__ import annotations

import time

import numpy as np

from expertmesh.formats import Codec
from expertmesh.formats.encode import encode
from expertmesh.formats.fp8 import Fp8Blocks
from expertmesh.formats.mxfp4 import Mxfp4
from expertmesh.formats.packed import PackedIntegers
from expertmesh.formats.scaled import ScaledBytes
from expertmesh.formats.scaling import Scaling

SHAPE = (2048, 7168)
REPEATS = 10
CODECS: tuple[Codec, ...] = (
    Fp8Blocks(128, 128),
    ScaledBytes("fp8", Scaling("channel")),
    Mxfp4(),
    PackedIntegers(4, Scaling("group", (1, 32))),
    PackedIntegers(4, Scaling("group", (1, 128), symmetric=False)),
    PackedIntegers(8, Scaling("channel")),
    ScaledBytes("int8", Scaling("channel")),
)


def main() -> None:
    """Measures all codecs."""
    weight = np.random.default_rng(0).standard_normal(SHAPE, np.float32)
    out = np.empty(SHAPE, np.float32)
    for codec in CODECS:
        parts = encode(codec, weight)
        best = float("inf")
        for _ in range(REPEATS):
            start = time.perf_counter()
            codec.decode(parts, out)
            best = min(best, time.perf_counter() - start)
        stored = sum(part.data.nbytes for part in parts)
        print(
            f"{codec.name:45s} {best * 1e3:7.1f} ms  {weight.size / best / 1e6:6.0f} M weights/s  "
            f"{stored / best / 1e6:6.0f} MB/s read  {out.nbytes / best / 1e6:6.0f} MB/s written"
        )


if __name__ == "__main__":
    main()
