"""One availability trace, live: fixed GPUs, elastic and colocated, and all of PEARL; beside what the simulator says.

    python -m bench.elastic_live [--seeds 3] [--policy P] [--steps 24] [--config examples/elastic.yaml] [--folder DIR]
                                 [--json] [--out FILE] [KEY=VALUE ...]

Real engines, a real trainer and real worker processes that come and go, under three policies for each seed: `colocated`
on the reserved slot alone, `elastic` with the preemptible ones, `pearl` with everything. Runs of one seed are paired.
The throughput is (generated + trained tokens) / seconds, from the first request to the last step. With two seeds or
more there is the mean ratio to `colocated` with its 95 % bootstrap interval. Runs that are in `--folder` are not run
again, so that a study can be done in several sittings; `--policy` runs those of one policy.

The simulator plays the same trace, with the trajectories of the fixed run, its measured engine (`profile.yaml`), its
median training step, and the medians of reconfiguration that the `pearl` run measured. So its inputs are fitted to
these runs; what it predicts is how they combine. It gives every worker a GPU of its own; live they share the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console

from bench.provenance import provenance
from pearl.cli import quiet_libraries
from pearl.config import RunConfig
from pearl.config.load import load_config
from pearl.core import events as ev
from pearl.core.drain import DrainAware
from pearl.core.scheduler import Scheduler
from pearl.core.tasks import TaskCursor
from pearl.core.trajectory import Trajectory
from pearl.core.workload import Profile
from pearl.live.driver import Driver
from pearl.live.machine import inelastic, live_policy, pipeline_settings
from pearl.live.preflight import preflight
from pearl.live.slots import availability
from pearl.live.train import train
from pearl.observe.interval import bootstrap
from pearl.profiles import read_profile
from pearl.sim.cluster import make_cluster
from pearl.sim.durations import Durations
from pearl.sim.replay import Replay
from pearl.sim.simulator import Models, Simulator
from pearl.sim.trainer import ModelShape, TrainerModel

POLICIES = ("colocated", "elastic", "pearl")
FIXED = "colocated"
PLENTY = 1e30
"""Of a trainer whose steps take what was measured, whatever the batch."""


class Window:
    """Observer, live or simulated: tokens between the first request and the last step."""

    driver: Driver | None = None
    simulator: Simulator | None = None

    def __init__(self) -> None:
        self.began = self.last = 0.0
        self.tokens = 0
        self.steps: list[float] = []
        self._training = 0.0

    def saw(self, now: float, entry: ev.Event | ev.Instruction) -> None:
        match entry:
            case ev.Generate():
                self.began = self.began or now
            case ev.TurnGenerated():
                self.tokens += entry.tokens
            case ev.TrainBatch():
                self._training = now
            case ev.BatchTrained():
                self.last = now
                self.steps.append(now - self._training)
            case ev.EndSample(outcome=ev.Outcome.TRAINED) if self.simulator is not None and entry.trajectory:
                self.tokens += self.simulator.lengths[entry.trajectory]

    def ended(self, now: float, end: ev.EndSample, trajectory: Trajectory | None) -> None:
        if end.outcome is ev.Outcome.TRAINED and trajectory is not None:
            self.tokens += len(trajectory.token_ids)

    def stepped(self, *_: Any) -> None: ...
    def notice(self, *_: Any) -> None: ...

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / (self.last - self.began)


def configure(args: argparse.Namespace, policy: str, seed: int) -> RunConfig:
    """The tasks are as many as the steps take, so that all phases of the load occur."""
    overrides = [*args.overrides, f"run_dir={args.folder / f'{policy}-{seed}'}", f"seed={seed}"]
    overrides += [f"pipeline.steps={args.steps}", f"elastic.policy={policy}", f"elastic.availability.seed={seed}"]
    groups = load_config(args.config, args.overrides).pipeline.groups_per_batch
    overrides += [f"environment.tasks={args.steps * groups}"]
    if policy == FIXED:
        overrides += ["elastic.preemptible_slots=0", "elastic.availability.file=null"]
    if policy != "pearl":
        overrides += ["elastic.overlap_slots=0"]
    return load_config(args.config, overrides)


async def live(config: RunConfig) -> dict[str, Any]:
    """Measured in a run, or read if it was run before."""
    assert config.run_dir is not None
    measured = Path(config.run_dir) / "measured.json"
    if not measured.exists():
        shutil.rmtree(config.run_dir, ignore_errors=True)  # of a run that did not come to its end
        window = Window()
        result = await train(config, await preflight(config), Console(stderr=True, quiet=True), watch=window)
        if result.failure is not None or result.exit_code:
            raise SystemExit(f"{config.elastic.policy}: {result.failure or result.summary['stopped']}")
        found = {"tokens_per_s": window.tokens_per_s, "step_s": median(window.steps), "load": os.getloadavg()[0]}
        found |= {"seconds": result.summary["seconds"], "elastic": result.summary["elastic"]}
        measured.write_text(json.dumps(found))
    known: dict[str, Any] = json.loads(measured.read_text())
    return known


def durations(elastic: dict[str, Any]) -> Durations:
    """Of the `pearl` run; where it measured nothing, the event did not occur either."""
    names = {"prepare_s": "prep_s", "finalise_s": "finalise_s", "activate_s": "activate_s"}
    names |= {"deactivate_s": "deactivate_s", "role_switch_s": "role_switch_s"}
    known = {name: elastic[key] for name, key in names.items() if elastic[key] is not None}
    return Durations(
        **known, sync_fixed_s=0.2, publish_fixed_s=0.1, trainer_start_s=0.0, environment_worker_start_s=0.0
    )


def simulated(config: RunConfig, fixed: Path, step_s: float, costs: Durations) -> float:
    """Tokens/s of the same configuration in virtual time."""
    profile = read_profile(fixed / "profile.yaml")
    e, width = config.elastic, config.engine.tensor_parallel
    trace = [(t * e.availability.scale, n) for t, n in availability(config) or [(0.0, 0)]]
    notice_s = e.availability.notice_s
    cluster = make_cluster(
        training_gpus=e.overlap_slots * width,
        reserved_gpus=config.cluster.rollout_workers * width,
        availability=trace,
        gpus_per_slot=width,
        notice_s=None if notice_s is None else notice_s * e.availability.scale,
        seed=e.availability.seed,
    )
    shape = ModelShape("live", 1.0, 1.0, 1, 1)
    models = Models(profile.engine, TrainerModel(shape, 1, PLENTY, fixed_s=step_s), costs)
    window = Window()
    machine = scheduler(config, profile)
    window.simulator = Simulator(machine, cluster, models, Replay(fixed), seed=config.seed, observers=[window])
    window.simulator.run()
    return window.tokens_per_s


def scheduler(config: RunConfig, prior: Profile) -> Scheduler:
    settings, cursor = pipeline_settings(config), TaskCursor(config.environment.tasks, config.seed, shuffled=False)
    if config.elastic.policy == FIXED:
        return inelastic(settings, cursor)
    return live_policy(config).machine(settings, cursor, prior, DrainAware())


def one_seed(args: argparse.Namespace, seed: int, policies: tuple[str, ...]) -> dict[str, Any]:
    configs = {policy: configure(args, policy, seed) for policy in policies}
    runs = {policy: asyncio.run(live(config)) for policy, config in configs.items()}
    outcome = {
        "seed": seed,
        "live": {policy: round(run["tokens_per_s"], 2) for policy, run in runs.items()},
        "seconds": {policy: run["seconds"] for policy, run in runs.items()},
        "elastic": {policy: run["elastic"] for policy, run in runs.items()},
    }
    if len(runs) == len(POLICIES):
        fixed, costs = args.folder / f"{FIXED}-{seed}", durations(runs["pearl"]["elastic"])
        step_s = runs[FIXED]["step_s"]
        outcome["simulated"] = {p: round(simulated(config, fixed, step_s, costs), 2) for p, config in configs.items()}
    return outcome


def conclude(runs: list[dict[str, Any]]) -> dict[str, Any]:
    ratios: dict[str, Any] = {}
    for policy in POLICIES:
        said = [[run[kind][policy] / run[kind][FIXED] for run in runs] for kind in ("live", "simulated")]
        interval = bootstrap(said[0], 0).as_dict() if len(runs) > 1 else {"mean": round(said[0][0], 4)}
        ratios[policy] = {"live": interval, "simulated": round(fmean(said[1]), 4)}
    return {"ratio_to_fixed": ratios, "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--policy", choices=POLICIES)
    parser.add_argument("--folder", type=Path, help="where the runs are kept")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--config", type=Path, default=Path("examples/elastic.yaml"))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as of `pearl train`")
    args = parser.parse_args()
    quiet_libraries()
    with tempfile.TemporaryDirectory() as folder:
        args.folder = args.folder or Path(folder)
        policies = (args.policy,) if args.policy else POLICIES
        runs = [one_seed(args, seed, policies) for seed in range(args.seeds)]
    if args.policy:
        print(json.dumps(runs))
        return
    about = {"command": "python -m bench.elastic_live " + " ".join(sys.argv[1:]), "steps": args.steps}
    outcome = provenance("bench.elastic_live", "torch", "deepspeed", "transformers") | about | conclude(runs)
    if args.out:
        args.out.write_text(json.dumps(outcome, indent=1) + "\n")
    if args.json:
        print(json.dumps(outcome))
        return
    print(f"{'policy':<12} {'tokens/s':>9} {'ratio, live':>24} {'simulated':>10}")
    for policy, ratio in outcome["ratio_to_fixed"].items():
        live_ratio = ratio["live"]
        spread = f" [{live_ratio['low']:.2f}, {live_ratio['high']:.2f}]" if "low" in live_ratio else ""
        mean = fmean(run["live"][policy] for run in runs)
        print(f"{policy:<12} {mean:>9.1f} {live_ratio['mean']:>12.2f}{spread:<12} {ratio['simulated']:>10.2f}")


if __name__ == "__main__":
    main()
