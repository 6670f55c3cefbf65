"""What only containers have: images, layers of their own, a program that may fail, leftovers that outlive a kill."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from envs.sandbox.containers import ContainerBackend
from envs.sandbox.protocol import Entry
from envs.swebench.builder import Builder
from envs.swebench.grade import grade_changes
from pearl.config.environment import SandboxConfig
from pearl.config.swebench import SwebenchConfig
from pearl.errors import UserError
from tests.envs.conftest import left_by, processes_with, until
from tests.envs.swebench.conftest import RIGHT, RUNNER, TESTS, WRONG, record
from tests.envs.test_limits import FORK

OWNER = """
import asyncio, sys
from pathlib import Path
from envs.sandbox.containers import ContainerBackend
from pearl.config.environment import SandboxConfig

async def main():
    limits = SandboxConfig(backend="podman", image=sys.argv[2])
    sandbox = await ContainerBackend(limits, directory=Path(sys.argv[1]), name="owner").create({})
    await sandbox.exec("setsid sleep 98441 & exec sleep 98441", timeout_s=600)

asyncio.run(main())
"""
TEST = ("env", "PYTHONPATH=src", "python3", "tools/run.py", "tests/test_sums.py")
LIMITS = SandboxConfig(backend="podman", memory_mb=128, processes=16, disk_mb=4)


@pytest.fixture
async def containers(podman: str, directory: Path) -> AsyncIterator[ContainerBackend]:
    made = ContainerBackend(LIMITS.model_copy(update={"image": podman}), directory=directory)
    yield made
    await made.close()
    assert await left_by(made) == []


async def test_a_difference_is_read_and_carried_over(containers: ContainerBackend) -> None:
    start = {"a": b"1", "d/b": b"2", "d/c": b"3", "e/": b""}
    one = await containers.create(start)
    await one.exec("echo 4 > new; chmod +x new; rm d/b; ln -s /etc/passwd link; ln new other; touch a", timeout_s=20)
    changes = await one.diff()
    assert changes == {
        "new": Entry("file", b"4\n", True),
        "other": Entry("file", b"4\n", True),
        "d/b": Entry("missing"),
        "link": Entry("other"),
    }
    assert {path: entry.kind for path, entry in (await one.snapshot()).items()} == {
        "a": "file", "d": "directory", "d/c": "file", "e": "directory", "new": "file", "other": "file", "link": "other",
    }  # fmt: skip


async def test_limits(containers: ContainerBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sandbox = await containers.create({"fork.py": FORK.encode()})
    result = await sandbox.exec("python3 -c 'b = b\"x\" * (200 << 20)'", timeout_s=30)
    assert result.exit_code in (137, None)  # the engine, or we
    assert 5 < int((await sandbox.exec("python3 fork.py", timeout_s=30)).output) < 16
    assert processes_with("fork.py") == []
    assert (await sandbox.exec("head -c 9000000 /dev/zero > big", timeout_s=30)).over_disk
    assert list(tmp_path.iterdir()) == []  # podman's monitor leaves "oom" where it was started


async def test_containers_have_no_privileges(containers: ContainerBackend) -> None:
    sandbox = await containers.create({})
    said = (
        await sandbox.exec("id -u; grep -E 'CapEff|NoNewPrivs' /proc/self/status; ls /sys/class/net", timeout_s=20)
    ).output
    assert said.split() == ["1000", "CapEff:", "0000000000000000", "NoNewPrivs:", "1", "lo"]


async def test_a_killed_owner_leaves_nothing(podman: str, containers: ContainerBackend, directory: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(directory), podman])  # noqa: ASYNC220
    try:
        await until(lambda: len(processes_with("sleep\0" + "98441")) >= 2, 60.0)
        assert await containers.sweep() == []  # its owner lives
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    assert len(await containers.sweep()) == 1
    assert processes_with("98441") == []


async def test_a_task_that_is_an_image(podman: str, containers: ContainerBackend, tmp_path: Path) -> None:
    """As SWE-bench's are: the repository at /testbed, with a history that holds the fix."""
    image = await an_image(containers, podman, tmp_path)
    builder = Builder(SwebenchConfig(cache=str(tmp_path / "cache")), containers.engine)
    try:
        built = builder.build(record(tmp_path, build={"image": image, "test_cmd": TEST}))
        agent = await containers.create_from(built.image)
        said = await agent.exec("git log --oneline | wc -l; cat .git/secret; grep -c 'n + 3' src/sums.py", timeout_s=20)
        assert said.output.split() == ["1", "cat:", ".git/secret:", "No", "such", "file", "or", "directory", "1"]
        await agent.exec("sed -i 's/n + 3/2 * n/' src/sums.py; rm tests/test_sums.py", timeout_s=20)
        changes = await agent.diff()
        assert changes == {"src/sums.py": Entry("file", RIGHT.encode()), "tests/test_sums.py": Entry("missing")}
        limits = {"reward": "resolved", "test_s": 30.0, "attempts": 1, "timeout_s": 120.0}
        assert (await grade_changes(built, containers, changes, **limits)).reward == 1.0  # type: ignore[arg-type]
        wrong = {"src/sums.py": Entry("file", b"import os\nos._exit(0)\n")}
        assert (await grade_changes(built, containers, wrong, **limits)).reward == 0.0  # type: ignore[arg-type]
    finally:
        builder.close()
        await containers.engine.call("rmi", "--force", image)


