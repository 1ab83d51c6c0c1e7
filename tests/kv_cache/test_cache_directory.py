"""Files of the cache: what was written is read back or nothing is, whatever happens to the files."""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ostinato.errors import ConfigError, Remedy
from ostinato.kv_cache.offload import directory as module
from ostinato.kv_cache.offload.directory import PAGE, PARTIAL_SUFFIX, RETRY_SECONDS, CacheDirectory
from ostinato.kv_cache.offload.file_format import DIRECT_IO_BYTES, file_bytes
from tests.support.damaged_files import damage

TOKENS = tuple(range(100, 116))
SIZE = 300


def name_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def contents_of(number: int, size: int = SIZE) -> bytes:
    return random.Random(number).randbytes(size)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def opened(folder: Path, limit: int = 10**6, waiting: int = 10**6, clock: Clock | None = None) -> CacheDirectory:
    return CacheDirectory(folder / "one", limit, waiting, clock or Clock())


def write(directory: CacheDirectory, *numbers: int, size: int = SIZE) -> list[bool]:
    done = [
        directory.write("block", name_of(n), TOKENS, size, lambda into, n=n: copy(into, contents_of(n, size)))
        for n in numbers
    ]
    directory.flush()
    return done


def copy(into: memoryview, contents: bytes) -> None:
    into[:] = contents


def read(directory: CacheDirectory, number: int, size: int = SIZE) -> bytes | None:
    found = directory.read("block", name_of(number), TOKENS, size)
    return None if found is None else bytes(found)


def test_engines_that_write_one_file_at_once_write_it_under_names_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renamed: list[Path] = []
    rename = Path.rename

    def noted(source: Path, target: Path) -> Path:
        renamed.append(source)
        return rename(source, target)

    first, second = opened(tmp_path), opened(tmp_path)
    monkeypatch.setattr(Path, "rename", noted)
    assert write(first, 1) == [True]
    (tmp_path / "one" / renamed[0].name.rpartition(".")[0].rpartition(".")[0]).unlink()
    assert write(second, 1) == [True]
    assert len(set(renamed)) == 2
    assert {each.suffix for each in renamed} == {PARTIAL_SUFFIX}


def test_what_was_written_is_read_back_also_by_another_engine(tmp_path: Path) -> None:
    first = opened(tmp_path)
    assert write(first, 1, 2) == [True, True]
    second = opened(tmp_path)
    assert (second.num_files, second.num_bytes) == (2, first.num_bytes)
    for directory in (first, second):
        assert [read(directory, n) for n in (1, 2)] == [contents_of(1), contents_of(2)]
    assert not second.has("state", name_of(1))
    assert second.counts.read == 2
    assert write(second, 1) == [True]
    assert second.counts.written == 0
    first.close()
    first.close()


def test_what_waits_to_be_written_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = opened(tmp_path)
    monkeypatch.setattr(directory, "_write_behind", lambda: None)
    directory.write("block", name_of(1), TOKENS, SIZE, lambda into: copy(into, contents_of(1)))
    assert directory.has("block", name_of(1))
    assert directory.num_files == 0
    assert read(directory, 1) == contents_of(1)


def test_what_was_read_while_it_waited_stays_though_its_memory_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, go_on = opened(tmp_path), threading.Event()
    real = directory._write
    monkeypatch.setattr(directory, "_write", lambda *given: (go_on.wait(), real(*given)))
    directory.write("block", name_of(1), TOKENS, SIZE, lambda into: copy(into, contents_of(1)))
    found = directory.read("block", name_of(1), TOKENS, SIZE)
    go_on.set()
    directory.flush()
    write(directory, 2)  # into the memory of the first one
    assert found is not None
    assert bytes(found) == contents_of(1)
    assert [read(directory, number) for number in (1, 2)] == [contents_of(1), contents_of(2)]


