from datetime import UTC, datetime
from pathlib import Path

import pytest
from packaging.version import Version

from envs.swebench import builder as builder_module
from envs.swebench import recipes
from envs.swebench.builder import Builder
from envs.swebench.errors import NoRecipe, PatchDoesNotApply
from envs.swebench.faults import diff
from envs.swebench.recipes import PROJECTS, propose
from envs.swebench.record import TaskRecord
from envs.swebench.store import Store
from envs.swebench.tools import Tools
from pearl.config.swebench import SwebenchConfig

RELEASES = {
    "1.0": "2020-01-01", "1.1a1": "2020-06-01", "1.1": "2020-07-01", "1.1.1": "2020-08-01", "1.2a1": "2020-10-01",
    "1.2": "2020-11-01", "1.0.1": "2020-12-01",
}  # fmt: skip


def row(**changes: object) -> TaskRecord:
    fields = {
        "instance_id": "pallets__flask-1",
        "repo": "pallets/flask",
        "problem_statement": "x",
        "patch": diff("src/a.py", "old\n", "new\n"),
        "test_patch": diff("tests/test_a.py", "old\n", "new\n") + diff("tests/data.json", "{}\n", "[]\n"),
    }
    return TaskRecord.model_validate({**fields, **changes})


class Finder:
    def __init__(self, **_: object) -> None: ...

    def find_all_packages(self, _: str) -> list[object]:
        def package(version: str, date: str) -> object:
            link = type("Link", (), {"upload_time": datetime.fromisoformat(date).replace(tzinfo=UTC)})
            return type("Package", (), {"version": version, "link": link})

        return [package(*release) for release in RELEASES.items()]


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({"created_at": "2020-09-15T00:00:00Z"}, ["1.1.1", "1.1", "1.1a1", "1.0", "1.2a1", "1.2", "1.0.1"]),
        ({"version": "1.2"}, ["1.2a1", "1.1a1", "1.1.1", "1.1", "1.0", "1.0.1", "1.2"]),
    ],
)
def test_releases_close_to_the_task_come_first(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], first: list[str]
) -> None:
    monkeypatch.setattr(recipes, "PackageFinder", Finder)
    assert [str(version) for version in recipes._versions("flask", row(**changes))] == first


def test_the_first_release_to_which_both_patches_apply_is_taken(
    monkeypatch: pytest.MonkeyPatch, directory: Path
) -> None:
    texts = {
        "1.0": ("old\n", "other\n"),
        "1.1": ("other\n", "old\n"),
        "1.2": ("old\n", "old\n"),
        "1.3": ("old\n", "old\n"),
    }

    def fetch(requirement: str, _: Tools, target: Path) -> None:
        source, test = texts[requirement.partition("==")[2]]
        for name, text in (("src/a.py", source), ("tests/test_a.py", test), ("tests/data.json", "{}\n")):
            (target / name).parent.mkdir(exist_ok=True)
            (target / name).write_text(text)

    monkeypatch.setattr(recipes, "_versions", lambda *_: [Version(text) for text in texts])
    monkeypatch.setattr(recipes, "_fetch", fetch)
    store, tools = Store(directory / "store", 10**9, 60.0), Tools.within(60.0)
    recipe = propose(row(), store, tools)
    assert recipe.sdist == "flask==1.2" and recipe.pythonpath == "src"
    assert recipe.test_cmd[-1] == "tests/test_a.py" and "data.json" not in " ".join(recipe.test_cmd)
    with pytest.raises(PatchDoesNotApply, match=r"1\.0, 1\.1, 1\.2, 1\.3"):
        propose(row(patch=diff("src/a.py", "never\n", "new\n")), store, tools)


def test_unknown_repositories_are_named(directory: Path) -> None:
    with pytest.raises(NoRecipe, match="pallets__flask-1 does not say"):
        propose(row(repo="me/mine"), Store(directory / "store", 10**9, 60.0), Tools.within(60.0))


@pytest.mark.parametrize("repo", sorted(PROJECTS))
def test_every_project_has_a_recipe_for_every_version(repo: str) -> None:
    project = PROJECTS[repo]
    for version in map(Version, ("0.1", "1.4", "2.2", "3.4.1", "4.5.0", "5.1", "6.2.5", "7.4", "9.0")):
        assert project.python(version) in ("3.9", "3.10", "3.11") and project.deps(version)
    assert project.command(["tests/test_a.py"])[0] == "python"


@pytest.mark.parametrize(("repo", "proposed"), [("pallets/flask", True), ("some/other", False)])
def test_a_row_that_names_its_image_is_built_where_a_recipe_is_known(
    monkeypatch: pytest.MonkeyPatch, directory: Path, repo: str, proposed: bool
) -> None:
    asked = []

    def propose_none(record: TaskRecord, *_: object) -> None:
        asked.append(record.repo)
        raise PatchDoesNotApply("no release")

    monkeypatch.setattr(builder_module, "propose", propose_none)
    builder = Builder(SwebenchConfig(cache=str(directory / "cache")))
    try:
        with pytest.raises(PatchDoesNotApply if proposed else NoRecipe):
            builder.build(row(repo=repo, build={"image": "swebench/x"}))
    finally:
        builder.close()
    assert asked == [repo] * proposed


def test_old_pytests_report_what_passes() -> None:
    assert "-rAfEsxXp" in PROJECTS["pytest-dev/pytest"].command(["testing/test_a.py"])
    assert "-rA" in PROJECTS["pydata/xarray"].command(["xarray/tests/test_a.py"])
