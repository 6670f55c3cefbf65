"""The family `swebench`: repair a real repository; its own tests, run in a fresh sandbox, judge."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence

from envs.errors import InfrastructureError
from envs.families.shell import describe
from envs.protocol import Observation, Score, StepResult, Task
from envs.sandbox.protocol import Sandbox, SandboxBackend, SandboxOverLimit
from envs.swebench.builder import Builder, BuiltTask
from envs.swebench.conventions import parse, prompt
from envs.swebench.errors import TaskError
from envs.swebench.grade import grade_changes
from envs.swebench.load import load_tasks
from envs.swebench.record import TaskRecord
from envs.swebench.trial import service
from pearl.config.environment import EnvironmentConfig
from pearl.errors import UserError

LEAST_MEMORY_MB = 1024
"""Test suites import more than the defaults, which are for small tasks, allow."""


class SwebenchFamily:
    """The first `environment.tasks` tasks of `environment.swebench.tasks_file`."""

    parse = staticmethod(parse)

    def __init__(self, config: EnvironmentConfig, backend: SandboxBackend) -> None:
        self._config, self._backend = config, backend
        if config.swebench.tasks_file is None:
            raise UserError(
                "environment.family = 'swebench' needs environment.swebench.tasks_file",
                "Name a file of tasks; `pearl env mutate` makes some, examples/swebench.jsonl holds some.",
            )
        if config.sandbox.memory_mb < LEAST_MEMORY_MB:
            raise UserError(
                f"environment.sandbox.memory_mb = {config.sandbox.memory_mb} is too little to run repositories' tests",
                "Set environment.sandbox.memory_mb to 4096, and cpu_s, file_mb, disk_mb, processes as in "
                "examples/swebench.yaml.",
            )
        self.records = load_tasks(config.swebench.tasks_file)[: config.tasks]
        unjudged = [record.instance_id for record in self.records if not record.fail_to_pass]
        if unjudged:
            raise UserError(
                f"{len(unjudged)} tasks have no FAIL_TO_PASS tests to judge them: {', '.join(unjudged[:3])}",
                "Run `pearl env validate TASKS --output VALID.jsonl` and use what it writes.",
            )
        self.builder = Builder(config.swebench, getattr(backend, "engine", None))
        self._faults: dict[str, str] = {}
        self.tasks: Sequence[Task] = [Task(record.instance_id, "swebench", record.repo) for record in self.records]

    async def prepare(self) -> dict[str, str]:
        """Build all tasks, a few at a time; those that fail are named with the reason, and cannot be opened."""
        faults = self._faults

        async def build(record: TaskRecord) -> None:
            try:
                await self.builder.abuild(record)
            except TaskError as error:
                faults[record.instance_id] = f"{error.reason}: {error}"

        await asyncio.gather(*(build(record) for record in self.records))
        if len(faults) == len(self.records):
            first = next(iter(faults.values()))
            raise UserError(
                f"none of the {len(faults)} tasks can be built; the first: {first}", "See `pearl env build`."
            )
        return faults

    def open(self, index: int) -> SwebenchEnvironment:
        record = self.records[index]
        if (fault := self._faults.get(record.instance_id)) is not None:
            raise InfrastructureError(f"{record.instance_id} cannot be built: {fault}")
        return SwebenchEnvironment(self.tasks[index], record, self.builder, self._backend, self._config)

    def close(self) -> None:
        self.builder.close()


class SwebenchEnvironment:
    """See `envs.protocol.Environment`. A task that was not built before is built when it is opened."""

    def __init__(
        self, task: Task, record: TaskRecord, builder: Builder, backend: SandboxBackend, config: EnvironmentConfig
    ) -> None:
        self._task, self._record = task, record
        self._builder, self._backend, self._config = builder, backend, config
        self._built: BuiltTask | None = None
        self._sandbox: Sandbox | None = None

    @property
    def task(self) -> Task:
        return self._task

    async def reset(self, timeout_s: float) -> Observation:
        await self.close()
        try:
            async with asyncio.timeout(timeout_s):
                self._built = await self._builder.abuild(self._record)
                self._sandbox = await self._backend.create_from(self._built.image)
        except TaskError as error:
            raise InfrastructureError(f"{self._record.instance_id} cannot be built: {error}") from error
        return Observation(prompt(self._record, self._built.recipe, self._config.swebench.problem_chars))

    async def step(self, action: str, timeout_s: float) -> StepResult:
        built, sandbox = self._open()
        limit = min(self._config.sandbox.command_s, 0.8 * timeout_s)
        try:
            result = await sandbox.exec(service(built) + action, timeout_s=limit)
        except SandboxOverLimit:
            return StepResult("The disk is full.", done=True)
        return StepResult("The disk is full.", done=True) if result.over_disk else StepResult(describe(result, limit))

    async def score(self, timeout_s: float) -> Score:
        built, sandbox = self._open()
        try:
            changes = await sandbox.diff()
        except SandboxOverLimit:
            return Score(0.0, {"resolved": 0.0, "over_limit": 1.0})
        swebench = self._config.swebench
        return await grade_changes(
            built,
            self._backend,
            changes,
            reward=swebench.reward,
            test_s=swebench.test_s,
            attempts=swebench.attempts,
            timeout_s=timeout_s,
        )

    async def fingerprint(self) -> str:
        """Hash of all that differs from the repository's start."""
        try:
            changes = await self._open()[1].diff()
        except SandboxOverLimit:
            return "over limit"
        digest = hashlib.sha256()
        for path, entry in sorted(changes.items()):
            digest.update(repr((path, entry.kind, entry.executable, len(entry.data))).encode() + entry.data)
        return digest.hexdigest()[:32]

    async def close(self) -> None:
        if self._sandbox is not None:
            await self._sandbox.close()
            self._sandbox = None

    def _open(self) -> tuple[BuiltTask, Sandbox]:
        if self._sandbox is None or self._built is None:
            raise InfrastructureError("the environment is not open")
        return self._built, self._sandbox