@pytest.mark.parametrize("is_refused", [False, True])
@pytest.mark.parametrize(
    "size", [DIRECT_IO_BYTES - 200, DIRECT_IO_BYTES, DIRECT_IO_BYTES + PAGE - 173, 5 * DIRECT_IO_BYTES]
)
def test_large_files_go_past_the_page_cache_where_that_can_be(
    size: int, is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, ways = os.write, []

    def noting(file: int, given: memoryview) -> int:
        is_direct = bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)
        ways.append(is_direct)
        if is_direct and is_refused:
            raise OSError(22, "Invalid argument")
        return real(file, given)

    directory = opened(tmp_path, limit=10**7, waiting=10**7)
    monkeypatch.setattr(os, "write", noting)
    assert write(directory, 1, size=size) == [True]
    # Some systems of files, as those in memory, refuse it themselves.
    assert ways[-1] is False if size < DIRECT_IO_BYTES - 172 or is_refused else ways
    later = opened(tmp_path, limit=10**7)
    assert (read(later, 1, size), directory.counts.failed) == (contents_of(1, size), 0)
    assert later.num_bytes == directory.num_bytes == file_bytes(len(TOKENS), size)


def test_what_would_wait_for_too_long_is_dropped_and_not_copied(tmp_path: Path) -> None:
    directory = opened(tmp_path, waiting=SIZE - 1)

    def never(_: memoryview) -> None:
        raise AssertionError("nobody needs a copy of what is dropped")

    assert not directory.write("block", name_of(1), TOKENS, SIZE, never)
    assert (directory.counts.dropped, directory.has("block", name_of(1))) == (1, False)


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write(opened(tmp_path), 1)
    finally:
        os.umask(before)
    folder = tmp_path / "one"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(each.stat().st_mode) for each in folder.iterdir()} == {0o600}


def test_the_limit_is_kept_by_removing_what_was_unused_for_longest(tmp_path: Path) -> None:
    directory = opened(tmp_path, limit=3 * 520)
    write(directory, 1, 2, 3)
    directory.touch("block", name_of(1))
    write(directory, 4)
    assert [directory.has("block", name_of(n)) for n in (1, 2, 3, 4)] == [True, False, True, True]
    assert directory.counts.removed == 1
    assert sum(each.stat().st_size for each in (tmp_path / "one").iterdir()) == directory.num_bytes <= 3 * 520


def test_the_order_of_use_outlives_the_engine(tmp_path: Path) -> None:
    first = opened(tmp_path)
    write(first, 1, 2, 3)
    for number, moment in ((1, 300), (2, 100), (3, 200)):
        os.utime(tmp_path / "one" / f"{name_of(number).hex()}.block", (moment, moment))
    second = opened(tmp_path, limit=3 * 520)
    write(second, 4)
    assert [second.has("block", name_of(n)) for n in (1, 2, 3, 4)] == [True, False, True, True]


def test_a_file_larger_than_the_limit_is_refused_and_nothing_is_removed_for_it(tmp_path: Path) -> None:
    directory = opened(tmp_path, limit=1000)
    write(directory, 1)
    write(directory, 2, size=2000)
    assert (directory.has("block", name_of(1)), directory.has("block", name_of(2))) == (True, False)
    assert directory.counts.failed == 1


def test_of_a_thousand_damaged_files_none_is_believed(tmp_path: Path) -> None:
    chance = random.Random(5)
    directory = opened(tmp_path)
    ways = set()
    for number in range(1000):
        write(directory, number, number + 1)
        one, other = (tmp_path / "one" / f"{name_of(n).hex()}.block" for n in (number, number + 1))
        before = one.read_bytes()
        way = damage(one, other, chance)
        ways.add(way)
        same = one.is_file() and one.read_bytes() == before  # bits that were flipped back
        assert read(directory, number) == (contents_of(number) if same else None)
        assert directory.has("block", name_of(number)) == same
        if way == "folder":
            one.rmdir()
        assert read(directory, number + 1) == contents_of(number + 1)
    assert len(ways) == 9
    assert directory.counts.damaged > 500


def test_a_name_stands_for_its_tokens_and_its_size_alone(tmp_path: Path) -> None:
    for tokens, size in ((TOKENS[:-1], SIZE), ((*TOKENS[:-1], 1), SIZE), (TOKENS, SIZE - 8)):
        directory = opened(tmp_path)
        write(directory, 1)
        assert directory.read("block", name_of(1), tokens, size) is None


def test_what_another_engine_removed_is_not_found_and_is_no_damage(tmp_path: Path) -> None:
    first, second = opened(tmp_path), None
    write(first, 1, 2)
    second = opened(tmp_path)
    first.clear()
    assert (first.num_files, list((tmp_path / "one").iterdir())) == (0, [])
    assert read(second, 1) is None
    second.touch("block", name_of(2))
    assert (second.num_files, second.counts.damaged) == (0, 0)


