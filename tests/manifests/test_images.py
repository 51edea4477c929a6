"""Images: small, pinned, for a user that exists, and what the manifests start."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import PurePosixPath

import pytest

from expertmesh.processes import HUGE_PAGES
from tests.support.dockerfiles import IMAGES, Dockerfile, exec_form, read, source
from tests.support.manifests import Manifests, pod_of
from tests.support.processes import ROOT

VARIANTS = ("cpu", "cuda")
BUILD_TOOLS = ("gcc", "g++", "make", "cmake", "build-essential", "git", "curl", "wget", "pip")
TRITONS = {"gcc", "libc6-dev"}
"""What Triton needs at run time."""
PINNED = re.compile(r"python:\d+\.\d+\.\d+-slim-[a-z]+(@sha256:[0-9a-f]{64})?")

Check = Callable[[Dockerfile, str], None]


def project() -> dict[str, dict[str, object]]:
    """pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def commands(image: Dockerfile, variant: str) -> list[str]:
    """What is run in the stages that an image consists of."""
    return [text for stage in image.chain(variant) for text in stage.of("RUN")]


def check_bases_are_pinned(image: Dockerfile, name: str) -> None:
    """Every base is one version of one Debian."""
    assert PINNED.fullmatch(image.arguments["PYTHON_IMAGE"])
    for stage in image.stages:
        bases = {image.expanded(stage.base, variant) for variant in VARIANTS}
        known = {other.name for other in image.stages} | {image.arguments["PYTHON_IMAGE"]}
        assert bases <= known


def check_packages_are_pinned(image: Dockerfile, name: str) -> None:
    """All come in the versions of constraints.txt, torch from where one says."""
    build = image.stages[0]
    installs = [text for text in build.of("RUN") if " install " in text]
    assert len(installs) == 2
    assert all("-c constraints.txt" in text for text in installs)
    assert 'TORCH_INDEX_URL=""' in build.of("ARG")
    assert '--index-url "$TORCH_INDEX_URL"' in installs[0]
    assert "\ntorch==" in (ROOT / "constraints.txt").read_text()


def check_the_user_exists(image: Dockerfile, name: str) -> None:
    """It is not root, and named by number, as Kubernetes wants to see that."""
    for variant in VARIANTS:
        user, _, group = image.last(variant, "USER").partition(":")
        assert user.isdigit()
        assert int(user) > 0
        made = " ".join(commands(image, variant))
        assert f"--uid {user} --gid {group} " in made
        assert f"groupadd --gid {group} " in made
        assert image.stages[-1].of("USER"), "the last stage may not fall back to root"


def check_signals_reach_the_program(image: Dockerfile, name: str) -> None:
    """No shell in between."""
    for variant in VARIANTS:
        entry = exec_form(image.last(variant, "ENTRYPOINT"))
        assert PurePosixPath(entry[0]).name not in ("sh", "bash")
        exec_form(image.last(variant, "CMD"))


def check_nothing_is_left_of_the_build(image: Dockerfile, name: str) -> None:
    """Neither tools nor sources nor pip; CUDA has what Triton compiles with, and no lists."""
    for variant in VARIANTS:
        words = {word for text in commands(image, variant) for word in re.split(r"[\s;&]+", text)}
        allowed = TRITONS if variant == "cuda" else set()
        assert (words & {*BUILD_TOOLS, *TRITONS}) == allowed
        assert ("apt-get" in words) == (variant == "cuda")
        assert "apt-get" not in words or "/var/lib/apt/lists/*" in words
        for stage in image.chain(variant):
            assert all(text.startswith("--from=build ") for text in stage.of("COPY"))
            assert not stage.of("ADD")
    assert "python -m venv --without-pip /opt/expertmesh" in image.stages[0].of("RUN")


def check_all_of_the_program_is_inside(image: Dockerfile, name: str) -> None:
    """Every package of the project is built in, and every file that is copied exists."""
    copied = {path for text in image.stages[0].of("COPY") for path in text.split()[:-1]}
    assert all((ROOT / path).exists() for path in copied)
    packages = project()["tool"]["setuptools"]["packages"]["find"]["include"]
    roots = {pattern.removesuffix(".*") for pattern in packages}
    assert {"kernels" if root == "expertmesh_kernels" else root for root in roots} <= copied
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {f"!{path}" for path in copied} <= set(ignored)


