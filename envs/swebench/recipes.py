"""Recipes for the benchmark's own rows, which do not say how to build them without its container images.

The repository at a task's commit is not on PyPI, but a release close to it often is: the one to which both patches
apply is taken, newest first before the task's date (or its version), then the first ones after. Dependencies and Python
are those with which such a release's tests run. `pearl env validate` says whether the outcome is the benchmark's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path, PurePosixPath

from packaging.version import Version
from unearth import PackageFinder
from unearth.errors import UnpackError

from envs.swebench.errors import BuildFailed, NoRecipe, PatchDoesNotApply
from envs.swebench.patches import parse_patch
from envs.swebench.record import Recipe, TaskRecord
from envs.swebench.store import Store
from envs.swebench.tools import Tools
from envs.swebench.trees import apply_patch, download_sdist, unpack

BEFORE, AFTER = 8, 3
"""Releases that are tried before and after the task's date."""
PYTEST = ("python", "-m", "pytest", "-rA", "-p", "no:cacheprovider")
SYMPY = "import sys,sympy; sys.exit(not sympy.test(*sys.argv[1:],verbose=True,subprocess=False))"
NOT_TESTS = (".json", ".png", ".csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml", ".rst", ".html")
"""Files of a test patch that are no tests, as in the official harness."""


@dataclass(frozen=True, slots=True)
class _Project:
    package: str
    python: Callable[[Version], str]
    deps: Callable[[Version], tuple[str, ...]]
    command: Callable[[list[str]], tuple[str, ...]]
    pythonpath: str = "."
    install_self: bool = False
    httpbin: bool = False


def _pytest(files: list[str]) -> tuple[str, ...]:
    named = [path for path in files if path.endswith(".py") and _is_test(path)]
    return (*PYTEST, *named)


def _old_pytest(files: list[str]) -> tuple[str, ...]:
    """Before 4.5 `A` reported nothing, and its parts did; later both mean the same."""
    return tuple("-rAfEsxXp" if word == "-rA" else word for word in _pytest(files))


def _is_test(path: str) -> bool:
    return PurePosixPath(path).name.startswith("test_") or path.endswith("_test.py") or path.startswith("testing/")


def _django(files: list[str]) -> tuple[str, ...]:
    labels = [path.removesuffix(".py").removeprefix("tests/").replace("/", ".") for path in files]
    options = ("--verbosity", "2", "--settings=test_sqlite", "--parallel", "1")
    return ("python", "./tests/runtests.py", *options, *labels)


def _before(limit: str, then: str, otherwise: str) -> Callable[[Version], str]:
    return lambda version: then if version < Version(limit) else otherwise


def _flask(version: Version) -> tuple[str, ...]:
    if version < Version("2.1"):
        own = "Werkzeug==2.3.7 Jinja2==3.0.1 itsdangerous==2.1.2 click==8.0.1 MarkupSafe==2.1.3 asgiref blinker"
    else:
        own = "click==8.1.3 itsdangerous==2.1.2 Jinja2==3.1.2 MarkupSafe==2.1.1 Werkzeug==2.2.3 asgiref==3.6.0"
    return (*own.split(), "pytest==7.3.0", "python-dotenv==1.0.0")