def test_what_another_engine_wrote_is_found_after_a_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RESCAN_WRITES", 2)
    first, second = opened(tmp_path), opened(tmp_path)
    write(first, 1)
    assert not second.has("block", name_of(1))
    write(second, 2, 3)
    assert read(second, 1) == contents_of(1)


def test_after_a_write_that_failed_nothing_is_written_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    directory = opened(tmp_path, clock=clock)

    def full(path: Path, *_: object) -> None:
        path.write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_file", full)
        write(directory, 1)
    assert (directory.counts.failed, list((tmp_path / "one").iterdir())) == (1, [])
    assert write(directory, 2) == [False]
    assert directory.counts.dropped == 1
    clock.now = RETRY_SECONDS
    assert write(directory, 2) == [True]
    assert read(directory, 2) == contents_of(2)


def test_a_disk_that_is_full_ends_no_engine(tmp_path: Path) -> None:
    # A limit on the size of files stands for the disk; the signal that comes with it is ignored by Python.
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    directory = opened(tmp_path)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))
        write(directory, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (directory.counts.failed, read(directory, 1), list((tmp_path / "one").iterdir())) == (1, None, [])


KILLED = """
import sys
from pathlib import Path
from ostinato.kv_cache.offload.directory import CacheDirectory
directory = CacheDirectory(Path(sys.argv[1]) / "one", 10**9, 10**9)
print("ready", flush=True)
number = 0
while True:
    number += 1
    def copy(into):
        into[:] = bytes([number % 251]) * len(into)
    directory.write("block", number.to_bytes(16, "big"), (number,), int(sys.argv[2]), copy)
    directory.flush()
"""


@pytest.mark.parametrize("size", [200_000, 600_000])
def test_a_process_killed_while_it_writes_leaves_whole_files(size: int, tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path), str(size)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    while len(list((tmp_path / "one").glob("*.block"))) < 20:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    unfinished = tmp_path / "one" / f"{name_of(0).hex()}.block.1{PARTIAL_SUFFIX}"
    unfinished.write_bytes(b"what it was writing")
    os.utime(unfinished, (1, 1))
    directory = opened(tmp_path, limit=10**9)
    assert not unfinished.exists()
    assert directory.num_files >= 20
    for number in range(1, directory.num_files + 1):
        found = directory.read("block", name_of(number), (number,), size)
        assert found is not None
        assert bytes(found[:3]) == bytes([number % 251]) * 3
    assert directory.counts.damaged == 0


def test_two_engines_write_the_same_directory(tmp_path: Path) -> None:
    first, second = opened(tmp_path, limit=40 * 520), opened(tmp_path, limit=40 * 520)
    for number in range(300):
        write(first, number)
        write(second, number + 3)
        for directory in (first, second):
            assert read(directory, number + 2) in (None, contents_of(number + 2))
    assert first.counts.damaged == second.counts.damaged == 0


def test_a_place_that_cannot_be_written_to_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(ConfigError, match="cannot be used: Not a directory") as error:
        opened(tmp_path / "file")
    assert error.value.remedies == (Remedy("cache_dir", None),)


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    (folder / f"{'x' * 32}.block").write_text("not a name")
    directory = opened(tmp_path)
    write(directory, 1)
    directory.clear()
    assert {each.name for each in folder.iterdir()} == {"notes.txt", f"{'x' * 32}.block"}


def test_what_is_kept_already_counts_as_used_now_for_later_engines_too(tmp_path: Path) -> None:
    first = opened(tmp_path)
    write(first, 1, 2, 3)
    for number in (1, 2, 3):
        os.utime(tmp_path / "one" / f"{name_of(number).hex()}.block", (number, number))
    assert write(first, 1) == [True]
    assert first.counts.written == 3
    second = opened(tmp_path, limit=3 * 520)
    write(second, 4)
    assert [second.has("block", name_of(n)) for n in (1, 2, 3, 4)] == [True, False, True, True]


def test_what_another_engine_removed_is_written_again(tmp_path: Path) -> None:
    first = opened(tmp_path)
    write(first, 1)
    opened(tmp_path).clear()
    assert write(first, 1) == [True]
    assert (first.counts.written, read(first, 1)) == (2, contents_of(1))


def test_an_error_that_nobody_foresaw_does_not_end_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    directory = opened(tmp_path, clock=clock)
    with monkeypatch.context() as patch:
        patch.setattr(module.PendingFile, "write_checksum", lambda *_: [][0])
        assert write(directory, 1) == [True]  # and waiting for it ends
    assert (directory.counts.failed, directory.has("block", name_of(1))) == (1, False)
    clock.now = RETRY_SECONDS
    write(directory, 2)
    assert read(directory, 2) == contents_of(2)
    directory.close()


def test_two_engines_may_write_one_file_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Also two of one process id, as in two containers.
    first, second = opened(tmp_path), opened(tmp_path)
    write_file = module.write_file

    def meanwhile(path: Path, pages: mmap.mmap, size: int) -> None:
        write_file(path, pages, size)
        with monkeypatch.context() as patch:
            patch.setattr(module, "write_file", write_file)
            write(second, 1)

    monkeypatch.setattr(module, "write_file", meanwhile)
    write(first, 1)
    for directory in (first, second):
        assert read(directory, 1) == contents_of(1)
        assert (directory.counts.failed, directory.counts.damaged) == (0, 0)
    assert len(list((tmp_path / "one").iterdir())) == 1


def test_what_is_no_file_is_neither_read_nor_waited_for(tmp_path: Path) -> None:
    directory = opened(tmp_path)
    write(directory, 1, 2)
    pipe, huge = (tmp_path / "one" / f"{name_of(n).hex()}.block" for n in (1, 2))
    pipe.unlink()
    os.mkfifo(pipe)
    os.truncate(huge, 2**40)  # of holes; nobody may take memory for them
    assert [read(directory, n) for n in (1, 2)] == [None, None]
    assert directory.counts.damaged == 2
    assert list((tmp_path / "one").iterdir()) == []


def test_bytes_are_counted_right_whatever_happens(tmp_path: Path) -> None:
    chance = random.Random(3)
    directory = opened(tmp_path, limit=20 * 520)
    for _ in range(400):
        number = chance.randrange(40)
        match chance.choice(["write", "write", "use", "read", "gone", "look"]):
            case "write":
                write(directory, number)
            case "use":
                directory.touch("block", name_of(number))
            case "read":
                if directory.has("block", name_of(number)):
                    read(directory, number)
            case "gone":
                (tmp_path / "one" / f"{name_of(number).hex()}.block").unlink(missing_ok=True)
            case "look":
                directory._rescan()
        assert directory.num_bytes == sum(directory._files.values()) <= 20 * 520
    directory._rescan()
    assert directory.num_bytes == sum(each.stat().st_size for each in (tmp_path / "one").iterdir()) > 0


def test_a_folder_that_was_cleared_away_is_made_again(tmp_path: Path) -> None:
    directory = CacheDirectory(tmp_path / "one", 10**6, 10**6, Clock(), about=b"of whom")
    write(directory, 1)
    for each in (tmp_path / "one").iterdir():
        each.unlink()
    (tmp_path / "one").rmdir()
    assert write(directory, 2) == [True]
    assert (directory.counts.failed, read(directory, 2)) == (0, contents_of(2))
    assert (tmp_path / "one" / module.ABOUT_FILE).read_bytes() == b"of whom"
    assert stat.S_IMODE((tmp_path / "one").stat().st_mode) == 0o700


def test_where_no_thread_can_be_started_nothing_is_written_and_nothing_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    clock = Clock()
    directory = opened(tmp_path, clock=clock)
    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", refuse)
        assert write(directory, 1) == [False]  # and waiting for it ends
    assert (directory.counts.failed, directory.has("block", name_of(1))) == (1, False)
    clock.now = RETRY_SECONDS
    assert write(directory, 1) == [True]
    assert read(directory, 1) == contents_of(1)
    directory.close()


def test_what_there_is_no_memory_to_copy_or_to_read_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(*_: object) -> None:
        raise MemoryError

    directory = opened(tmp_path)
    assert not directory.write("block", name_of(1), TOKENS, SIZE, lacking)
    assert directory.counts.failed == 1
    other = opened(tmp_path)
    write(other, 2)
    monkeypatch.setattr(module, "read_file", lacking)
    assert read(other, 2) is None
    assert not other.has("block", name_of(2))
