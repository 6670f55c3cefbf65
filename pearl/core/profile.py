"""Runtime Tracker: telemetry in, a profile of the engine and of the workload out.

It sees every event and instruction of the machines and decides nothing. Work per entry does not grow with the number of
trajectories, and what it keeps of one goes when that one ends. From the first request on there is a profile: the prior,
which fades as evidence comes (`pearl/core/fit.py`, `pearl/core/survival.py`).

How f is measured: a trajectory lives from its first prompt to the end of its last turn. It decodes for the time that
the engine says, or, where the engine says nothing, for the whole of its request. f is the sum of the one over the sum
of the other, so long waits weigh by their length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pearl.core import events as ev
from pearl.core.events import Event, Instruction
from pearl.core.fit import CostFit
from pearl.core.histogram import Histogram
from pearl.core.ratio import Ratio
from pearl.core.survival import CONTEXT, ENVIRONMENT, NEW, RESPONSE, SurvivorCurve
from pearl.core.telemetry import TurnTelemetry
from pearl.core.trajectory import TrajectoryId
from pearl.core.workload import EngineProfile, Profile


@dataclass(frozen=True, slots=True)
class TrackerSettings:
    step_retention: float = 0.7
    """What the workload of a step still counts one step later; 0.7 remembers some three steps."""
    batch_weight: float = 0.3
    """Weight of the newest batch in the moving averages of S, its longest trajectory's turns, and of the group size."""
    prior_live_s: float = 60.0
    """Seconds of trajectories' lives that weigh as much as the prior's bubble ratio."""
    prior_context_tokens: float = 20_000.0
    """Context tokens that weigh as much as the prior's prefix-hit rate."""


@dataclass(slots=True)
class _Live:
    """What is known of one live trajectory."""

    since: float
    """Time up to which its life is accounted for."""
    turn: int = 0
    """Index of the present one; number of turns once it is to be scored."""
    context: int = 0
    """Tokens in front of this turn's new ones."""
    new: int = 0
    response: int = 0
    began: float = 0.0
    """When its request or step was asked for."""
    requests: int = 0
    """Of this turn; a second one goes on from an interruption."""
    environment_s: float = 0.0
    """Of the last step."""
    prefix_at: tuple[str, int, int] = ("", -1, -1)
    """(worker, incarnation, version) that computed its prefix."""
    asked: tuple[str, int, int] = ("", -1, -1)
    """The same for the request in flight."""


