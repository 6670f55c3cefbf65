"""Copies of snapshots on other hosts: what a process of such a host keeps, and from whom hosts take them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pearl.weights.copies import HostCopies, NoRoom, Origin, Unfinished
from pearl.weights.fanout import FanOut
from pearl.weights.snapshot import DATA, MANIFEST, SnapshotError, read_tensors, snapshot_directory, write_snapshot

SIZES = (5, 0, 300, 64, 1)
"""Floats of the tensors: odd ones, none, and several pages."""


@pytest.fixture
def origin(tmp_path: Path) -> Origin:
    root = tmp_path / "pearl-1-2-run"
    tensors = ((f"t{i}", torch.arange(size, dtype=torch.float32) + i) for i, size in enumerate(SIZES))
    write_snapshot(root, 7, "shape", tensors)
    return Origin("trainer-host", str(root))


def original(origin: Origin) -> tuple[bytes, bytes]:
    directory = snapshot_directory(Path(origin.root), 7)
    return (directory / MANIFEST).read_bytes(), (directory / DATA).read_bytes()


@pytest.fixture
def other(tmp_path: Path) -> HostCopies:
    return HostCopies("other-host", tmp_path)


def begin(copies: HostCopies, origin: Origin) -> Unfinished:
    copies.join(origin)
    return Unfinished(copies.directory(origin, 7), original(origin)[0])


@given(cuts=st.lists(st.integers(1, 700), max_size=20))
def test_a_copy_that_came_in_any_pieces_is_the_original(
    cuts: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    base = tmp_path_factory.mktemp("host")
    write_snapshot(base / "root", 7, "shape", ((f"t{i}", torch.randn(n)) for i, n in enumerate(SIZES)))
    origin, copies = Origin("trainer-host", str(base / "root")), HostCopies("other-host", base)
    data = memoryview(original(origin)[1])
    copy = begin(copies, origin)
    for n in [*cuts, len(data)]:
        copy.write(data[copy.position : copy.position + n])
    assert copy.complete
    whole = copy.finish()
    assert whole == copies.directory(origin, 7)
    pairs = zip(read_tensors(whole), read_tensors(snapshot_directory(Path(origin.root), 7)), strict=True)
    assert all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)
    assert sorted(path.name for path in whole.iterdir()) == sorted((DATA, MANIFEST))


def test_what_does_not_match_its_checksum_is_wanted_again(origin: Origin, other: HostCopies) -> None:
    data, copy = bytearray(original(origin)[1]), begin(other, origin)
    entry = copy.manifest.tensors[2]
    data[entry.offset + 11] ^= 1
    with pytest.raises(SnapshotError, match="t2 of version 7 came damaged"):
        copy.write(memoryview(data))
    assert copy.position == entry.offset and not copy.complete
    copy.write(memoryview(original(origin)[1])[copy.position :])
    assert copy.complete


def test_only_what_was_compared_is_handed_on(origin: Origin, other: HostCopies) -> None:
    """Another process of the host does it."""
    data, copy = memoryview(original(origin)[1]), begin(other, origin)
    third = copy.manifest.tensors[2]
    hands_on = HostCopies("other-host", other.base)
    assert hands_on.manifest(origin, 7) == original(origin)[0]
    copy.write(data[: third.offset + 8])
    first = copy.manifest.tensors[0].nbytes
    assert hands_on.piece(origin, 7, 0, 10_000) == data[:first] and hands_on.piece(origin, 7, first, 10_000) is None
    copy.write(data[copy.position :])
    copy.finish()
    assert hands_on.piece(origin, 7, third.offset, third.nbytes) == data[third.offset : third.offset + third.nbytes]


def test_the_next_fetch_goes_on_from_the_last_good_tensor(origin: Origin, other: HostCopies) -> None:
    data, copy = memoryview(original(origin)[1]), begin(other, origin)
    third = copy.manifest.tensors[2]
    copy.write(data[: third.offset + 8])
    copy.close()  # its process was killed
    again = begin(HostCopies("other-host", other.base), origin)
    assert again.position == copy.manifest.tensors[0].nbytes
    again.write(data[again.position :])
    assert again.complete


def test_a_copy_of_another_snapshot_begins_anew(origin: Origin, other: HostCopies, tmp_path: Path) -> None:
    copy = begin(other, origin)
    copy.write(memoryview(original(origin)[1])[:100])
    copy.close()
    write_snapshot(tmp_path / "else", 7, "shape", [("t0", torch.zeros(5))])
    packed = (snapshot_directory(tmp_path / "else", 7) / MANIFEST).read_bytes()
    assert Unfinished(other.directory(origin, 7), packed).position == 0


def test_more_than_the_snapshot_is_refused(origin: Origin, other: HostCopies) -> None:
    copy = begin(other, origin)
    with pytest.raises(SnapshotError, match="more came than"):
        copy.write(memoryview(original(origin)[1] + b"x"))


def test_a_host_without_room_says_so(origin: Origin, other: HostCopies, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 100}))
    with pytest.raises(NoRoom, match="room for 100 bytes"):
        begin(other, origin)


def test_one_process_of_a_host_fetches_at_a_time(origin: Origin, other: HostCopies) -> None:
    second = HostCopies("other-host", other.base)
    with other.fetching(origin, 7) as mine, second.fetching(origin, 7) as also, second.fetching(origin, 8) as later:
        assert (mine, also, later) == (True, False, True)
    with second.fetching(origin, 7) as now:
        assert now


def test_the_trainers_host_has_the_originals(origin: Origin, tmp_path: Path) -> None:
    own = HostCopies("trainer-host", tmp_path)
    assert own.join(origin) == Path(origin.root)
    own.retire(origin, 7)
    own.close()
    assert own.manifest(origin, 7) == original(origin)[0]


def test_retired_versions_go_and_newer_ones_stay(origin: Origin, other: HostCopies) -> None:
    folder = other.join(origin)
    for name in ("v3", ".v5.part", "v7", "v12"):
        (folder / name).mkdir()
    with other.fetching(origin, 4):
        pass
    other.retire(origin, 7)
    assert sorted(path.name for path in folder.iterdir()) == [".users", "v12"]


def test_the_last_process_of_a_host_removes_the_copies(origin: Origin, other: HostCopies) -> None:
    second = HostCopies("other-host", other.base)
    folder = other.join(origin)
    assert second.join(origin) == folder
    other.close()
    assert folder.exists()
    second.sweep()
    assert folder.exists(), "in use by itself"
    second.close()
    assert not folder.exists()


def test_what_a_killed_process_left_is_swept_and_what_others_use_is_not(origin: Origin, other: HostCopies) -> None:
    folder = other.join(origin)
    HostCopies("other-host", other.base).sweep()
    assert folder.exists()
    other._joined[folder].close()  # the kernel frees the locks of a process that was killed
    HostCopies("third-host", other.base).sweep()
    assert not folder.exists()


hosts = st.sampled_from([f"h{i}" for i in range(6)])


@given(st.lists(st.tuples(st.integers(0, 2), hosts, st.lists(hosts, max_size=2)), max_size=40))
def test_no_ring_of_hosts_waits_and_each_has_a_last_resort(asks: list[tuple[int, str, list[str]]]) -> None:
    fan, first_asked = FanOut("trainer"), dict[tuple[int, str], int]()
    for number, (version, host, holders) in enumerate(asks):
        first_asked.setdefault((version, host), number)
        sources = fan.sources(version, host, holders)
        assert sources[-1] == "trainer" and host not in sources and len(sources) == len(set(sources))
        for source in sources[:-1]:  # it has all of it, or began earlier
            before = first_asked.get((version, source), number + 1) < first_asked[version, host]
            assert source in holders or before


def test_hosts_that_join_together_cost_the_trainer_one_copy() -> None:
    fan = FanOut("trainer")
    assert [fan.sources(3, host)[0] for host in ("a", "b", "c", "b", "a")] == ["trainer", "a", "b", "a", "trainer"]
    assert fan.sources(3, "d") == ["c", "b", "a", "trainer"]


def test_who_has_all_of_it_comes_first() -> None:
    fan = FanOut("trainer")
    for host in ("a", "b"):
        fan.sources(3, host)
    fan.copied(3, "a")
    assert fan.sources(3, "c") == ["a", "b", "trainer"]
    assert fan.sources(3, "d", ["z", "trainer"]) == ["z", "a", "c", "b", "trainer"]


def test_a_retired_version_is_forgotten() -> None:
    fan = FanOut("trainer")
    fan.sources(3, "a")
    fan.sources(4, "b")
    assert fan.hosts == {"a", "b"}
    assert fan.newest == 4
    fan.retire(3)
    assert fan.hosts == {"b"} and fan.sources(4, "c")[0] == "b"
    fan.retire(4)
    assert fan.newest is None and not fan.hosts
