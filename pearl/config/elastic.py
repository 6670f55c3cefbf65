"""`elastic:` GPUs that come and go, are lent between training and rollout, and change their roles."""

from typing import Literal

from pydantic import Field

from pearl.config.section import Section

Policy = Literal["colocated", "elastic", "elastic-borrow", "static-pd", "pearl-paper", "pearl"]
"""Keys of `pearl.core.policies.POLICIES`."""


class AvailabilityConfig(Section):
    file: str | None = None
    """Trace of preemptible GPUs over time (docs/simulator.md lists the formats), played with real workers on this
    machine from when the trainer is ready; a trace with more slots than `elastic.preemptible_slots` is scaled down.
    None: all of them are there from the beginning, for as long as nobody takes them."""
    start_s: float = Field(0.0, ge=0)
    """Second of the trace to begin at."""
    scale: float = Field(1.0, gt=0)
    """Real seconds that a second of the trace takes."""
    notice_s: float | None = Field(30.0, gt=0)
    """Warning before a slot is taken, in seconds of the trace. None: slots are killed unannounced."""
    seed: int = Field(0, ge=0)
    """Draws which of the slots is taken; the simulator draws the same ones."""


class AutoscaleConfig(Section):
    objective: Literal["off", "tokens_per_usd", "throughput"] = "off"
    """How many of the preemptible slots are asked for. `off`: all of them. `tokens_per_usd`: the number with the most
    steps per dollar. `throughput`: the one with the most steps an hour that the budget allows."""
    usd_per_slot_hour: float | None = Field(None, ge=0)
    """Price of a preemptible slot, with all its GPUs."""
    other_usd_per_hour: float = Field(0.0, ge=0)
    """What the training and reserved GPUs cost together, whatever is decided."""
    max_usd_per_hour: float | None = Field(None, gt=0)
    """Budget of all preemptible slots together; none: no limit."""
    cooldown_s: float = Field(300.0, ge=0)
    """Between two changes of the number that nothing forces."""
    lifetime_prior_s: float | None = Field(None, gt=0)
    """How long a preemptible slot is expected to live before any was lost; none: long."""

    @property
    def on(self) -> bool:
        return self.objective != "off"


