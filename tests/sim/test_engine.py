"""The engine model: batching, memory, prefixes, pairs, interruption."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.core.layout import Layout, Role
from pearl.core.trajectory import FinishReason, TrajectoryId
from pearl.sim.batch import run_batch
from pearl.sim.costs import DecodeRun, decode_s
from pearl.sim.engine import Engine, EngineOptions
from tests.sim.support import PROFILE, SMALL, Bench


class SteppingEngine(Engine):
    """Decodes one iteration at a time."""

    def _begin_decode(self) -> None:
        super()._begin_decode()
        if self._run is not None:
            self._steps = 1
            self._wake_at(self._since + decode_s(self.profile, len(self.running), self.contexts))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_coalesced_iterations_take_as_long_as_one_by_one(seed: int) -> None:
    ends = []
    for kind in (Engine, SteppingEngine):
        rng = random.Random(seed)
        bench = Bench()
        engine = bench.engine(kind=kind)
        for member in range(12):
            context, wanted = rng.randint(10, 20_000), rng.randint(1, 400)
            bench.ask(engine, member, context, wanted, at=rng.uniform(0, 3))
        bench.play()
        ends.append({t: end for t, (end, _, _) in bench.done.items()})
    assert len(ends[0]) == 12
    for trajectory, end in ends[0].items():
        assert end == pytest.approx(ends[1][trajectory], rel=1e-3)


@given(batch=st.integers(1, 256), kv=st.integers(0, 10**6), steps=st.integers(1, 2000))
def test_iterations_in_a_time_are_the_inverse_of_the_time_of_iterations(batch: int, kv: int, steps: int) -> None:
    run = DecodeRun(PROFILE, batch, kv)
    assert run.within(run.seconds(steps)) == pytest.approx(steps, rel=1e-6)


def test_one_request_takes_its_prefill_and_its_iterations() -> None:
    bench = Bench()
    t = bench.ask(bench.engine(), 0, 1000, 101)
    bench.play()
    prefill = 2e-3 + 1000 * 10e-6 + 0.5e-9 * 1000 * 500
    decode = sum(decode_s(PROFILE, 1, 1001 + i) for i in range(100))
    assert bench.done[t][0] == pytest.approx(prefill + decode)
    told = bench.telemetry[t]
    assert told.prefill_s == pytest.approx(prefill)
    assert told.decode_s == pytest.approx(decode)
    assert (told.cached_tokens, told.decode_batch) == (0, 1.0)
    assert told.decode_kv_tokens == pytest.approx(1001 + 99 / 2)


def test_a_prefill_blocks_the_decoding_of_others() -> None:
    alone, crowded = Bench(), Bench()
    quiet = alone.ask(alone.engine(), 0, 100, 50)
    alone.play()
    engine = crowded.engine()
    disturbed = crowded.ask(engine, 0, 100, 50)
    crowded.ask(engine, 1, 30_000, 2, at=0.1)
    crowded.play()
    prefill = crowded.telemetry[TrajectoryId(0, 1, 0)].prefill_s
    assert crowded.done[disturbed][0] > alone.done[quiet][0] + 0.9 * prefill


def test_the_next_turn_finds_its_prefix_and_a_group_its_prompt() -> None:
    bench = Bench()
    engine = bench.engine()
    first = bench.ask(engine, 0, 500, 20, shared=400)
    bench.ask(engine, 1, 450, 20, shared=400, at=10)
    bench.play()
    assert bench.telemetry[TrajectoryId(0, 1, 0)].cached_tokens == 400
    bench.again(first)
    bench.ask(engine, 0, 600, 20, shared=400, at=bench.clock.now)
    bench.play()
    assert bench.telemetry[first].cached_tokens == 520


def test_the_least_recently_used_prefix_is_evicted() -> None:
    bench = Bench()
    engine = bench.engine()
    engine.kv.capacity = 2500
    for member in range(3):
        bench.ask(engine, member, 1000, 2, at=member)
    bench.play()
    assert [engine.kv.cached(TrajectoryId(0, m, 0)) for m in range(3)] == [0, 1002, 1002]


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), role=st.sampled_from([Role.COLOCATED, Role.DECODE]))
def test_memory_is_never_overrun_and_every_request_ends_once(seed: int, role: Role) -> None:
    rng = random.Random(seed)
    bench = Bench()
    engine, sender = bench.engine("w", role), bench.engine("p", Role.PREFILL)
    engine.kv.capacity = 3000
    wanted = {}
    for member in range(20):
        prefill = sender if role is Role.DECODE else None
        tokens = rng.randint(1, 900)
        shared = rng.choice([0, 80])
        t = bench.ask(engine, member % 5, rng.randint(100, 1500), tokens, at=rng.uniform(0, 5), shared=shared,
                      group=1 + member // 5, prefill=prefill)  # fmt: skip
        wanted[t] = tokens
    while bench.clock.advance(1e9):
        kv = engine.kv
        assert kv.used <= kv.capacity
        assert 0 <= kv.idle_tokens <= kv.used
        assert kv.idle_tokens == sum(kv.idle.values())
    assert {t: tokens for t, (_, tokens, finish) in bench.done.items() if finish is FinishReason.STOP} == wanted
    assert not engine.requests and not sender.requests and not engine.kv.held and not sender.kv.held


def test_a_context_that_cannot_fit_fails_at_once() -> None:
    bench = Bench()
    t = bench.ask(bench.engine(), 0, 400_000, 5)
    bench.play()
    assert bench.done[t][1:] == (0, FinishReason.FAILED)


def test_transfers_of_one_sender_follow_each_other() -> None:
    bench = Bench(profile=replace(PROFILE, transfer_bytes_per_s=5e9))
    sender = bench.engine("p", Role.PREFILL)
    receivers = [bench.engine(f"d{i}", Role.DECODE) for i in range(2)]
    other = bench.engine("q", Role.PREFILL)
    for member in range(2):  # to different workers, and prefilled faster than they cross
        bench.ask(receivers[member], member, 4000, 5, prefill=sender)
    bench.ask(bench.engine("d2", Role.DECODE), 2, 8000, 5, prefill=other)
    bench.play()
    crossing = 2e-3 + 4000 * 147_456 / 5e9
    (first, a), (second, b), (third, c) = sorted(bench.handed, key=lambda h: h[1])
    assert [a[1], b[1], c[1]] == [0, 1, 2]
    assert second - first == pytest.approx(crossing)
    assert bench.telemetry[a].transfer_s == pytest.approx(crossing)
    assert bench.telemetry[a].transfer_bytes == 4000 * 147_456
    assert third < second + crossing, "the links of two senders do not wait for each other"


@pytest.mark.parametrize(
    ("options", "moved", "computed"),
    [
        (EngineOptions(), 720 - 620, 720 - 600),
        (EngineOptions(decode_keeps_kv=False), 720, 720 - 600),
        (EngineOptions(prefill_keeps_response=True), 720 - 620, 720 - 620),
    ],
)
def test_the_second_turn_of_a_pair_moves_and_computes_what_is_not_kept(
    options: EngineOptions, moved: int, computed: int
) -> None:
    bench = Bench(options)
    sender, receiver = bench.engine("p", Role.PREFILL), bench.engine("d", Role.DECODE)
    t = bench.ask(receiver, 0, 600, 20, prefill=sender)
    bench.play()
    bench.again(t)
    bench.ask(receiver, 0, 720, 20, prefill=sender, at=bench.clock.now)
    bench.play()
    told = bench.telemetry[t]
    assert told.transfer_bytes == moved * 147_456
    assert told.prompt_tokens - told.cached_tokens == computed


def test_an_abort_returns_what_was_generated() -> None:
    bench = Bench()
    engine = bench.engine()
    t = bench.ask(engine, 0, 100, 1000)
    waiting = bench.ask(engine, 1, 200_000, 10, at=0.999)
    bench.play(1.0)
    bench.clock.now = 1.0
    assert engine.interrupt(FinishReason.ABORT) == 0
    prefill = 2e-3 + 100 * 10e-6 + 0.5e-9 * 100 * 50
    assert bench.done[t][1] == 1 + int(DecodeRun(PROFILE, 1, 101).within(1.0 - prefill))
    assert bench.done[waiting][1:] == (0, FinishReason.ABORT)
    assert not engine.kv.held
    bench.play()
    assert len(bench.done) == 2, "nothing happens behind the abort"


def test_a_lost_prefill_half_ends_the_pair_and_frees_the_other_half() -> None:
    bench = Bench()
    sender, receiver = bench.engine("p", Role.PREFILL), bench.engine("d", Role.DECODE)
    t = bench.ask(receiver, 0, 30_000, 20, prefill=sender)
    bench.play(0.35)
    sender.interrupt(FinishReason.LOST)
    bench.play()
    assert bench.done[t][1:] == (0, FinishReason.LOST)
    assert not receiver.requests and not receiver.kv.held and not sender.kv.held


@pytest.mark.parametrize("layout", ["3C", "1P2D", "2P1D", "1C+1P1D"])
def test_a_batch_is_played_to_the_end_and_the_same_every_time(layout: str) -> None:
    runs = [run_batch(Layout.parse(layout), PROFILE, SMALL, 24, group_size=8) for _ in range(2)]
    assert runs[0] == runs[1]
    planned = [SMALL.plan(i // 8, TrajectoryId(i // 8, i % 8, 0)) for i in range(24)]
    assert runs[0].turns == sum(plan.turns for plan in planned)
    assert runs[0].generated_tokens == sum(sum(plan.response) for plan in planned)