def _pytests_own(version: Version) -> tuple[str, ...]:
    old = "attrs==23.1.0 more-itertools==10.1.0 py==1.11.0"
    by_version = (
        ("4.5", f"atomicwrites==1.4.1 {old} pluggy==0.13.1 six==1.16.0"),
        ("4.6", f"atomicwrites==1.4.1 {old} pluggy==0.11.0 six==1.16.0 wcwidth==0.2.6"),
        ("5.3", f"atomicwrites==1.4.1 {old} packaging==23.1 pluggy==0.13.1 wcwidth==0.2.6"),
        ("5.4.9", f"{old} packaging==23.1 pluggy==0.13.1 wcwidth==0.2.6"),
        ("6.1.9", f"{old} iniconfig==2.0.0 packaging==23.1 pluggy==0.13.1 toml==0.10.2"),
        ("6.9", "attrs==23.1.0 iniconfig==2.0.0 packaging==23.1 pluggy==0.13.1 py==1.11.0 toml==0.10.2"),
        ("7.1", "attrs==23.1.0 iniconfig==2.0.0 packaging==23.1 pluggy==0.13.1 py==1.11.0 tomli==2.0.1"),
        ("99", "iniconfig==2.0.0 packaging==23.1 pluggy==1.3.0 exceptiongroup==1.1.3 tomli==2.0.1"),
    )
    own = next(deps for limit, deps in by_version if version < Version(limit))
    return (*own.split(), "setuptools<69", "wheel", "setuptools_scm<8")


def _sphinx(version: Version) -> tuple[str, ...]:
    common = "pytest<8 html5lib cython setuptools<66 pygments<2.16 babel snowballstemmer imagesize requests packaging"
    common += " sphinxcontrib-jsmath"
    if version < Version("4"):
        own = "Jinja2<3.0 markupsafe<=2.0.1 docutils<0.17 alabaster<0.7.12 sphinxcontrib-applehelp<=1.0.7"
        own += " sphinxcontrib-devhelp<=1.0.5 sphinxcontrib-qthelp<=1.0.6 sphinxcontrib-htmlhelp<=2.0.4"
        own += " sphinxcontrib-serializinghtml<=1.1.9"
    else:
        own = "Jinja2==3.0.3 sphinxcontrib-applehelp<=1.0.4 sphinxcontrib-devhelp<=1.0.2 alabaster<0.7.14 filelock"
        own += " sphinxcontrib-htmlhelp<=2.0.1 sphinxcontrib-qthelp<=1.0.3 sphinxcontrib-serializinghtml<=1.1.5"
        own += " docutils<0.18 importlib-metadata" if version < Version("5") else " docutils<0.21"
    return (*common.split(), *own.split())


_DJANGO = ("asgiref<3.8", "sqlparse<0.5", "pytz", "jinja2", "tzdata", "docutils<0.21", "setuptools<66")
_SEABORN = (
    "contourpy==1.1.0 cycler==0.11.0 fonttools==4.42.1 kiwisolver==1.4.5 matplotlib==3.7.2 numpy==1.25.2 "
    "packaging==23.1 pandas==2.0.0 pillow==10.0.0 pyparsing==3.0.9 pytest<8 python-dateutil==2.8.2 "
    "scipy==1.11.2 pytz six tzdata"
)

_XARRAY = (
    "dask[array]==2022.8.1 numpy==1.23.0 packaging==23.1 pandas==1.5.3 pytest==7.4.0 python-dateutil==2.8.2 "
    "pytz==2023.3 scipy==1.11.1 setuptools==68.0.0 six==1.16.0"
)

PROJECTS = {
    "django/django": _Project("django", _before("3.0", "3.9", "3.11"), lambda _: _DJANGO, _django),
    "mwaskom/seaborn": _Project("seaborn", lambda _: "3.9", lambda _: tuple(_SEABORN.split()), _pytest),
    "pallets/flask": _Project("flask", lambda _: "3.11", _flask, _pytest, "src"),
    "psf/requests": _Project(
        "requests",
        lambda _: "3.9",
        lambda _: ("pytest==7.4.4", "httpbin==0.10.2", "flask<3", "werkzeug<3"),
        _pytest,
        httpbin=True,
    ),
    "pydata/xarray": _Project("xarray", lambda _: "3.10", lambda _: tuple(_XARRAY.split()), _pytest, install_self=True),
    "pytest-dev/pytest": _Project(
        "pytest", _before("6.2.5", "3.9", "3.11"), _pytests_own, _old_pytest, "src", install_self=True
    ),
    "sphinx-doc/sphinx": _Project("sphinx", _before("4", "3.9", "3.11"), _sphinx, _pytest, install_self=True),
    "sympy/sympy": _Project(
        "sympy",
        _before("1.5", "3.9", "3.11"),
        lambda _: ("mpmath==1.3.0",),
        lambda files: ("python", "-c", SYMPY, *files),
    ),
}