def check_extras_are_those_of_the_program(image: Dockerfile, name: str) -> None:
    """An image has what its program needs, and not what others do."""
    install = image.stages[0].of("RUN")[-1]
    extras = set(re.search(r"extras=([a-z0-9,]+);", install)[1].split(","))
    needed = {"gateway": {"gateway", "worker", "k8s"}, "expert-worker": {"worker"}}
    assert extras == needed[name]
    assert '|| extras="$extras,gpu"' in install
    known = project()["project"]["optional-dependencies"]
    assert extras | {"gpu"} <= known.keys()


def check_the_environment_is_that_of_children(image: Dockerfile, name: str) -> None:
    """As processes that ExpertMesh starts itself have it."""
    for variant in VARIANTS:
        given = dict(part.partition("=")[::2] for part in image.last(variant, "ENV").split())
        assert given.get("GLIBC_TUNABLES") == HUGE_PAGES
        assert given.get("OMP_WAIT_POLICY") == "passive"
        assert given.get("GRPC_ENABLE_FORK_SUPPORT") == "false"
        assert given["PATH"].startswith("/opt/expertmesh/bin:")


CHECKS: list[Check] = [
    check_bases_are_pinned,
    check_packages_are_pinned,
    check_the_user_exists,
    check_signals_reach_the_program,
    check_nothing_is_left_of_the_build,
    check_all_of_the_program_is_inside,
    check_extras_are_those_of_the_program,
    check_the_environment_is_that_of_children,
]


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_image(check: Check, name: str) -> None:
    """What the name of the check says."""
    check(read(source(name)), name)


@pytest.mark.parametrize("name", IMAGES)
def test_images_fit_the_manifests(name: str, found: Manifests) -> None:
    """User, command and ports are those that pods say."""
    image = read(source(name))
    container = found.container(name)
    workload = next(each for each in found.workloads if each["metadata"]["name"] == name)
    context = pod_of(workload)["securityContext"]
    for variant in VARIANTS:
        user = f"{context['runAsUser']}:{context['runAsGroup']}"
        assert image.last(variant, "USER") == user
        entry = exec_form(image.last(variant, "ENTRYPOINT"))
        assert container["command"][: len(entry)] == entry
        ports = {int(port) for port in image.last(variant, "EXPOSE").split()}
        assert ports == {port["containerPort"] for port in container["ports"]}


@pytest.mark.parametrize(
    ("check", "old", "new"),
    [
        (check_bases_are_pinned, "python:3.11.14-slim-bookworm", "python:3-slim"),
        (check_bases_are_pinned, "${PYTHON_IMAGE} AS runtime", "debian:latest AS runtime"),
        (check_packages_are_pinned, "install -c constraints.txt \".[", "install \".["),
        (check_packages_are_pinned, "${TORCH_INDEX_URL:+--index-url \"$TORCH_INDEX_URL\"}", ""),
        (check_the_user_exists, "USER 10001:10001\n", ""),
        (check_the_user_exists, "USER 10001:10001", "USER expertmesh"),
        (check_the_user_exists, "USER 10001:10001", "USER 1000:1000"),
        (check_signals_reach_the_program, "ENTRYPOINT [", "ENTRYPOINT exec ["),
        (check_signals_reach_the_program, "ENTRYPOINT [", 'ENTRYPOINT ["/bin/sh", "-c", '),
        (check_nothing_is_left_of_the_build, " --without-pip", ""),
        (check_nothing_is_left_of_the_build, "FROM runtime AS final-cpu\n",
         "FROM runtime AS final-cpu\nRUN apt-get install -y gcc\n"),
        (check_nothing_is_left_of_the_build, " && \\\n    rm -rf /var/lib/apt/lists/*", ""),
        (check_nothing_is_left_of_the_build, "COPY --from=build /opt", "COPY expertmesh /opt"),
        (check_all_of_the_program_is_inside, "COPY kernels ./kernels\n", ""),
        (check_all_of_the_program_is_inside, "COPY constraints.txt ./", "COPY pins.txt ./"),
        (check_extras_are_those_of_the_program, "extras=worker;", "extras=worker,dev;"),
        (check_the_environment_is_that_of_children, "OMP_WAIT_POLICY=passive", "A=B"),
        (check_the_environment_is_that_of_children, "hugetlb=1", "hugetlb=0"),
    ],
)  # fmt: skip
def test_breakage_is_noticed(check: Check, old: str, new: str) -> None:
    """Each check can fail."""
    text = source("expert-worker")
    assert old in text
    with pytest.raises(AssertionError):
        check(read(text.replace(old, new)), "expert-worker")
