"""The Runtime Tracker: it finds the costs that telemetry was made with, and forgets neither too much nor too little."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pearl.core import events as ev
from pearl.core.profile import RuntimeTracker, TrackerSettings
from pearl.core.telemetry import TurnTelemetry
from pearl.core.trajectory import FinishReason, SampleId, StopReason, TrajectoryId
from pearl.core.workload import EngineProfile, Profile, TurnShape, WorkloadProfile

TRUE = EngineProfile(
    prefill_fixed_s=0.006,
    prefill_s_per_token=18e-6,
    prefill_s_per_token2=1e-9,
    decode_fixed_s=0.0066,
    decode_s_per_sequence=40e-6,
    decode_s_per_kv_token=47e-9,
    kv_bytes_per_token=147_456,
    kv_capacity_tokens=340_000,
    transfer_bytes_per_s=20e9,
    transfer_latency_s=0.004,
)
FAR = replace(
    TRUE,
    prefill_fixed_s=0.1,
    prefill_s_per_token=1e-3,
    prefill_s_per_token2=1e-8,
    decode_fixed_s=0.5,
    decode_s_per_sequence=1e-3,
    decode_s_per_kv_token=1e-6,
    transfer_bytes_per_s=1e9,
    transfer_latency_s=0.1,
)
WORK = WorkloadProfile(
    (TurnShape(1.0, 1000.0, 200.0, 1.0, 0.0), TurnShape(0.5, 500.0, 200.0, 1.0, 1200.0)), 2, 800, 200, 1.0
)


def prefill_s(e: EngineProfile, new: float, cached: float) -> float:
    return e.prefill_fixed_s + e.prefill_s_per_token * new + e.prefill_s_per_token2 * new * (new / 2 + cached)


def step_s(e: EngineProfile, batch: float, kv: float) -> float:
    experts = e.expert_fixed_s * (1 - (1 - e.expert_share) ** batch)
    return e.decode_fixed_s + e.decode_s_per_sequence * batch + e.decode_s_per_kv_token * kv + experts


def telemetry(
    e: EngineProfile, new: int, cached: int, batch: float, kv: float, tokens: int, noise: float
) -> TurnTelemetry:
    return TurnTelemetry(
        prompt_tokens=new + cached,
        cached_tokens=cached,
        prefill_s=prefill_s(e, new, cached) * noise,
        decode_s=step_s(e, batch, kv) * (tokens - 1) * noise,
        decode_batch=batch,
        decode_kv_tokens=kv,
        transfer_bytes=int(new * e.kv_bytes_per_token),
        transfer_s=(e.transfer_latency_s + new * e.kv_bytes_per_token / e.transfer_bytes_per_s) * noise,
    )


def turn(tracker: RuntimeTracker, sample: TurnTelemetry, tokens: int = 101) -> None:
    """A turn of a trajectory that the tracker does not know: only the engine's costs count."""
    event = ev.TurnGenerated(TrajectoryId(0, 0, 0), "rollout-0", 1, tokens, 0, FinishReason.STOP, telemetry=sample)
    tracker.observe(event, 0.0)


def varied(tracker: RuntimeTracker, engine: EngineProfile, samples: int, seed: int = 1) -> None:
    draw = random.Random(seed)
    for _ in range(samples):
        batch = draw.choice((1, 2, 4, 8, 16, 32, 64))
        kv = batch * draw.uniform(1000, 20_000)
        new, cached = int(draw.lognormvariate(6.5, 1)) + 1, draw.randrange(0, 30_000)
        turn(tracker, telemetry(engine, new, cached, batch, kv, 101, draw.lognormvariate(0, 0.1)))


def close(found: EngineProfile, true: EngineProfile, share: float) -> None:
    for new, cached in ((100, 0), (2000, 8000), (500, 25_000)):
        assert prefill_s(found, new, cached) == pytest.approx(prefill_s(true, new, cached), rel=share)
    for batch, kv in ((1, 5000), (16, 200_000), (64, 500_000)):
        assert step_s(found, batch, kv) == pytest.approx(step_s(true, batch, kv), rel=share)
    assert found.transfer_bytes_per_s == pytest.approx(true.transfer_bytes_per_s, rel=0.1)


