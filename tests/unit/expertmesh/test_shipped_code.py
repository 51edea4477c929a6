"""What shipped code must not contain: ways to run code that came with data."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = (
    *("attention_worker", "expert_worker", "expertmesh", "gateway"),
    "kernels/expertmesh_kernels",
)
MODULES = frozenset({"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "code"})
BUILTINS = frozenset({"eval", "exec", "compile", "__import__"})
ATTRIBUTES = frozenset(
    {
        *("torch.load", "torch.hub", "torch.package", "os.system", "os.popen"),
        *("yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load", "yaml.Loader"),
        *("np.load", "numpy.load", "jsonpickle.decode"),
    }
)
KEYWORDS = frozenset({"trust_remote_code", "allow_pickle", "shell"})


def _dangers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of each forbidden thing."""
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                for alias in node.names:
                    if alias.name.partition(".")[0] in MODULES:
                        yield node.lineno, alias.name
            case ast.ImportFrom():
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                if (node.module or "").partition(".")[0] in MODULES or names & ATTRIBUTES:
                    yield node.lineno, f"{node.module}"
            case ast.Call(func=ast.Name(id=name)) if name in BUILTINS:
                yield node.lineno, name
            case ast.Attribute(value=ast.Name(id=base), attr=attr) if (
                f"{base}.{attr}" in ATTRIBUTES
            ):
                yield node.lineno, f"{base}.{attr}"
            case ast.keyword(arg=name, value=value) if name in KEYWORDS:
                if not (isinstance(value, ast.Constant) and value.value is False):
                    yield value.lineno, name


def test_nothing_runs_code_from_data() -> None:
    """No unpickling, no evaluation, no unsafe YAML, no shell in any package."""
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    assert len(files) > 100
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in files
        for line, name in _dangers(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        *(
            "import pickle",
            "import dill as d",
            "from marshal import loads",
            "from torch import load",
        ),
        *("eval('1')", "exec(x)", "__import__('os')", "torch.load(p, weights_only=True)"),
        *("yaml.load(t)", "np.load(p)", "os.system('ls')", "run(c, shell=True)"),
        *("f(trust_remote_code=flag)", "x = torch.load"),
    ],
)
def test_each_danger_is_found(source: str) -> None:
    """The search finds what it looks for."""
    assert list(_dangers(ast.parse(source)))


@pytest.mark.parametrize("source", ["yaml.safe_load(t)", "run(c, shell=False)", "model.eval()"])
def test_what_is_safe_is_not(source: str) -> None:
    """Nothing else is named."""
    assert list(_dangers(ast.parse(source))) == []
