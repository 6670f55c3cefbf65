"""The table of all waits in the system: every place in the source that waits, and the test that blocks it.

A new wait fails these tests until it has a row: the test that blocks it, the wait around it that bounds it, or the
reason why it may last for ever.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

import pytest

from pearl.config.deadlines import DeadlinesConfig
from tests.live.test_blocked_waits import CALLS
from tests.live.wait_sites import ROOT, actor_calls, wait_sites


@dataclass(frozen=True)
class Test:
    """Blocks this wait. `name` is a test in tests/<file>."""

    __test__ = False
    file: str
    name: str


@dataclass(frozen=True)
class Within:
    """Has no deadline of its own: it lies inside this wait, whose deadline ends it (or its process)."""

    site: str


@dataclass(frozen=True)
class ForEver:
    """May last as long as its process; nobody waits for it."""

    why: str


Row = Test | Within | ForEver
WAITS, PROCESSES, DRIVER, COMPONENTS = (
    "live/test_blocked_waits.py",
    "live/test_blocked_processes.py",
    "live/test_blocked_driver.py",
    "live/test_blocked_components.py",
)
SNAPSHOTS = "cluster/test_snapshots.py"
PROVIDERS = "cluster/test_provider_waits.py"
STANDING = Test(PROVIDERS, "test_workers_of_a_standing_cluster_that_never_join_or_leave")
MACHINE = Test(PROVIDERS, "test_a_machine_that_does_not_end")
RECEIVER = Test(SNAPSHOTS, "test_a_receiver_that_is_there_and_does_nothing_is_left")
SANDBOXES = "live/test_blocked_environments.py"
CALL = "pearl/live/actors.py:Actors.call"
TURN = Test(PROCESSES, "test_the_turn_of_a_trainer_is_free_after_a_call_that_was_never_answered")
STEP = Within("envs/agent.py:_within")
REMOTE = Test(SANDBOXES, "test_a_remote_sandbox_that_does_not_answer")
RANKS = Test(COMPONENTS, "test_ranks_that_never_come_or_stop_in_the_middle")
COMMAND = Test(COMPONENTS, "test_a_command_that_ignores_everything")
REAPED = Test(COMPONENTS, "test_a_command_that_survives_its_kill")
LOCK = Test(COMPONENTS, "test_a_lock_that_another_process_holds")

TABLE: dict[str, Row] = {
    # the driver
    "pearl/live/driver.py:Driver.run": Test(DRIVER, "test_a_scheduler_that_does_not_start"),
    "pearl/live/driver.py:Driver._next": Test(DRIVER, "test_standing_still_with_nothing_awaited_ends_the_run"),
    "pearl/live/actors.py:Actors.start": Test(PROCESSES, "test_a_worker_that_does_not_join"),
    "pearl/live/actors.py:Actors.board": Test(PROCESSES, "test_an_actor_that_is_never_made_in_a_process_that_came"),
    "pearl/live/actors.py:Actors._awaiting": Test(WAITS, "test_a_call_that_is_never_answered"),
    CALL: Test(WAITS, "test_a_call_that_is_never_answered"),
    "pearl/live/actors.py:Actors.kill": Test(PROCESSES, "test_a_process_that_survives_its_kill"),
    "pearl/live/actors.py:Actors.cause_of_death": Test(PROCESSES, "test_the_cause_of_death_of_a_living_process"),
    "pearl/live/pair.py:serve_pair": Within(CALL),
    "pearl/live/pair.py:serve_pair.interrupt": Within(CALL),
    "pearl/live/frozen.py:FrozenWeights._put_out": Test(PROCESSES, "test_weights_that_are_never_read"),
    "pearl/live/snapshots.py:HostSnapshots.at": Test(WAITS, "test_weights_that_never_come_to_another_host"),
    "pearl/live/snapshots.py:HostSnapshots._fetch": Within("pearl/live/snapshots.py:HostSnapshots.at"),
    "pearl/live/trainer.py:TrainerGroup.start": TURN,
    "pearl/live/trainer.py:TrainerGroup.train": TURN,
    "pearl/live/trainer.py:TrainerGroup.offload": TURN,
    "pearl/live/trainer.py:TrainerGroup.reload": TURN,
    "pearl/live/rollout.py:RolloutWorkers._departed": Test(PROCESSES, "test_an_engine_that_does_not_end_in_good_order"),
    "pearl/live/slots.py:PreemptibleSlots.close": Test(PROCESSES, "test_slots_that_do_not_go_at_the_end"),
    "pearl/live/trainer.py:TrainerGroup.publish": Test(PROCESSES, "test_weights_that_are_never_copied"),
    "pearl/live/trainer.py:TrainerGroup.idle": Test(PROCESSES, "test_the_last_work_of_a_trainer"),
    "pearl/live/waits.py:WaitTable.until": Test(
        COMPONENTS, "test_a_registered_wait_names_both_and_its_thread_holds_nobody_up"
    ),
    "pearl/live/train.py:train": Within("envs/sandbox/folder.py:sweep"),
    "pearl/live/evaluate.py:_play": Within("envs/sandbox/folder.py:sweep"),
    # the cluster
    "pearl/cluster/actor_ref.py:ActorRef.call": Test(PROCESSES, "test_a_stopped_process"),
    "pearl/cluster/cluster.py:Cluster._close": Test(PROCESSES, "test_a_cluster_that_does_not_start_or_close"),
    "pearl/cluster/cluster.py:Cluster.start_worker": Test(PROCESSES, "test_a_worker_that_does_not_join"),
    "pearl/cluster/cluster.py:Cluster.create_actor": Test(PROCESSES, "test_an_actor_that_is_never_made"),
    "pearl/cluster/cluster.py:Cluster.cause_of_death": Test(PROCESSES, "test_the_cause_of_death_of_a_living_process"),
    "pearl/cluster/processes.py:LocalProcess.ended": Test(PROCESSES, "test_a_process_that_survives_its_kill"),
    "pearl/cluster/processes.py:LocalProcess.wait": Within("pearl/cluster/cluster.py:Cluster.start_worker"),
    "pearl/cluster/processes.py:LocalLauncher.left": ForEver("it looks once through the processes of this host"),
    "pearl/cluster/processes.py:LocalLauncher.sweep": ForEver("it kills, and gives up after GONE_S"),
    "pearl/cluster/existing.py:FreeProcess.ended": Test(PROVIDERS, "test_a_free_worker_that_does_not_begin_anew"),
    "pearl/cluster/existing.py:FreeProcess.wait": Within("pearl/cluster/existing.py:FreeProcess.ended"),
    "pearl/cluster/existing.py:probe": Test(PROVIDERS, "test_a_scheduler_that_accepts_and_says_nothing"),
    "pearl/cluster/contact.py:fault_of": Test(
        "cluster/test_contact.py", "test_an_address_that_drops_what_comes_is_silent"
    ),
    "pearl/cluster/contact.py:reach": Test(
        "cluster/test_contact.py", "test_a_scheduler_that_accepts_a_worker_and_says_nothing"
    ),
    "pearl/cluster/scheduler.py:serve": ForEver("a scheduler serves until it is told to end"),
    "pearl/cluster/slurm.py:SlurmJob.ended": Test(PROVIDERS, "test_a_job_that_does_not_leave_the_queue"),
    "pearl/cluster/slurm.py:SlurmJob.wait": Test(PROVIDERS, "test_a_job_that_waits_for_too_long_is_withdrawn"),
    "pearl/cluster/slurm.py:SlurmLauncher.sweep": Test(PROVIDERS, "test_a_job_that_does_not_leave_the_queue"),
    "pearl/cluster/processes.py:said_by": Test(PROVIDERS, "test_slurm_commands_that_never_end"),
    "pearl/cluster/machines.py:answered": Test(PROVIDERS, "test_a_cloud_that_never_answers"),
    "pearl/cluster/gcp.py:GcpLauncher._ask": Within("pearl/cluster/machines.py:answered"),
    "pearl/cluster/azure.py:AzureLauncher._ask": Within("pearl/cluster/machines.py:answered"),
    "pearl/cluster/azure_vm.py:SpotVM.call_async": Within("pearl/cluster/machines.py:answered"),
    "pearl/cluster/machines.py:MachineProcess.ended": MACHINE,
    "pearl/cluster/machines.py:MachineProcess.wait": Within("pearl/cluster/machines.py:MachineProcess.ended"),
    "pearl/cluster/machines.py:MachineLauncher.sweep": MACHINE,
    "pearl/cluster/machines.py:MachineLauncher.look": Within("pearl/cluster/machines.py:MachineProcess.ended"),
    "pearl/cluster/standing.py:StandingCluster.down": ForEver("it kills, and gives up after GONE_S"),
    "pearl/cluster/standing.py:StandingCluster._start_scheduler": Test(
        PROVIDERS, "test_a_scheduler_of_a_standing_cluster_that_never_listens"
    ),
    "pearl/cluster/standing.py:StandingCluster._joined": STANDING,
    "pearl/cluster/standing.py:StandingCluster._warn": STANDING,
    "pearl/cluster/standing.py:StandingCluster._ask": Test(PROVIDERS, "test_a_scheduler_that_accepts_and_says_nothing"),
    "pearl/cluster/standing.py:StandingCluster._alone": Test(PROVIDERS, "test_two_commands_at_once"),
    "pearl/cluster/plugin.py:ElasticityPlugin.remove_worker": ForEver("ROUND_S at most, before other workers are told"),
    "pearl/cluster/plugin.py:ElasticityPlugin._shows_life": Test(
        "cluster/test_slot_names.py",
        "test_a_worker_waits_for_the_name_of_a_silent_one_which_says_why_it_ends",
    ),
    "pearl/cluster/worker.py:_security": ForEver("standard input ends with the one who started the worker"),
    "pearl/cluster/membership.py:Membership._catch_up": Test(
        COMPONENTS, "test_a_scheduler_that_does_not_say_who_is_there"
    ),
    "pearl/cluster/membership.py:Membership._resync": ForEver("it asks again every RESYNC_S; cancelled at the end"),
    "pearl/cluster/availability.py:AvailabilityFollower.run": ForEver("it follows a trace, in its own task"),
    "pearl/cluster/snapshots.py:SnapshotExchange._soon": RECEIVER,
    "pearl/cluster/snapshots.py:SnapshotExchange._asked": RECEIVER,
    "pearl/cluster/snapshots.py:SnapshotExchange.retire": Within("pearl/cluster/snapshots.py:retire_at"),
    "pearl/cluster/snapshots.py:Fetch.run": Within("pearl/cluster/snapshots.py:fetch_at"),
    "pearl/cluster/snapshots.py:Fetch._fetch": Within("pearl/cluster/snapshots.py:fetch_at"),
    "pearl/cluster/snapshots.py:Fetch._answer": Test(SNAPSHOTS, "test_a_source_that_falls_silent_is_left"),
    "pearl/cluster/snapshots.py:fetch_at": Test(SNAPSHOTS, "test_a_worker_that_does_not_answer"),
    "pearl/cluster/snapshots.py:retire_at": Test(SNAPSHOTS, "test_a_worker_that_does_not_answer"),
    "pearl/cluster/notices.py:watch.run": ForEver("a daemon thread asks a cloud again and again"),
    "pearl/cluster/notices.py:Reporter._send": Test(COMPONENTS, "test_a_notice_that_is_never_acknowledged"),
    "pearl/cluster/notices.py:Reporter.report": Test(COMPONENTS, "test_a_notice_that_is_never_acknowledged"),
    "pearl/cluster/worker.py:Ending.wait": ForEver("a worker serves until it is asked to end"),
    "pearl/cluster/worker.py:serve": ForEver("a worker serves until it is asked to end"),
    "pearl/lifeline.py:end_with_owner.watch": ForEver("a daemon thread waits for the end of the owner"),
    "pearl/locks.py:locked": LOCK,
    "pearl/models.py:_lock": LOCK,
    # engines
    "actors/rollout.py:RolloutWorker.metrics": Within(CALL),
    "actors/rollout.py:RolloutWorker.release_memory": Within(CALL),
    "actors/rollout.py:RolloutWorker.resume_memory": Within(CALL),
    "actors/sglang/client.py:EngineClient.load_snapshot": Test(COMPONENTS, "test_a_load_that_never_ends"),
    "actors/sglang/client.py:EngineClient._end": Test(COMPONENTS, "test_an_abort_that_is_never_acknowledged"),
    "actors/sglang/client.py:EngineClient._alone": Test(COMPONENTS, "test_a_control_call_behind_another_one"),
    "actors/sglang/flight.py:Flight._lost": Test(
        COMPONENTS, "test_a_broken_connection_waits_for_the_death_of_its_server"
    ),
    "actors/sglang/flight.py:_first": Test(COMPONENTS, "test_an_answer_that_never_comes_ends_with_its_tokens"),
    "actors/sglang/flight.py:_either": Test(COMPONENTS, "test_a_request_behind_a_shut_gate"),
    "actors/sglang/http.py:EngineHttp.call": Test(COMPONENTS, "test_http_that_is_never_answered"),
    "actors/sglang/roles.py:_patiently": Test("engine/test_roles.py", "test_engine_that_never_comes_to_rest"),
    "actors/sglang/process.py:EngineProcess._wait_ready": Test(
        COMPONENTS, "test_a_server_that_never_answers_its_health"
    ),
    "actors/sglang/process.py:EngineProcess.stop": Test(COMPONENTS, "test_a_server_that_ignores_its_end"),
    "actors/sglang/process.py:EngineProcess._watch": ForEver("a daemon thread waits for the end of the server"),
    "actors/sglang/process.py:EngineProcess._watch_parts": ForEver("only makes the object that `watch` polls"),
    "actors/sglang/process.py:EngineProcess._watch_parts.watch": ForEver("a daemon thread waits for the end of a part"),
    "actors/sglang/process.py:EngineProcess._running": ForEver("it looks, with WNOHANG"),
    # environments
    "actors/environment.py:EnvironmentWorker.start": Within(CALL),
    "actors/environment.py:EnvironmentWorker.open": Within(CALL),
    "actors/environment.py:EnvironmentWorker.advance": Within(CALL),
    "actors/environment.py:EnvironmentWorker.score": Within(CALL),
    "envs/agent.py:_within": Test(COMPONENTS, "test_an_environment_that_never_answers"),
    "envs/families/shell.py:ShellEnvironment.reset": STEP,
    "envs/families/swebench.py:SwebenchEnvironment.reset": STEP,
    "envs/sandbox/backend.py:BubblewrapBackend.sweep": Within("envs/sandbox/folder.py:sweep"),
    "envs/sandbox/backend.py:BubblewrapBackend.close": Within(CALL),
    "envs/sandbox/serial.py:SerialSandbox.close": Within(CALL),
    "envs/sandbox/serial.py:SerialSandbox._look_alone": STEP,
    "envs/sandbox/serial.py:SerialSandbox._run": STEP,
    "envs/sandbox/bubblewrap.py:BubblewrapSandbox._look": STEP,
    "envs/sandbox/bubblewrap.py:BubblewrapSandbox._remove": Within(CALL),
    "envs/sandbox/bubblewrap.py:BubblewrapSandbox._run_alone.check": STEP,
    "envs/sandbox/bubblewrap.py:BubblewrapSandbox._is_over_disk": STEP,
    "envs/sandbox/container.py:ContainerSandbox._run_alone.check": STEP,
    "envs/sandbox/container.py:ContainerSandbox._look": STEP,
    "envs/sandbox/containers.py:ContainerBackend.close": Within(CALL),
    "envs/sandbox/containers.py:ContainerBackend._make_layer": STEP,
    "envs/sandbox/engine.py:Engine.reading": STEP,
    "envs/sandbox/remote.py:RemoteSandbox.ask": REMOTE,
    "envs/sandbox/supervised.py:SupervisedSandbox._look": STEP,
    "envs/sandbox/remote.py:RemoteSandbox._remove": Within(CALL),
    "envs/sandbox/remote.py:RemoteBackend.create": STEP,
    "envs/sandbox/process.py:ProcessSandbox.ask": Test(SANDBOXES, "test_a_supervisor_that_does_not_answer"),
    "envs/sandbox/process.py:ProcessSandbox._run_alone": STEP,
    "envs/sandbox/process.py:ProcessSandbox._remove": Within(CALL),
    "envs/sandbox/process.py:ProcessBackend.create_from": STEP,
    "envs/sandbox/process.py:ProcessBackend.sweep": Within("envs/sandbox/folder.py:sweep"),
    "envs/sandbox/process.py:ProcessBackend.close": Within(CALL),
    "envs/sandbox/supervisor.py:run": Within("envs/sandbox/remote.py:RemoteSandbox.ask"),
    "envs/sandbox/supervisor.py:end_all": Within("envs/sandbox/remote.py:RemoteSandbox.ask"),
    "envs/sandbox/command.py:_begin": Test(SANDBOXES, "test_a_container_that_never_begins"),
    "envs/sandbox/command.py:run_bounded": REAPED,
    "envs/sandbox/command.py:_watch": COMMAND,
    "envs/sandbox/command.py:_end": REAPED,
    "envs/sandbox/command.py:_end.drain": Within("envs/sandbox/command.py:_end"),
    "envs/sandbox/folder.py:OwnedFolder.__init__": LOCK,
    "envs/sandbox/folder.py:sweep": LOCK,
    "envs/sandbox/folder.py:remove_tree": Within(CALL),
    "envs/sandbox/folder.py:_kill_users_of": Test(COMPONENTS, "test_users_of_a_folder_that_survive_their_kill"),
    "envs/swebench/grade.py:grade_changes": STEP,
    "envs/swebench/trial.py:run_tests": STEP,
    "envs/swebench/validate.py:validate": Within("envs/swebench/tools.py:Tools._wait"),
    "envs/swebench/validate.py:_proved": ForEver("it turns the source of tests round, once"),
    "envs/swebench/interpreters.py:_prefix": Test(SANDBOXES, "test_an_interpreter_that_says_nothing"),
    "envs/swebench/play.py:grade_patch": Within("envs/swebench/tools.py:Tools._wait"),
    "envs/swebench/play.py:play_by_hand.answer": ForEver("a person types"),
    "envs/swebench/store.py:Store.make": Test(
        "envs/swebench/test_store.py", "test_who_waits_for_a_builder_too_long_is_told"
    ),
    "envs/swebench/store.py:Store.evict": Within("envs/swebench/store.py:Store.make"),
    "envs/swebench/tools.py:Tools.run": Within("envs/swebench/tools.py:Tools._wait"),
    "envs/swebench/tools.py:Tools._wait": Test(SANDBOXES, "test_a_tool_of_a_build_that_never_ends"),
    # trainer
    "trainer/checkpoint.py:save_checkpoint": Within("trainer/world.py:World.barrier"),
    "trainer/offload.py:Offloader._measured": Within("trainer/world.py:World.barrier"),
    "trainer/universal.py:_run": Test(COMPONENTS, "test_a_conversion_that_never_ends"),
    "trainer/world.py:World.barrier": RANKS,
    "trainer/world.py:World._reduce": RANKS,
    "trainer/world.py:join_world": RANKS,
}

KEYS: dict[str, Row] = {
    **{call.key: Test(WAITS, "test_a_call_that_is_never_answered") for call in CALLS if call.key},
    "engine_stop_s": Test(PROCESSES, "test_an_engine_that_does_not_end_in_good_order"),
    "worker_start_s": Test(PROCESSES, "test_a_worker_that_does_not_join"),
    "no_progress_s": Test(DRIVER, "test_standing_still_with_nothing_awaited_ends_the_run"),
    "shutdown_s": Test(DRIVER, "test_actors_that_do_not_stop_are_killed_at_the_deadline"),
}
"""Rows of the keys under `deadlines:`."""


def test_every_wait_in_the_source_has_a_row_and_every_row_a_wait() -> None:
    found = wait_sites()
    missing = {site: sorted(kinds) for site, kinds in found.items() if site not in TABLE}
    assert not missing, "waits without a row: block each in a test, see the top of this file"
    assert set(TABLE) == set(found), "rows of waits that are no more"


def test_every_call_to_an_actor_is_blocked_by_name() -> None:
    assert {f"{call.caller} {call.method}" for call in CALLS} == actor_calls()


def test_every_deadline_of_the_configuration_passes_in_a_test() -> None:
    assert set(KEYS) == set(DeadlinesConfig.model_fields)


@pytest.mark.parametrize("row", sorted({*TABLE.values(), *KEYS.values()}, key=str), ids=str)
def test_a_row_holds(row: Row) -> None:
    """A test exists, a wait around another one has a row itself that is no ring, and a reason is given."""
    match row:
        case Test(file, name):
            tree = ast.parse((ROOT / "tests" / file).read_text())
            assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        case Within(site):
            assert isinstance(TABLE[site], Test)
        case ForEver(why):
            assert why
