"""The few that need PyPI: an sdist and one small package."""

from pathlib import Path

import pytest

from envs.sandbox.backend import BubblewrapBackend
from envs.swebench.builder import Builder
from envs.swebench.errors import BuildFailed
from envs.swebench.load import load_tasks
from envs.swebench.mutate import find_recipe, mutate
from envs.swebench.validate import validate
from tests.envs.swebench.conftest import PYTHON

EXAMPLES = Path(__file__).parents[3] / "examples"
pytestmark = [pytest.mark.network, pytest.mark.slow]


async def test_a_mutation_of_a_package_is_valid_and_the_same_for_a_seed(
    builder: Builder, roomy: BubblewrapBackend
) -> None:
    recipe = find_recipe("itsdangerous==2.1.2", PYTHON, ["pytest", "freezegun"], "tests", 60.0)
    assert recipe.pythonpath == "src" and recipe.deps == ("pytest", "freezegun")
    made = mutate(recipe, builder, roomy, seed=0, count=1, tries=8, test_s=60.0)
    [record] = [outcome.record async for outcome in made if outcome.record is not None]
    found = await validate(record, builder, roomy, runs=1, test_s=60.0)
    assert found.valid and found.reason == "", found
    assert set(found.record.fail_to_pass) == set(record.fail_to_pass)
    [shipped, *_] = load_tasks(str(EXAMPLES / "swebench.jsonl"))
    assert record.patch == shipped.patch


def test_an_sdist_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(BuildFailed, match=r"iniconfig==0\.0\.999"):
        find_recipe("iniconfig==0.0.999", PYTHON, [], "tests", 60.0)
