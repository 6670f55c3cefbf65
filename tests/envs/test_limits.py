"""What a command in a sandbox can use up, and what becomes of it then."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from envs.sandbox.backend import BubblewrapBackend
from envs.sandbox.bubblewrap import BubblewrapSandbox
from envs.sandbox.protocol import SandboxOverLimit
from pearl.config.environment import SandboxConfig
from tests.envs.conftest import processes_with

FORK = """
import os, time
made = 0
try:
    while made < 500:
        if os.fork() == 0:
            time.sleep(98432)
        made += 1
except BlockingIOError:
    pass
print(made)
"""


@pytest.fixture
async def small(directory: Path) -> AsyncIterator[BubblewrapSandbox]:
    limits = SandboxConfig(processes=20, cpu_s=1, file_mb=1, disk_mb=2, output_chars=200, memory_mb=128)
    made = BubblewrapBackend(limits, directory=directory)
    yield await made.create({"fork.py": FORK.encode()})
    await made.close()
    assert [entry.name for entry in directory.iterdir()] == [".lock"]


async def test_processes_are_bounded(small: BubblewrapSandbox) -> None:
    result = await small.exec("python3 fork.py", timeout_s=10)
    assert 5 < int(result.output) < 20
    assert processes_with("fork.py") == []


async def test_a_fork_bomb_ends_with_its_command(small: BubblewrapSandbox) -> None:
    result = await small.exec(": 98433; bomb() { bomb | bomb & }; bomb; sleep 98433", timeout_s=1)
    assert result.timed_out and result.exit_code is None
    assert processes_with("98433") == []
    assert (await small.exec("echo well", timeout_s=10)).output == "well\n"


async def test_memory_is_bounded(small: BubblewrapSandbox) -> None:
    result = await small.exec("python3 -c 'bytearray(200 << 20)'", timeout_s=10)
    assert result.exit_code == 1 and "MemoryError" in result.output


async def test_memory_of_many_is_bounded(small: BubblewrapSandbox) -> None:
    """Each has less than the limit; `sleep` shares all its memory with others, and is not counted more than once."""
    hold = "python3 -c 'import time; held = b\"x\" * (50 << 20); time.sleep(98443)' &"
    result = await small.exec(f"{hold} {hold} {hold} wait", timeout_s=20)
    assert result.over_memory and result.exit_code is None and not result.timed_out
    assert processes_with("98443") == []
    assert (
        await small.exec("for i in 1 2 3 4 5 6; do sleep 0.3 & done; wait; echo well", timeout_s=20)
    ).output == "well\n"


async def test_memory_that_nobody_has_mapped_is_bounded(small: BubblewrapSandbox) -> None:
    code = "import os, time\nfor _ in range(200): os.write(os.memfd_create('x'), bytes(1 << 20))\ntime.sleep(98443)"
    result = await small.exec(f'exec python3 -c "{code}"', timeout_s=20)
    assert result.over_memory and not result.timed_out


async def test_cpu_time_is_bounded(small: BubblewrapSandbox) -> None:
    result = await small.exec("while :; do :; done", timeout_s=20)
    assert not result.timed_out and result.exit_code in (128 + 9, 128 + 24)


async def test_wall_time_ends_the_whole_tree(small: BubblewrapSandbox) -> None:
    result = await small.exec(
        "trap '' TERM INT HUP; echo early; setsid sleep 98434 & (setsid sleep 98434 &); sleep 98434; sleep 98434",
        timeout_s=0.5,
    )
    assert result.timed_out and result.exit_code is None and result.output == "early\n"
    assert processes_with("98434") == []


async def test_output_keeps_head_and_tail(small: BubblewrapSandbox) -> None:
    result = await small.exec("seq 1 100000", timeout_s=10)
    assert result.exit_code == 0 and not result.over_output
    assert result.output.startswith("1\n2\n") and result.output.endswith("99999\n100000\n")
    assert "bytes cut" in result.output and len(result.output) < 260


async def test_a_flood_of_output_is_stopped(small: BubblewrapSandbox) -> None:
    result = await small.exec("exec yes", timeout_s=60)
    assert result.over_output and not result.timed_out and len(result.output) < 260


async def test_output_of_any_bytes_is_text(small: BubblewrapSandbox) -> None:
    result = await small.exec(r"printf 'a\0b\xff\xc3'", timeout_s=10)
    assert result.output == "ab\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}"


async def test_files_are_bounded(small: BubblewrapSandbox) -> None:
    result = await small.exec("head -c 3000000 /dev/zero > big; stat -c %s big", timeout_s=10)
    assert result.output.splitlines()[-1] == str(1 << 20)


async def test_a_full_disk_ends_the_sandbox(small: BubblewrapSandbox) -> None:
    result = await small.exec("for i in 1 2 3 4; do head -c 1000000 /dev/zero > $i; done", timeout_s=10)
    assert result.over_disk
    with pytest.raises(SandboxOverLimit):
        await small.exec("true", timeout_s=10)
    with pytest.raises(SandboxOverLimit):
        await small.snapshot()


async def test_filling_the_disk_is_noticed_meanwhile(small: BubblewrapSandbox) -> None:
    endless = "i=0; while :; do i=$((i + 1)); head -c 100000 /dev/zero > /tmp/$i; done"
    result = await small.exec(endless, timeout_s=60)
    assert result.over_disk and not result.timed_out and result.exit_code is None


async def test_empty_files_are_not_free(small: BubblewrapSandbox) -> None:
    assert (await small.exec("touch $(seq 1 600)", timeout_s=10)).over_disk


async def test_sparse_files_are_not_read(small: BubblewrapSandbox) -> None:
    result = await small.exec("for i in $(seq 1 9); do truncate -s 1M $i; done", timeout_s=10)
    assert not result.over_disk
    with pytest.raises(SandboxOverLimit):
        await small.snapshot()


async def test_trees_too_deep_for_a_path_name_are_removed(small: BubblewrapSandbox) -> None:
    code = "import os\nfor _ in range(3000): os.mkdir('deep'); os.chdir('deep')"
    assert (await small.exec(f'python3 -c "{code}"', timeout_s=20)).over_disk


async def test_closed_folders_are_removed(small: BubblewrapSandbox) -> None:
    await small.exec("mkdir -p a/b; touch a/b/c; chmod 000 a/b a", timeout_s=10)


async def test_a_closed_workspace_can_still_be_used(small: BubblewrapSandbox) -> None:
    await small.exec("chmod 000 /workspace /tmp", timeout_s=10)
    assert (await small.exec("echo well > a && cat a", timeout_s=10)).output == "well\n"


async def test_closing_its_output_hides_no_command(small: BubblewrapSandbox) -> None:
    result = await small.exec("exec > /dev/null 2>&1; exec 1>&- 2>&-; sleep 98439", timeout_s=0.5)
    assert result.timed_out
    assert processes_with("98439") == []


async def test_output_can_be_opened_by_name(small: BubblewrapSandbox) -> None:
    result = await small.exec("echo 1 > /dev/stdout; echo 2 > /dev/stderr; cat /dev/stdin", timeout_s=10, stdin=b"3\n")
    assert result.output == "1\n2\n3\n"
