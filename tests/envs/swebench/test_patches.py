import pytest

from envs.swebench.patches import Guard, PatchError, keep_files, parse_patch

TWO = """diff --git a/src/a.py b/src/a.py
index 1..2 100644
--- a/src/a.py
+++ b/src/a.py
@@ -1 +1,2 @@
 x
+y
diff --git a/conftest.py b/conftest.py
new file mode 100644
--- /dev/null
+++ b/conftest.py
@@ -0,0 +1 @@
+import os
diff --git a/old.txt b/new.txt
similarity index 100%
rename from old.txt
rename to new.txt
diff --git a/gone.py b/gone.py
deleted file mode 100644
--- a/gone.py
+++ /dev/null
@@ -1 +0,0 @@
-x
"""


def test_a_patch_is_split_by_file() -> None:
    parts = parse_patch(TWO)
    assert [(p.path, p.old_path, p.deleted) for p in parts] == [
        ("src/a.py", "src/a.py", False),
        ("conftest.py", None, False),
        ("new.txt", "old.txt", False),
        ("gone.py", "gone.py", True),
    ]
    assert parts[0].added == ["y"]
    assert "".join(p.text for p in parts) == TWO


def test_hunks_of_dropped_files_go() -> None:
    kept = keep_files(TWO, ["conftest.py", "old.txt"])
    assert [part.path for part in parse_patch(kept)] == ["src/a.py", "gone.py"]


def test_a_patch_without_git_headers() -> None:
    assert [p.path for p in parse_patch("--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-a\n+b\n")] == ["x.py"]


@pytest.mark.parametrize(
    "text",
    [
        "just words",
        "diff --git a/../x b/../x\n--- a/../x\n+++ b/../x\n@@ -1 +1 @@\n-a\n+b\n",
        "--- /etc/passwd\n+++ /etc/passwd\n@@ -1 +1 @@\n-a\n+b\n",
    ],
)
def test_what_is_no_patch_or_leaves_the_repository_is_refused(text: str) -> None:
    with pytest.raises(PatchError):
        parse_patch(text)


GUARD = Guard.of(
    ["tests/unit/test_a.py", "test_top.py"], own=["setup.cfg", "tests/unit/data.py", "tests/unit/test_a.py"]
)


@pytest.mark.parametrize(
    "path",
    [
        "tests/unit/test_a.py",
        "tests/helpers.py",
        "tests",
        "test_top.py",
        "conftest.py",
        "src/deep/conftest.py",
        "pytest.ini",
        "tox.ini",
        "pyproject.toml",
        "sitecustomize.py",
        "src/evil.pth",
        "src/__pycache__/a.cpython-311.pyc",
        "src/pkg.egg-info/entry_points.txt",
        "src/fast.so",
        ".git/hooks/post-checkout",
        "CONFTEST.PY",
    ],
)
def test_what_decides_how_tests_run_does_not_count(path: str) -> None:
    assert GUARD.drops(path, new=False)


@pytest.mark.parametrize("path", ["src/a.py", "setup.cfg", "tests/unit/data.py", "docs/conf.py", "testing.py"])
def test_source_counts_and_so_does_what_the_gold_patch_touches(path: str) -> None:
    assert not GUARD.drops(path, new=False)


@pytest.mark.parametrize("path", ["pytest.py", "src/pytest/__init__.py", "_pytest/main.py", "unittest/case.py"])
def test_new_modules_cannot_stand_in_for_the_test_framework(path: str) -> None:
    assert GUARD.drops(path, new=True)
    assert not GUARD.drops(path, new=False)


def test_a_test_at_the_top_does_not_protect_the_whole_repository() -> None:
    assert not Guard.of(["test_top.py"], own=()).drops("module.py", new=True)


def test_new_modules_cannot_stand_in_for_what_is_installed() -> None:
    guard = Guard.of([], own=["src/json.py"], stand_ins=["src/json", "src/typing", "attr"])
    assert guard.drops("src/typing.py", new=True) and guard.drops("src/typing/deep/a.py", new=True)
    assert guard.drops("attr/__init__.py", new=True)
    assert not guard.drops("src/json.py", new=True)
    assert not guard.drops("src/package/typing.py", new=True) and not guard.drops("src/types.py", new=True)