def test_the_costs_behind_noisy_telemetry_are_found_though_the_prior_is_far_off() -> None:
    tracker = RuntimeTracker(Profile(FAR, WORK))
    varied(tracker, TRUE, 2000)
    found = tracker.profile().engine
    close(found, TRUE, 0.06)
    assert found.decode_s_per_kv_token == pytest.approx(TRUE.decode_s_per_kv_token, rel=0.15)
    assert found.prefill_s_per_token == pytest.approx(TRUE.prefill_s_per_token, rel=0.1)


def test_the_cost_of_experts_is_told_from_that_of_sequences() -> None:
    true = replace(TRUE, expert_fixed_s=0.0144, expert_share=1 / 16)
    tracker = RuntimeTracker(Profile(replace(true, expert_fixed_s=0.03, decode_fixed_s=0.02), WORK))
    varied(tracker, true, 2000)
    close(tracker.profile().engine, true, 0.06)
    assert tracker.profile().engine.expert_fixed_s == pytest.approx(0.0144, rel=0.2)


def test_steady_traffic_does_not_erase_what_other_traffic_showed() -> None:
    tracker = RuntimeTracker(Profile(FAR, WORK))
    varied(tracker, TRUE, 500)
    for _ in range(20_000):
        turn(tracker, telemetry(TRUE, 400, 6000, 8, 60_000, 101, 1.0))
    close(tracker.profile().engine, TRUE, 0.08)


def test_one_kind_of_traffic_keeps_the_shape_of_the_prior() -> None:
    """What cannot be told apart is split as the prior splits it, at the measured size."""
    slower = replace(
        TRUE,
        decode_fixed_s=TRUE.decode_fixed_s * 3,
        decode_s_per_sequence=TRUE.decode_s_per_sequence * 3,
        decode_s_per_kv_token=TRUE.decode_s_per_kv_token * 3,
    )
    tracker = RuntimeTracker(Profile(TRUE, WORK))
    for _ in range(400):
        turn(tracker, telemetry(slower, 400, 6000, 8, 60_000, 101, 1.0))
    found = tracker.profile().engine
    assert step_s(found, 8, 60_000) == pytest.approx(step_s(slower, 8, 60_000), rel=0.02)
    assert step_s(found, 32, 300_000) == pytest.approx(step_s(slower, 32, 300_000), rel=0.1)


def test_a_drift_is_followed() -> None:
    tracker = RuntimeTracker(Profile(TRUE, WORK))
    varied(tracker, TRUE, 3000)
    slower = replace(TRUE, prefill_s_per_token=TRUE.prefill_s_per_token * 2, prefill_fixed_s=TRUE.prefill_fixed_s * 2)
    varied(tracker, slower, 8000, seed=2)
    found = tracker.profile().engine
    assert prefill_s(found, 800, 8000) == pytest.approx(prefill_s(slower, 800, 8000), rel=0.1)


def test_what_was_not_measured_is_left_out() -> None:
    tracker = RuntimeTracker(Profile(TRUE, WORK))
    turn(tracker, TurnTelemetry(prompt_tokens=100, cached_tokens=20))
    turn(tracker, TurnTelemetry(prompt_tokens=100, cached_tokens=20, decode_s=1.0, decode_batch=-1))
    turn(tracker, TurnTelemetry(prompt_tokens=100, cached_tokens=-1, prefill_s=1.0))
    turn(tracker, TurnTelemetry(prompt_tokens=100, cached_tokens=100, prefill_s=1.0))
    turn(
        tracker,
        TurnTelemetry(prompt_tokens=9, cached_tokens=0, decode_s=1.0, decode_batch=1, decode_kv_tokens=1),
        tokens=1,
    )
    assert tracker.profile().engine == TRUE
    assert tracker.profile().workload.confidence["decode"] == 0.0


def test_before_anything_was_seen_there_is_the_prior() -> None:
    profile = RuntimeTracker(Profile(TRUE, WORK)).profile()
    assert profile.engine == TRUE
    assert [turn.survivors for turn in profile.workload.turns] == pytest.approx([1.0, 0.5])
    assert profile.workload.bubble_ratio == pytest.approx(WORK.bubble_ratio)
    assert profile.workload.slowest_turns == WORK.slowest_turns
    assert set(profile.workload.confidence.values()) == {0.0}


