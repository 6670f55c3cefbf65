import pytest

from pearl.config.trainer import ScheduleConfig
from trainer.schedule import learning_rate_ratio


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]),
        ("cosine", [0.5, 1.0, 0.2 + 0.8 * 0.8535533906, 0.6, 0.2 + 0.8 * 0.1464466094, 0.2, 0.2]),
    ],
)
def test_values_by_hand(kind: str, expected: list[float]) -> None:
    schedule = ScheduleConfig.model_validate({"kind": kind, "warmup_steps": 2, "min_ratio": 0.2})
    got = [learning_rate_ratio(step, 6, schedule) for step in range(1, 8)]
    assert got == pytest.approx(expected)


def test_without_warm_up_the_first_step_is_near_the_peak() -> None:
    assert learning_rate_ratio(1, 10, ScheduleConfig(kind="linear")) == pytest.approx(0.9)
    assert learning_rate_ratio(1, 10, ScheduleConfig()) == 1.0


def test_warm_up_longer_than_the_run_never_reaches_the_peak() -> None:
    assert learning_rate_ratio(3, 3, ScheduleConfig(kind="cosine", warmup_steps=6)) == 0.5


def test_steps_count_from_one() -> None:
    with pytest.raises(ValueError, match="counted from 1"):
        learning_rate_ratio(0, 10, ScheduleConfig())
