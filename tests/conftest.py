"""What every test shares: the environment of the processes, models and meshes, a leak guard.

The environment is set before torch and Numba are imported, since both read it once. Models and
meshes are made when a test first asks for one, and live until the end of the run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

_HOME = Path(os.environ.setdefault("EXPERTMESH_HOME", str(Path.home() / ".cache" / "expertmesh")))
os.environ.setdefault("NUMBA_CACHE_DIR", str(_HOME / "numba"))
os.environ.setdefault("TRITON_CACHE_DIR", str(_HOME / "triton"))
for _name in ("OMP", "MKL", "OPENBLAS", "NUMBA"):
    os.environ.setdefault(f"{_name}_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRITON_INTERPRET", "1")  # `make test-gpu` sets 0

import hypothesis  # noqa: E402 (the environment comes first)
import pytest  # noqa: E402

from tests.support.leaks import nothing_left_behind  # noqa: E402

# The same examples in every run: a change is judged by what it does, not by chance. Look for new
# examples with `pytest --hypothesis-profile=search`.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.register_profile("search", max_examples=2000, deadline=None)
hypothesis.settings.load_profile("repeatable")

if TYPE_CHECKING:
    from tests.chaos.harness.suffering import Traffic
    from tests.support.mesh import Server
    from tests.support.oracle import Oracle
    from tests.support.tiny_checkpoints import TinyShape


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fails a test that leaves a child process or a named thread behind.

    What fixtures of a wider scope started is there before the test and is not counted.
    """
    with nothing_left_behind():
        yield


class Models:
    """Tiny checkpoints and what transformers says about them, each made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._oracles: dict[Path, Oracle] = {}

    def tiny(self, shape: TinyShape, *, tokenizer: bool = False) -> Path:
        """A checkpoint folder of this shape."""
        from tests.support.tiny_checkpoints import save_tiny

        folder = self._folder / f"tiny-{abs(hash((shape, tokenizer))):x}"
        return folder if folder.exists() else save_tiny(folder, shape, tokenizer=tokenizer)

    def oracle(self, model_dir: Path) -> Oracle:
        """The reference for a checkpoint."""
        from tests.support.oracle import Oracle

        if model_dir not in self._oracles:
            self._oracles[model_dir] = Oracle(model_dir)
        return self._oracles[model_dir]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Tiny checkpoints and their references."""
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def tiny_mixtral(models: Models) -> Path:
    """A tiny Mixtral of 8 experts."""
    from tests.support.tiny_checkpoints import MIXTRAL

    return models.tiny(MIXTRAL)


@pytest.fixture(scope="session")
def traffic(tiny_mixtral: Path) -> Traffic:
    """Requests to it, and what each is answered by one process in which nothing fails, alone."""
    from tests.chaos.harness.streams import Workload
    from tests.chaos.harness.suffering import Traffic
    from tests.support.tiny_checkpoints import MIXTRAL

    return Traffic.to(tiny_mixtral, Workload(MIXTRAL.vocab_size))


@pytest.fixture(scope="session")
def text_model(models: Models) -> Path:
    """A tiny Mixtral with a byte-level tokenizer and a chat template."""
    from tests.support.tiny_checkpoints import MIXTRAL_TEXT

    return models.tiny(MIXTRAL_TEXT, tokenizer=True)


@pytest.fixture(scope="session")
def text_server(text_model: Path) -> Iterator[Server]:
    """`expertmesh serve` of the tiny Mixtral with tokenizer, two expert workers, FP32."""
    from tests.support.mesh import serve

    with serve(text_model) as server:
        yield server
