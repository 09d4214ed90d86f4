"""Shares of all ranks through a real key-value store to the one log, and nobody waits for ever."""

import logging
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import PrefixStore, TCPStore

from tests.audit.test_log import digest as digest_of
from tests.audit.test_log import lines, opened, sha, share
from torchtitan_zephon.audit import gather
from torchtitan_zephon.audit.gather import Publisher, Writer
from torchtitan_zephon.audit.log import AuditError, AuditLog


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(gather, "_LOOK_UP", timedelta(milliseconds=50))
    monkeypatch.setattr(gather, "_LAST_WAIT", 4)


def client(server: TCPStore) -> PrefixStore:
    """A store as another process would open it."""
    return PrefixStore("audit", TCPStore("127.0.0.1", server.port, is_master=False))


def test_shares_of_all_ranks_arrive_in_order_of_ranks_whatever_comes_first(server, tmp_path):
    steps, ranks = 20, 4
    writer = Writer(opened(tmp_path), client(server), ranks)

    def rank(number: int) -> None:
        publisher = Publisher(client(server), number)
        for step in range(1, steps + 1):
            publisher.submit(step, step, share(f"{step}:{number}", tokens=[number, step]))
        publisher.close()

    threads = [threading.Thread(target=rank, args=(n,)) for n in (3, 1, 2)]
    for thread in threads:
        thread.start()
    for step in range(1, steps + 1):
        writer.submit(step, step, share(f"{step}:0", tokens=[0, step]))
    for thread in threads:
        thread.join()
    writer.close()
    assert [
        (line["step"], line["sha256"], line["dp_degree"], line["tokens"])
        for line in lines(tmp_path)
    ] == [
        (
            step,
            sha(b"".join(digest_of(f"{step}:{number}") for number in range(ranks))),
            4,
            {"web": 6, "books": 4 * step},
        )
        for step in range(1, steps + 1)
    ]


def test_a_writer_alone_needs_no_store(tmp_path):
    writer = Writer(opened(tmp_path), None, 1)
    writer.submit(1, 1, share("a"))
    writer.submit(2, 2, share("b"))
    writer.close()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


def test_the_store_holds_nothing_of_steps_that_are_logged(server, tmp_path):
    writer, publisher = Writer(opened(tmp_path), client(server), 2), Publisher(client(server), 1)
    for step in (1, 2, 3):
        publisher.submit(step, step, share("b"))
        writer.submit(step, step, share("a"))
    writer.close()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]
    store = client(server)
    assert not any(store.check([f"{step}/1"]) for step in (1, 2, 3))


def test_of_processes_that_share_a_rank_the_first_to_come_publishes(server, tmp_path):
    first, second = Publisher(client(server), 1), Publisher(client(server), 1)
    second.submit(1, 1, share("a tensor-parallel peer must not be heard"))
    assert not client(server).check(["1/1"])
    first.submit(1, 1, share("b"))
    writer = Writer(opened(tmp_path), client(server), 2)
    writer.submit(1, 1, share("a"))
    writer.close()
    assert lines(tmp_path)[0]["sha256"] == sha(digest_of("a") + digest_of("b"))


def test_ranks_of_a_restarted_job_elect_publishers_anew(server, tmp_path):
    for run in (1, 2):
        store = PrefixStore(f"run {run}", client(server))
        publisher = Publisher(store, 1)
        publisher.submit(1, 1, share("b"))
        writer = Writer(opened(tmp_path / str(run)), store, 2)
        writer.submit(1, 1, share("a"))
        writer.close()
        assert [line["step"] for line in lines(tmp_path / str(run))] == [1]


def test_a_slow_rank_holds_nobody_up_and_is_waited_for(server, tmp_path):
    writer, publisher = Writer(opened(tmp_path), client(server), 2), Publisher(client(server), 1)
    began = time.monotonic()
    for step in range(1, 101):
        writer.submit(step, step, share("a"))
    assert time.monotonic() - began < 0.5
    time.sleep(0.5)  # much longer than the writer's look-ups and last wait
    assert lines(tmp_path) == []
    for step in range(1, 101):
        publisher.submit(step, step, share("b"))
    writer.close()
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 101))


def test_a_rank_that_never_publishes_does_not_hang_the_end(server, tmp_path, caplog):
    writer, publisher = Writer(opened(tmp_path), client(server), 3), Publisher(client(server), 1)
    publisher.submit(1, 1, share("b"))
    Publisher(client(server), 2).submit(1, 1, share("c"))
    publisher.submit(2, 2, share("b"))
    for step in (1, 2, 3):
        writer.submit(step, step, share("a"))
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        writer.close()
    assert time.monotonic() - began < 3
    assert [line["step"] for line in lines(tmp_path)] == [1]
    (record,) = caplog.records
    assert record.getMessage().startswith("audit: step 2 and later are not logged")


def test_a_share_that_comes_while_the_run_ends_is_still_logged(server, tmp_path, monkeypatch):
    monkeypatch.setattr(gather, "_LAST_WAIT", 100)
    writer, publisher = Writer(opened(tmp_path), client(server), 2), Publisher(client(server), 1)
    writer.submit(1, 1, share("a"))
    late = threading.Timer(0.3, publisher.submit, (1, 1, share("b")))
    late.start()
    writer.close()
    late.join()
    assert [line["step"] for line in lines(tmp_path)] == [1]


def submit_until_told(writer: Writer, first: int) -> None:
    """Submits steps as a training loop does, for at most some seconds."""
    for step in range(first, first + 1000):
        writer.submit(step, step, share("more"))
        time.sleep(0.01)


def failing(folder: Path) -> AuditLog:
    """A log in which step 2 had other data."""
    log = opened(folder)
    log.append(1, 1, [share("1")])
    log.append(2, 2, [share("2")])
    log.close()
    return opened(folder)


def test_other_data_for_a_logged_step_raises_at_a_later_submit(tmp_path):
    writer = Writer(failing(tmp_path), None, 1)
    writer.submit(1, 1, share("1"))
    writer.submit(2, 2, share("changed"))
    with pytest.raises(AuditError, match="step 2 was run again and got other data"):
        submit_until_told(writer, 3)


def test_other_data_for_the_last_step_raises_at_close_and_closing_twice_is_safe(tmp_path):
    writer = Writer(failing(tmp_path), None, 1)
    writer.submit(2, 2, share("changed"))
    with pytest.raises(AuditError, match="step 2 was run again and got other data"):
        writer.close()
    writer.close()


def test_an_error_of_the_disk_is_not_lost(tmp_path):
    class FullDisk:
        def append(self, step, sequences, shares):
            raise OSError(28, "No space left on device")

        def close(self):
            pass

    writer = Writer(FullDisk(), None, 1)  # pyrefly: ignore[bad-argument-type]
    writer.submit(1, 1, share("1"))
    with pytest.raises(OSError, match="No space left"):
        writer.close()


def test_close_after_the_store_is_gone_ends_soon(server, tmp_path):
    class Gone:
        def wait(self, keys, timeout):
            raise RuntimeError("Connection reset by peer")

    writer = Writer(opened(tmp_path), Gone(), 2)
    writer.submit(1, 1, share("a"))
    began = time.monotonic()
    writer.close()
    assert time.monotonic() - began < 3
    assert lines(tmp_path) == []