def propose(record: TaskRecord, store: Store, tools: Tools) -> Recipe:
    """A recipe for a row of the benchmark. Raises NoRecipe, or PatchDoesNotApply if no release fits."""
    project = PROJECTS.get(record.repo)
    if project is None:
        known = ", ".join(sorted(PROJECTS))
        raise NoRecipe(
            f"{record.instance_id} does not say how to build it (`build`), and recipes are known for {known} only; "
            "with podman or docker it can be played in its image (`pearl env --backend docker …`)"
        )
    tried = []
    for version in _versions(project.package, record):
        requirement = f"{project.package}=={version}"
        try:
            tree = store.make("sdists", f"{project.package}-{version}", partial(_fetch, requirement, tools))
            for patch in (record.test_patch, record.patch):
                apply_patch(tree, patch, tools, fuzz=False)
        except (PatchDoesNotApply, BuildFailed):
            tried.append(str(version))
            continue
        files = [part.path for part in parse_patch(record.test_patch) if not part.path.endswith(NOT_TESTS)]
        return Recipe(
            sdist=requirement,
            python=project.python(version),
            deps=project.deps(version),
            install_self=project.install_self,
            pythonpath=project.pythonpath,
            test_cmd=project.command(files),
            httpbin=project.httpbin,
        )
    raise PatchDoesNotApply(
        f"the patches of {record.instance_id} apply to no sdist of {project.package} ({', '.join(tried)})"
    )


def _fetch(requirement: str, tools: Tools, target: Path) -> None:
    archive = target / "archive"
    archive.mkdir()
    unpack(download_sdist(requirement, archive, tools), target)
    for part in archive.iterdir():
        part.unlink()
    archive.rmdir()


def _versions(package: str, record: TaskRecord) -> Iterator[Version]:
    """Releases before the task, newest first, then the first ones after it."""
    index = os.environ.get("PIP_INDEX_URL") or "https://pypi.org/simple"
    finder = PackageFinder(index_urls=[index], no_binary=[":all:"], ignore_compatibility=True)
    try:
        found = {Version(p.version): p.link.upload_time for p in finder.find_all_packages(package) if p.version}
    except (UnpackError, OSError, ValueError) as error:
        raise BuildFailed(f"the releases of {package} cannot be listed: {error}") from error
    when = _date(record.created_at)
    own = Version(match[0]) if (match := re.match(r"\d+(\.\d+)*", record.version)) else None
    if when is None and own is None:
        raise NoRecipe(f"{record.instance_id} has neither created_at nor version, so no release is close to it")
    if when is not None:
        dated = sorted((uploaded, version) for version, uploaded in found.items() if uploaded is not None)
        earlier = [version for uploaded, version in dated if uploaded <= when][::-1]
        later = [version for uploaded, version in dated if uploaded > when]
    else:
        assert own is not None
        earlier = [version for series in _series(v for v in found if v < own) for version in series]
        later = sorted(version for version in found if version >= own)
    yield from earlier[:BEFORE]
    yield from later[:AFTER]


def _series(versions: Iterable[Version]) -> Iterator[list[Version]]:
    """Of each line (4.2), newest first: its first alpha, where the next line's commits begin, the last, the first."""
    lines: dict[tuple[int, ...], list[Version]] = {}
    for version in sorted(versions, reverse=True):
        lines.setdefault(version.release[:2], []).append(version)
    for line in lines.values():
        finals = [version for version in line if not version.is_prerelease]
        yield list(dict.fromkeys([line[-1], line[0], *finals[-1:]]))


def _date(text: str) -> datetime | None:
    try:
        found = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    return found if found.tzinfo else found.astimezone()