class Batch:
    """Trajectories played in a clock of their own."""

    def __init__(self, tracker: RuntimeTracker) -> None:
        self.tracker, self.now, self.group = tracker, 0.0, 0

    def play(
        self,
        turns: list[int],
        new: int = 400,
        response: int = 100,
        environment_s: float = 3.0,
        decode_s: float = 1.0,
        stay: bool = True,
        flush: bool = False,
        train: bool = True,
        finish: bool = True,
        scoring_s: float = 0.0,
    ) -> None:
        ids = [TrajectoryId(self.group, member, 0) for member in range(len(turns))]
        self.group += 1
        see = self.tracker.observe
        for trajectory, count in zip(ids, turns, strict=True):
            see(ev.EnvironmentOpened(trajectory, new), self.now)
            for k in range(count):
                worker = "rollout-0" if stay else f"rollout-{k}"
                see(ev.Generate(trajectory, worker, 1, k if flush else 0, 500), self.now)
                self.now += decode_s
                context = k * (new + response)
                cached = context if stay and not flush else 0
                sample = TurnTelemetry(context + new, cached, decode_s=decode_s)
                see(ev.TurnGenerated(trajectory, worker, 1, response, 0, FinishReason.STOP, telemetry=sample), self.now)
                see(ev.StepEnvironment(trajectory, "environment-0"), self.now)
                self.now += environment_s
                last = k + 1 == count
                if last and not finish:
                    break
                stop = StopReason.SUBMITTED if last else None
                see(ev.EnvironmentStepped(trajectory, 0 if last else new, stop, environment_s), self.now)
                if last:
                    see(ev.ScoreTrajectory(trajectory, "environment-0", StopReason.SUBMITTED, count), self.now)
                    self.now += scoring_s
                    see(ev.TrajectoryScored(trajectory, 1.0), self.now)
        if train:
            see(ev.TrainBatch(self.group, (tuple(ids),)), self.now)
            see(ev.BatchTrained(self.group), self.now)


def test_the_workload_of_a_batch_is_what_was_played() -> None:
    tracker = RuntimeTracker(Profile(TRUE, WORK))
    batch = Batch(tracker)
    for _ in range(12):
        batch.play([1, 2, 4, 4] * 8)
    work = tracker.profile().workload
    assert [turn.survivors for turn in work.turns][:4] == pytest.approx([1.0, 0.75, 0.5, 0.5], abs=0.02)
    assert sum(turn.survivors for turn in work.turns[4:]) < 0.01
    assert work.turns[2].context_tokens == pytest.approx(1000, rel=0.02)
    assert work.turns[2].environment_s == pytest.approx(3.0, rel=0.02)
    assert work.new_tokens_per_turn == pytest.approx(400, rel=0.02)
    assert work.response_tokens_per_turn == pytest.approx(100, rel=0.02)
    assert work.slowest_turns == 4
    assert work.group_size == 32
    assert work.bubble_ratio == pytest.approx(3.0, rel=0.05)
    assert work.prefix_hit_rate == pytest.approx(1.0)
    assert work.final_context_tokens == pytest.approx(2.75 * 500, rel=0.03)
    assert tracker.environment_times.quantile(0.5) == pytest.approx(3.0, rel=0.1)


def test_those_in_flight_are_counted_over_time() -> None:
    tracker = RuntimeTracker(Profile(TRUE, WORK))
    batch = Batch(tracker)
    assert tracker.profile().workload.in_flight == 0.0
    for _ in range(30):
        batch.play([2, 2, 2], scoring_s=8.0)  # one at a time lives for 8 s and is scored for 8 s
    assert tracker.profile().workload.in_flight == pytest.approx(0.5, rel=0.02)


