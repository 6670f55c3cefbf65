from tests.envs.conftest import directory

__all__ = ["directory"]