async def an_image(containers: ContainerBackend, base: str, folder: Path) -> str:
    root = folder / "image" / "testbed"
    texts = {"src/sums.py": WRONG, "tests/test_sums.py": TESTS, "tools/run.py": RUNNER, ".git/secret": "the fix"}
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    engine, image = containers.engine, "localhost/pearl-task"
    await engine.call("create", "--name", "pearl-task", base, "/bin/true")
    await engine.call("cp", str(root), "pearl-task:/testbed")
    await engine.call("commit", "pearl-task", image)
    await engine.call("rm", "pearl-task")
    return image


def test_an_image_is_needed(directory: Path) -> None:
    with pytest.raises(UserError, match=r"environment\.sandbox\.image"):
        ContainerBackend(SandboxConfig(backend="podman"), directory=directory)


def test_a_machine_without_the_program_is_told_the_remedy(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(directory))
    with pytest.raises(UserError, match="there is no program docker") as caught:
        ContainerBackend(SandboxConfig(backend="docker", image="x"), directory=directory)
    assert "Install docker" in caught.value.remedy


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("Cannot connect to the Docker daemon at unix:///var/run/docker.sock", "Start the daemon"),
        ("Error: initializing source docker://x: pinging container registry", "environment.sandbox.image"),
        ("Error: runc: runc create failed: cgroup", "podman run"),
    ],
)
async def test_an_engine_that_does_not_work_is_told_the_remedy(
    directory: Path, monkeypatch: pytest.MonkeyPatch, said: str, remedy: str
) -> None:
    fake = directory / "bin" / "podman"
    fake.parent.mkdir()
    fake.write_text(f'#!/bin/sh\necho "{said}"\nexit 125\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    backend = ContainerBackend(SandboxConfig(backend="podman", image="x"), directory=directory)
    with pytest.raises(UserError, match="does not run sandboxes") as caught:
        await backend.probe()
    assert said in caught.value.what and remedy in caught.value.remedy
    await backend.close()  # and does not ask the engine
    assert sorted(entry.name for entry in directory.iterdir()) == [".lock", "bin"]


async def test_many_at_once(containers: ContainerBackend) -> None:
    made = await asyncio.gather(*(containers.create({"number": b"7"}) for _ in range(4)))
    results = await asyncio.gather(*(sandbox.exec("cat number", timeout_s=60) for sandbox in made))
    assert [result.output for result in results] == ["7"] * 4
