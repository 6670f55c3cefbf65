"""Small models for tests of the simulator."""

from __future__ import annotations

from pearl.core.layout import Role
from pearl.core.telemetry import TurnTelemetry
from pearl.core.trajectory import FinishReason, TrajectoryId
from pearl.core.workload import EngineProfile
from pearl.sim.clock import Clock
from pearl.sim.engine import Engine, EngineOptions
from pearl.sim.request import Request
from pearl.sim.workload import AgentWorkload, Lognormal

PROFILE = EngineProfile(
    prefill_fixed_s=2e-3, prefill_s_per_token=10e-6, prefill_s_per_token2=0.5e-9, decode_fixed_s=4e-3,
    decode_s_per_sequence=15e-6, decode_s_per_kv_token=30e-9, kv_bytes_per_token=147_456, kv_capacity_tokens=400_000,
    transfer_bytes_per_s=25e9, transfer_latency_s=2e-3,
)  # fmt: skip

SMALL = AgentWorkload(
    turns=Lognormal(4, 0.4), prompt_tokens=Lognormal(400, 0.2), observation_tokens=Lognormal(150, 0.8),
    response_tokens=Lognormal(60, 0.7), environment_s=Lognormal(0.5, 1.0), open_s=Lognormal(2, 0.3),
    score_s=Lognormal(1, 0.3),
)  # fmt: skip


class Bench:
    """Engines on one clock, and what came of their requests."""

    def __init__(self, options: EngineOptions | None = None, profile: EngineProfile = PROFILE) -> None:
        self.clock = Clock()
        self.options, self.profile = options or EngineOptions(), profile
        self.done: dict[TrajectoryId, tuple[float, int, FinishReason]] = {}
        self.requests: dict[TrajectoryId, Request] = {}
        self.telemetry: dict[TrajectoryId, TurnTelemetry] = {}
        self.handed: list[tuple[float, TrajectoryId]] = []

    def engine(self, name: str = "w", role: Role = Role.COLOCATED, kind: type[Engine] = Engine) -> Engine:
        return kind(name, self.profile, role, self.clock, self.options, self._finished, self._handed_on)

    def _finished(self, request: Request, tokens: int, finish: FinishReason, reason: str) -> None:
        assert request.trajectory not in self.done, "a request ended twice"
        self.done[request.trajectory] = (self.clock.now, tokens, finish)
        self.telemetry[request.trajectory] = request.worker.telemetry(request)

    def _handed_on(self, request: Request, sender: Engine) -> None:
        self.handed.append((self.clock.now, request.trajectory))

    def ask(
        self, engine: Engine, member: int, context: int, wanted: int, *, at: float = 0.0, shared: int = 0,
        group: int = 0, prefill: Engine | None = None,
    ) -> TrajectoryId:  # fmt: skip
        trajectory = TrajectoryId(group, member, 0)
        request = self.requests[trajectory] = Request(trajectory, 0, context, shared, wanted, FinishReason.STOP)
        self.clock.at(at, lambda _: engine.submit(request, prefill))
        return trajectory

    def play(self, until_s: float = 1e9) -> None:
        while self.clock.advance(until_s):
            pass

    def again(self, trajectory: TrajectoryId) -> None:
        """Forget the end of a turn, so that its next one can be asked for."""
        del self.done[trajectory]
