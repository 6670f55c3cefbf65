import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.swebench.parsers import Status, django, matplotlib, normalise, parser_for, pytest_options, sympy
from envs.swebench.parsers import pytest as parse_pytest

P, F, E, S, X = Status.PASSED, Status.FAILED, Status.ERROR, Status.SKIPPED, Status.XFAIL


def test_pytest_summary() -> None:
    log = """
tests/test_a.py ..F                                           [100%]
=========================== short test summary info ============================
PASSED tests/test_a.py::test_one
PASSED tests/test_a.py::test_two[a-b]
SKIPPED [2] tests/test_a.py:12: not here
XFAIL tests/test_a.py::test_three - known
ERROR tests/test_b.py - ImportError: no
FAILED tests/test_a.py::test_four - assert 1 == 2
FAILED tests/test_a.py::test_five
"""
    assert parse_pytest(log) == {
        "tests/test_a.py::test_one": P,
        "tests/test_a.py::test_two[a-b]": P,
        "tests/test_a.py::test_three": X,
        "tests/test_b.py": E,
        "tests/test_a.py::test_four": F,
        "tests/test_a.py::test_five": F,
    }


def test_pytest_verbose_and_colours() -> None:
    log = "tests/a.py::test_x PASSED    [ 50%]\n\x1b[31mFAILED\x1b[0m tests/a.py::\x1b[1mtest_y\x1b[0m - no\n"
    assert parse_pytest(log) == {"tests/a.py::test_x": P, "tests/a.py::test_y": F}


@pytest.mark.parametrize(
    "lines", [["PASSED t", "FAILED t"], ["FAILED t", "PASSED t"], ["ERROR t", "PASSED t", "FAILED t"]]
)
def test_of_two_verdicts_the_worse_one_holds(lines: list[str]) -> None:
    assert not parse_pytest("\n".join(lines))["t"].passes


def test_absolute_paths_in_parameters_are_shortened() -> None:
    log = "PASSED t.py::test_a[/tmp/x/y.txt]\nPASSED t.py::test_b[//host/x]\nPASSED t.py::test_c[a/b]"
    assert set(pytest_options(log)) == {"t.py::test_a[/y.txt]", "t.py::test_b[//host/x]", "t.py::test_c[a/b]"}


def test_matplotlib_buttons() -> None:
    assert set(matplotlib("PASSED t.py::test_a[MouseButton.LEFT]")) == {"t.py::test_a[1]"}


def test_django_of_all_pythons() -> None:
    log = """Testing against Django installed in '/testbed/django'
test_a (app.tests.Some) ... ok
test_b (app.tests.Some.test_b) ... FAIL
test_c (app.tests.Some)
What it is about. ... ok
test_d (app.tests.Some) ... skipped 'no database'
test_e (app.tests.Some) ... expected failure
test_f (app.tests.Some) ... Internal Server Error: /x/
ok
test_g (app.tests.Some) ... ERROR

======================================================================
FAIL: test_b (app.tests.Some.test_b)
"""
    assert django(log) == {
        "test_a (app.tests.Some)": P,
        "test_b (app.tests.Some)": F,
        "What it is about.": P,
        "test_d (app.tests.Some)": S,
        "test_e (app.tests.Some)": X,
        "test_f (app.tests.Some)": P,
        "test_g (app.tests.Some)": E,
    }


def test_django_subtests_leave_their_test_failed_and_hide_the_next_one_as_in_the_benchmark() -> None:
    log = """test_a (app.tests.Some) ... test_b (app.tests.Some) ... ok
FAIL: test_a (app.tests.Some) (case=1)
"""
    found = django(log)
    assert not found["test_a (app.tests.Some)"].passes and "test_b (app.tests.Some)" not in found


def test_sympy_runner() -> None:
    log = """sympy/core/tests/test_x.py[4]
test_a ok
test_b F
test_c E
test_d f
test_e ok                                                                 [FAIL]
test_g s

________________________________________________________________________________
___________________ sympy/core/tests/test_x.py:test_b ____________________
"""
    assert sympy(log) == {
        "test_a": P,
        "test_b": F,
        "test_c": E,
        "test_d": F,
        "test_e": P,
        "test_g": F,
        "sympy/core/tests/test_x.py:test_b": F,
    }


REPOSITORIES = [
    "astropy/astropy",
    "django/django",
    "matplotlib/matplotlib",
    "mwaskom/seaborn",
    "pallets/flask",
    "psf/requests",
    "pydata/xarray",
    "pylint-dev/pylint",
    "pytest-dev/pytest",
    "scikit-learn/scikit-learn",
    "sphinx-doc/sphinx",
    "sympy/sympy",
]


@pytest.mark.parametrize("repo", REPOSITORIES)
def test_every_repository_of_the_benchmark_has_a_parser(repo: str) -> None:
    log = {
        "django/django": "test_a (m.C) ... ok\ntest_b (m.C) ... FAIL\n",
        "sympy/sympy": "test_a ok\ntest_b F\n",
    }.get(repo, "PASSED t.py::test_a\nFAILED t.py::test_b - no\n")
    assert sorted(parser_for(repo)(log).values()) == [F, P]


def test_unknown_repositories_are_read_by_their_test_command() -> None:
    assert parser_for("me/mine", ("python", "-m", "unittest")) is django
    assert parser_for("me/mine", ("python", "-m", "pytest")) is parse_pytest


def test_names_are_the_same_whichever_python_ran() -> None:
    assert normalise("test_a (m.C.test_a)") == normalise("test_a (m.C)") == "test_a (m.C)"
    assert normalise("test_a (m.C.test_ab)") == "test_a (m.C.test_ab)"


def test_names_with_spaces_are_cut_in_lists_as_in_logs() -> None:
    log = "PASSED t.py::test_a[log(photon /cm2)]\nPASSED t.py::test_b[x - y]\nFAILED t.py::test_b[x + y] - no\n"
    found = parse_pytest(log)
    assert found == {"t.py::test_a[log(photon": P, "t.py::test_b[x": F}
    whole, cut = "t.py::test_a[log(photon /cm2)]", "t.py::test_a[log(photon"
    assert normalise(whole) == normalise(cut) and normalise(whole) in found
    assert normalise("It does a::b well.") == "It does a::b well."


@given(st.text())
def test_normalising_twice_changes_nothing_and_no_log_breaks_a_parser(text: str) -> None:
    assert normalise(normalise(text)) == normalise(text)
    for repo in REPOSITORIES:
        parser_for(repo)(text)