def test_overlapping_batches_load_the_workers_as_a_larger_one_would() -> None:
    turns = (replace(WORK.turns[0], survivors=1.0), replace(WORK.turns[0], survivors=0.5))
    work = replace(WORK, turns=turns, slowest_turns=2.0)  # of a batch that is alone, three quarters live on average
    assert work.load(16) == 16
    assert replace(work, in_flight=48.0).load(16) == pytest.approx(64)
    assert replace(work, in_flight=3.0).load(16) == 16


def test_scoring_is_nobody_s_turn() -> None:
    quick, slow = (RuntimeTracker(Profile(TRUE, WORK)) for _ in range(2))
    for _ in range(5):
        Batch(quick).play([2, 4] * 8)
        Batch(slow).play([2, 4] * 8, scoring_s=500.0)
    assert slow.profile() == quick.profile()


def test_trajectories_that_go_on_do_not_make_the_curve_look_short() -> None:
    tracker = RuntimeTracker(Profile(TRUE, WORK))
    batch = Batch(tracker)
    for _ in range(6):
        batch.play([1] * 8, train=False)
        batch.play([6] * 8, train=False, finish=False)
    survivors = [turn.survivors for turn in tracker.profile().workload.turns]
    assert survivors[1:6] == pytest.approx([0.5] * 5, abs=0.03)


def test_a_workload_that_changes_is_followed_within_a_few_steps() -> None:
    tracker = RuntimeTracker(Profile(TRUE, WORK), TrackerSettings(step_retention=0.5))
    batch = Batch(tracker)
    for _ in range(10):
        batch.play([2] * 16)
    for _ in range(6):
        batch.play([6] * 16)
    work = tracker.profile().workload
    assert work.turns[5].survivors > 0.9
    assert work.slowest_turns > 5


def test_prefixes_that_new_weights_flushed_lower_the_hit_rate_and_moved_or_evicted_ones_do_not() -> None:
    kept, moved, flushed = (RuntimeTracker(Profile(TRUE, WORK)) for _ in range(3))
    for _ in range(10):
        Batch(kept).play([4] * 64)
        Batch(moved).play([4] * 64, stay=False)
        Batch(flushed).play([4] * 64, flush=True)
    assert kept.profile().workload.prefix_hit_rate == pytest.approx(1.0)
    assert moved.profile().workload.prefix_hit_rate == pytest.approx(1.0)
    assert flushed.profile().workload.prefix_hit_rate < 0.05


def test_an_interrupted_turn_is_one_turn() -> None:
    tracker = RuntimeTracker(Profile(TRUE, WORK))
    for number in range(100):
        trajectory = TrajectoryId(number, 0, 0)
        see = tracker.observe
        see(ev.EnvironmentOpened(trajectory, 400), 0.0)
        for version, finish in ((0, FinishReason.ABORT), (1, FinishReason.STOP)):
            see(ev.Generate(trajectory, "rollout-0", 1, version, 500), 0.0)
            see(ev.TurnGenerated(trajectory, "rollout-0", 1, 60, version, finish), 1.0)
        see(ev.StepEnvironment(trajectory, "environment-0"), 1.0)
        see(ev.EnvironmentStepped(trajectory, 0, StopReason.SUBMITTED, 1.0), 2.0)
        see(ev.ScoreTrajectory(trajectory, "environment-0", StopReason.SUBMITTED, 1), 2.0)
        see(ev.TrajectoryScored(trajectory, 0.0), 2.0)
    assert tracker.profile().workload.turns[0].response_tokens == pytest.approx(120, rel=0.01)


def test_nothing_is_kept_of_a_trajectory_that_ended() -> None:
    tracker = RuntimeTracker(Profile(TRUE, WORK))
    batch = Batch(tracker)
    for _ in range(20):
        batch.play([1, 3] * 4)
    lost = TrajectoryId(999, 0, 0)
    tracker.observe(ev.EnvironmentOpened(lost, 10), 0.0)
    tracker.observe(ev.DiscardTrajectory(lost, "gone"), 0.0)
    batch.play([2], train=False)
    scored = TrajectoryId(batch.group - 1, 0, 0)
    tracker.observe(ev.EndSample(SampleId(scored.group, 0), scored, ev.Outcome.STALE, "late"), 0.0)
    assert tracker.live_trajectories == 0
    assert not tracker._turns