class ElasticConfig(Section):
    policy: Policy = "colocated"
    """What the Elastic Scheduler may do. `colocated`: nothing, a lost worker is replaced. `elastic`: take preemptible
    slots in. `elastic-borrow`: also borrow training GPUs whenever the trainer waits. `static-pd`: preemptible slots,
    prefill and decode workers one to one. `pearl`: preemptible slots, borrowing where the gate says that it pays, and
    the layout with the least predicted makespan. `pearl-paper`: the same by the source's equations."""
    preemptible_slots: int = Field(0, ge=0)
    """Rollout slots, beside `cluster.rollout_workers` reserved ones, that may come and go. Each takes
    `engine.tensor_parallel` GPUs of its own."""
    overlap_slots: int = Field(0, ge=0)
    """Rollout slots on the training GPUs, borrowed between two steps. Slot i has the GPUs of `engine.tensor_parallel`
    trainer ranks, from rank i x engine.tensor_parallel on."""
    prefill_decode: bool = True
    """Whether workers may be split into prefill and decode workers. False keeps all colocated, whatever the policy."""
    fixed_ratio: tuple[int, int] = (1, 1)
    """Prefill to decode workers, with `static-pd`."""
    availability: AvailabilityConfig = AvailabilityConfig()
    autoscale: AutoscaleConfig = AutoscaleConfig()
    profile: str | None = None
    """What to expect before anything was measured: the `profile.yaml` of an earlier run, or "MODEL@GPU" of a shipped
    one (`pearl plan` lists them). None: sizes from the configuration, costs of a slow machine."""
    on_cancel: Literal["policy", "regroup", "release"] = "policy"
    """What becomes of the healthy workers of a cancelled expansion: `regroup` forms a fresh one of them, `release`
    gives their slots back, `policy` leaves it to the policy."""
    join_window_s: float = Field(5.0, ge=0)
    """Slots that join within this time of each other are admitted together."""
    preparation_prior_s: float = Field(67.34, gt=0)
    """From a slot's joining to its admission, before one was measured. Also what the first borrowing of a slot costs,
    whose engine has to be started."""
    lifetime_factor: float = Field(2.0, ge=0)
    """A slot is declined if it is expected to live less than this many preparations (no adapter of this release expects
    anything)."""
    notice_margin_s: float = Field(2.0, ge=0)
    """So long before the end of a notice an engine that has not left yet is ended by force."""
    return_deadline_s: float = Field(30.0, gt=0)
    """So long after a return began, overlap engines that still hold their GPUs are ended by force."""
    borrow_prior_s: float = Field(6.26, ge=0)
    """Duration of a borrowing before one was measured."""
    return_prior_s: float = Field(3.18, ge=0)
    """Duration of a return before one was measured."""
    cold_start_windows: int = Field(10, ge=1)
    """Borrowings over which the start of an overlap engine, which then stays, is to repay itself."""
    average_factor: float = Field(0.3, gt=0, le=1)
    """Weight of a new measurement in the averages of these durations."""
    mode_threshold: float = Field(0.05, ge=0, lt=1)
    """Share of the predicted makespan that a change between colocated, disaggregated and mixed must save."""
    ratio_threshold: float = Field(0.02, ge=0, lt=1)
    """The same for another ratio of prefill to decode workers."""

    @property
    def takes_slots(self) -> bool:
        return self.policy != "colocated"

    @property
    def borrows(self) -> bool:
        return self.policy in ("elastic-borrow", "pearl-paper", "pearl")

    @property
    def splits(self) -> bool:
        """Prefill and decode workers are possible."""
        return self.prefill_decode and self.policy in ("static-pd", "pearl-paper", "pearl")

    def fault(self, ranks: int, tensor_parallel: int, zero_stage: int) -> str | None:
        """The first thing that cannot be, with its remedy."""
        a = self.availability
        if self.preemptible_slots and not self.takes_slots:
            return (
                f"elastic.preemptible_slots = {self.preemptible_slots} would never be used with elastic.policy = "
                f"{self.policy}; choose another policy (elastic takes them in), or set it to 0"
            )
        if self.autoscale.on and not self.preemptible_slots:
            return (
                f"elastic.autoscale.objective = {self.autoscale.objective} has no slots to ask for; set "
                "elastic.preemptible_slots to the most that may be asked for, or the objective to off"
            )
        if self.autoscale.on and self.autoscale.usd_per_slot_hour is None:
            return (
                f"elastic.autoscale.objective = {self.autoscale.objective} needs a price; set "
                "elastic.autoscale.usd_per_slot_hour"
            )
        if a.file is not None and not self.preemptible_slots:
            return "elastic.availability.file has no slots to play with; set elastic.preemptible_slots to 1 or more"
        if a.file is not None and a.notice_s is not None and a.notice_s * a.scale <= self.notice_margin_s:
            return (
                f"elastic.availability.notice_s x scale = {a.notice_s * a.scale:g} s leaves no time before "
                f"elastic.notice_margin_s = {self.notice_margin_s:g}; raise the first or lower the second"
            )
        if self.overlap_slots and not self.borrows:
            return (
                f"elastic.overlap_slots = {self.overlap_slots} would never be lent with elastic.policy = "
                f"{self.policy}; choose elastic-borrow or pearl, or set it to 0"
            )
        if self.policy == "elastic-borrow" and not self.overlap_slots:
            return "elastic.policy = elastic-borrow has nothing to borrow; set elastic.overlap_slots, or choose elastic"
        if self.overlap_slots * tensor_parallel > ranks:
            return (
                f"elastic.overlap_slots x engine.tensor_parallel = {self.overlap_slots} x {tensor_parallel} needs as "
                f"many training GPUs, and trainer.ranks = {ranks}; lower the first or raise the last"
            )
        if self.overlap_slots and zero_stage == 0:
            return "elastic.overlap_slots cannot be lent at trainer.zero_stage = 0: no state moves; set it to 1, 2 or 3"
        if self.policy == "static-pd" and not self.prefill_decode:
            return "elastic.policy = static-pd needs elastic.prefill_decode; set it to true, or choose elastic"
        if min(self.fixed_ratio) < 1:
            return f"elastic.fixed_ratio = {list(self.fixed_ratio)}: both numbers are at least 1"
        return None