class RuntimeTracker:
    """`observe` what happens, in order; ask for a `profile` at any time."""

    def __init__(self, prior: Profile, settings: TrackerSettings | None = None) -> None:
        self.prior = prior
        self.settings = settings or TrackerSettings()
        engine, work = prior.engine, prior.workload
        self.curve = SurvivorCurve(work.turns)
        self.prefill = CostFit((engine.prefill_fixed_s, engine.prefill_s_per_token, engine.prefill_s_per_token2))
        decode = (engine.decode_fixed_s, engine.decode_s_per_sequence, engine.decode_s_per_kv_token)
        self.decode = CostFit((*decode, engine.expert_fixed_s) if engine.expert_share else decode)
        self.transfer = CostFit((engine.transfer_latency_s, 1.0 / engine.transfer_bytes_per_s))
        self.environment_times = Histogram()
        """Seconds of environment steps."""
        self.turn_counts = Histogram()
        """Turns of trajectories that ended."""
        self.decoding = Ratio(1.0 / (1.0 + work.bubble_ratio), self.settings.prior_live_s)
        self.prefix_hits = Ratio(work.prefix_hit_rate, self.settings.prior_context_tokens)
        self.prefill_s_per_new_token = Ratio(0.0, 1.0)
        self.in_flight = Ratio(0.0, 1.0)
        """Seconds of trajectories' lives by seconds, of whole steps."""
        self._lived_s = 0.0
        """Of this step."""
        self._trained_s: float | None = None
        """When the step before was trained."""
        self.group_size = work.group_size
        self.slowest_turns = work.slowest_turns
        self.batches = 0
        self._live: dict[TrajectoryId, _Live] = {}
        self._turns: dict[TrajectoryId, int] = {}
        """Of ended trajectories that are not trained yet."""
        self._profile: Profile | None = None
        self._handlers: dict[type[Event] | type[Instruction], Callable[[Any, float], None]] = {
            ev.EnvironmentOpened: self._opened,
            ev.Generate: self._generate,
            ev.TurnGenerated: self._turn_generated,
            ev.StepEnvironment: self._step,
            ev.EnvironmentStepped: self._stepped,
            ev.ScoreTrajectory: self._score,
            ev.TrajectoryScored: self._scored,
            ev.DiscardTrajectory: self._discard,
            ev.TrainBatch: self._train,
            ev.BatchTrained: self._trained,
            ev.EndSample: self._ended,
        }

    def observe(self, entry: Event | Instruction, now: float) -> None:
        """Take in one event, or one instruction that is about to be carried out, at `now` seconds (monotone)."""
        handler = self._handlers.get(type(entry))
        if handler is not None:
            handler(entry, now)
            self._profile = None

    def profile(self) -> Profile:
        """What is known now; the same object until something new was observed."""
        if self._profile is None:
            self._profile = self._compute()
        return self._profile

    @property
    def live_trajectories(self) -> int:
        return len(self._live)

    # --- a trajectory's life ----------------------------------------------------------------------

    def _opened(self, event: ev.EnvironmentOpened, now: float) -> None:
        self._live[event.trajectory] = _Live(now, new=event.prompt_tokens)

    def _generate(self, i: ev.Generate, now: float) -> None:
        if live := self._live.get(i.trajectory):
            if live.turn and not live.requests:
                self.curve.add(live.turn - 1, ENVIRONMENT, live.environment_s)
                self.curve.outcome(live.turn - 1, ended=False)
                live.environment_s = 0.0
            live.began = now
            live.requests += 1
            worker = (i.prefill_worker, i.prefill_incarnation) if i.prefill_worker else (i.worker, i.incarnation)
            live.asked = (*worker, i.version)

    def _turn_generated(self, event: ev.TurnGenerated, now: float) -> None:
        live, telemetry = self._live.get(event.trajectory), event.telemetry
        if telemetry is not None:
            self._measure(telemetry, event.tokens)
        if live is None:
            return
        decoded = telemetry.decode_s if telemetry is not None and telemetry.decode_s >= 0 else now - live.began
        self._account(live, now, decoded)
        if telemetry is not None and live.requests == 1:
            self._count_hits(live, telemetry)
            if telemetry.prefill_s >= 0:
                self.prefill_s_per_new_token.add(telemetry.prefill_s, live.new)
        live.prefix_at = live.asked
        live.response += event.tokens

    def _step(self, i: ev.StepEnvironment, now: float) -> None:
        if live := self._live.get(i.trajectory):
            self._turn_over(live)
            live.began = now

    def _stepped(self, event: ev.EnvironmentStepped, now: float) -> None:
        live = self._live.get(event.trajectory)
        if live is None:
            return
        seconds = event.seconds if event.seconds >= 0 else now - live.began
        self.environment_times.add(seconds)
        self._account(live, now, 0.0)
        live.environment_s = seconds
        if event.stop is None:
            live.turn += 1
            live.context += live.new + live.response
            live.new, live.response, live.requests = event.observation_tokens, 0, 0

    def _score(self, i: ev.ScoreTrajectory, now: float) -> None:
        """The rollout of a trajectory ends here; scoring it is nobody's turn."""
        if live := self._live.get(i.trajectory):
            self._turn_over(live)
            self._account(live, now, 0.0)
            live.turn = i.turns

    def _scored(self, event: ev.TrajectoryScored, now: float) -> None:
        live = self._live.pop(event.trajectory, None)
        if live is None:
            return
        if live.turn:
            self.curve.add(live.turn - 1, ENVIRONMENT, live.environment_s)
            self.curve.outcome(live.turn - 1, ended=True)
            self.turn_counts.add(live.turn)
            self._turns[event.trajectory] = live.turn

    def _discard(self, i: ev.DiscardTrajectory, now: float) -> None:
        self._live.pop(i.trajectory, None)

    def _turn_over(self, live: _Live) -> None:
        """The turn's response is complete."""
        if live.requests:
            self.curve.add(live.turn, NEW, live.new)
            self.curve.add(live.turn, RESPONSE, live.response)
            self.curve.add(live.turn, CONTEXT, live.context)
            live.requests = 0

    def _account(self, live: _Live, now: float, decoding_s: float) -> None:
        lived = now - live.since
        self._lived_s += lived
        self.decoding.add(min(decoding_s, lived), lived)
        live.since = now

    # --- batches ----------------------------------------------------------------------------------

    def _train(self, i: ev.TrainBatch, now: float) -> None:
        turns = [self._turns.pop(trajectory, 0) for group in i.groups for trajectory in group]
        if longest := max(turns, default=0):
            weight = 1.0 if not self.batches else self.settings.batch_weight
            self.slowest_turns += weight * (longest - self.slowest_turns)
            self.group_size += weight * (len(turns) / len(i.groups) - self.group_size)
            self.batches += 1

    def _trained(self, event: ev.BatchTrained, now: float) -> None:
        if self._trained_s is not None:  # before, the cluster was filling up
            self.in_flight.add(self._lived_s, now - self._trained_s)
        self._trained_s, self._lived_s = now, 0.0
        for part in (self.curve, self.decoding, self.prefix_hits, self.prefill_s_per_new_token, self.in_flight):
            part.decay(self.settings.step_retention)
        for histogram in (self.environment_times, self.turn_counts):
            histogram.decay(self.settings.step_retention)

    def _ended(self, i: ev.EndSample, now: float) -> None:
        if i.trajectory is not None:
            self._turns.pop(i.trajectory, None)

    # --- the engine -------------------------------------------------------------------------------

    def _measure(self, t: TurnTelemetry, tokens: int) -> None:
        new = t.prompt_tokens - t.cached_tokens
        if t.prefill_s >= 0 and t.cached_tokens >= 0 and new > 0:
            self.prefill.add(
                (new, t.cached_tokens), (t.prefill_share, new, new * (new / 2 + t.cached_tokens)), t.prefill_s
            )
        if t.decode_s >= 0 and t.decode_batch > 0 and t.decode_kv_tokens >= 0 and tokens > 1:
            regressors = [1.0, t.decode_batch, t.decode_kv_tokens]
            if share := self.prior.engine.expert_share:
                regressors.append(1.0 - (1.0 - share) ** t.decode_batch)
            self.decode.add(
                (t.decode_batch, t.decode_kv_tokens), regressors, (t.decode_s - max(0.0, t.stall_s)) / (tokens - 1)
            )
        if t.transfer_s >= 0 and t.transfer_bytes > 0:
            self.transfer.add((t.transfer_bytes, 0.0), (1.0, t.transfer_bytes), t.transfer_s)

    def _count_hits(self, live: _Live, t: TurnTelemetry) -> None:
        """What capacity and routing cost, the makespan model predicts: a prefix that is where it was left counts as
        found, and one whose trajectory moved does not count. So this is what new weights and restarts cost."""
        if t.cached_tokens < 0 or not live.context:
            return
        stayed, same_weights = live.asked[:2] == live.prefix_at[:2], live.asked[2] == live.prefix_at[2]
        if same_weights and not stayed:
            return
        self.prefix_hits.add(live.context if same_weights else min(t.cached_tokens, live.context), live.context)

    # --- the profile ------------------------------------------------------------------------------

    def _compute(self) -> Profile:
        engine, work = self.prior.engine, self.prior.workload
        trajectories = self.curve.weight
        seen = trajectories / (trajectories + 16.0)
        hits = self.prefix_hits.confidence
        confidence = {
            "turns": seen,
            "slowest_turns": self.batches / (self.batches + 1.0),
            "new_tokens_per_turn": seen,
            "response_tokens_per_turn": seen,
            "environment_s_per_turn": seen,
            "bubble_ratio": self.decoding.confidence,
            "prefix_hit_rate": hits,
            "group_size": self.batches / (self.batches + 1.0),
            "prefill": self.prefill.confidence,
            "decode": self.decode.confidence,
            "transfer": self.transfer.confidence,
        }
        decoding = min(1.0, max(self.decoding.value, 0.01))
        workload = replace(
            work,
            turns=self.curve.turns(),
            slowest_turns=self.slowest_turns,
            new_tokens_per_turn=self.curve.mean(NEW),
            response_tokens_per_turn=self.curve.mean(RESPONSE),
            bubble_ratio=(1.0 - decoding) / decoding,
            in_flight=self.in_flight.value,
            prefix_hit_rate=self.prefix_hits.value,
            prefill_s_per_new_token=self.prefill_s_per_new_token.value,
            group_size=self.group_size,
            environment_s_per_turn=self.curve.mean(ENVIRONMENT),
            environment_cv=self.curve.spread(ENVIRONMENT, work.environment_cv),
            response_cv=self.curve.spread(RESPONSE, work.response_cv),
            confidence=confidence,
        )
        return Profile(self._engine(engine), workload)

    def _engine(self, engine: EngineProfile) -> EngineProfile:
        prefill, decode, transfer = (fit.coefficients().tolist() for fit in (self.prefill, self.decode, self.transfer))
        return replace(
            engine,
            prefill_fixed_s=prefill[0],
            prefill_s_per_token=prefill[1],
            prefill_s_per_token2=prefill[2],
            decode_fixed_s=decode[0],
            decode_s_per_sequence=decode[1],
            decode_s_per_kv_token=decode[2],
            expert_fixed_s=decode[3] if len(decode) > 3 else 0.0,
            transfer_latency_s=transfer[0],
            transfer_bytes_per_s=1.0 / max(transfer[1], 1e-18),
        )
