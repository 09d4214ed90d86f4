"""The audit log: digests and chain by hand, torn lines, and steps that are run again."""

import hashlib
import json
from pathlib import Path

import pytest

from torchtitan_zephon.audit.log import (
    BATCHES,
    CURSORS,
    AuditError,
    AuditLog,
    Share,
    read_lines,
    step_sums,
)

FINGERPRINT = "0123456789abcdef" * 4
OTHER = "fedcba9876543210" * 4


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def share(*sequences: str, tokens: list[int] | None = None, cursors=()) -> Share:
    return Share([digest(s) for s in sequences], tokens or [0, 0], list(cursors))


def opened(folder: Path, fingerprint: str = FINGERPRINT) -> AuditLog:
    return AuditLog(folder, fingerprint, ["web", "books"], {"seed": 3})


def lines(folder: Path, name: str = BATCHES) -> list[dict]:
    return [json.loads(line) for line in (folder / name).read_text("utf-8").splitlines()]


def test_a_step_has_the_digest_of_its_sequences_and_a_link_of_the_chain(tmp_path):
    log = opened(tmp_path)
    log.append(1, 4, [share("a", "b", tokens=[5, 1]), share("c", "d", tokens=[2, 9])])
    log.append(2, 8, [share("e", "f", "g", "h", tokens=[1, 1])])
    log.close()
    first = sha(b"".join(map(digest, "abcd")))
    second = sha(b"".join(map(digest, "efgh")))
    start = sha(FINGERPRINT.encode())
    chain = sha(bytes.fromhex(start) + bytes.fromhex(first))
    assert lines(tmp_path) == [
        {
            "step": 1,
            "sequences": 4,
            "sha256": first,
            "chain": chain,
            "sums": "0fe4d39fb795a8891507cf16d6403b39",
            "dp_degree": 2,
            "tokens": {"web": 7, "books": 10},
            "recipe": "0123456789ab",
        },
        {
            "step": 2,
            "sequences": 8,
            "sha256": second,
            "chain": sha(bytes.fromhex(chain) + bytes.fromhex(second)),
            "sums": "1c5cb5ef3fa54bee1b9cda35671a91bd",
            "dp_degree": 1,
            "tokens": {"web": 1, "books": 1},
            "recipe": "0123456789ab",
        },
    ]


def test_the_digest_of_a_step_is_the_same_for_every_number_of_ranks(tmp_path):
    parts = {1: ["abcdefgh"], 2: ["abcd", "efgh"], 4: ["ab", "cd", "ef", "gh"]}
    for ranks, of_rank in parts.items():
        log = opened(tmp_path / str(ranks))
        log.append(1, 8, [share(*sequences) for sequences in of_rank])
        log.close()
    logged = [lines(tmp_path / str(ranks))[0] for ranks in parts]
    assert {line["sha256"] for line in logged} == {sha(b"".join(map(digest, "abcdefgh")))}
    assert len({line["chain"] for line in logged}) == 1
    assert [line["dp_degree"] for line in logged] == [1, 2, 4]


def test_the_recipe_is_written_beside_the_log_once(tmp_path):
    opened(tmp_path / "deep/audit").close()
    path = tmp_path / "deep/audit/recipe-0123456789ab.json"
    assert json.loads(path.read_text("utf-8")) == {"seed": 3}
    path.write_text("kept", "utf-8")
    opened(tmp_path / "deep/audit").close()
    assert path.read_text("utf-8") == "kept"


def test_a_resumed_log_goes_on_with_the_chain(tmp_path):
    unbroken = opened(tmp_path / "unbroken")
    for step in (1, 2, 3):
        unbroken.append(step, 2 * step, [share(f"{step}a", f"{step}b")])
    unbroken.close()
    for step in (1, 2, 3):
        log = opened(tmp_path / "resumed")
        log.append(step, 2 * step, [share(f"{step}a"), share(f"{step}b")])
        log.close()
    chains = [[line["chain"] for line in lines(tmp_path / f)] for f in ("unbroken", "resumed")]
    assert chains[0] == chains[1]
    assert len(set(chains[0])) == 3


def test_a_step_run_again_with_the_same_data_is_logged_again_with_the_same_chain(tmp_path):
    log = opened(tmp_path)
    for step in (1, 2, 3):
        log.append(step, step, [share(str(step))])
    log.close()
    log = opened(tmp_path)
    log.append(2, 2, [share("2")])
    log.append(3, 3, [share("3")])
    log.close()
    logged = lines(tmp_path)
    assert [line["step"] for line in logged] == [1, 2, 3, 2, 3]
    assert logged[3:] == logged[1:3]


def test_a_step_run_again_with_other_data_is_an_error_with_both_digests(tmp_path):
    log = opened(tmp_path)
    log.append(1, 1, [share("1")])
    log.append(2, 2, [share("2")])
    log.close()
    log = opened(tmp_path)
    log.append(1, 1, [share("1")])
    with pytest.raises(AuditError) as caught:
        log.append(2, 2, [share("changed")])
    log.close()
    was, now = sha(digest("2")), sha(digest("changed"))
    assert str(caught.value).startswith(
        f"step 2 was run again and got other data than before: SHA-256 {now} now, {was} in "
        f"{tmp_path / BATCHES}"
    )
    assert lines(tmp_path)[-1]["sha256"] == now


def test_steps_of_another_recipe_or_of_another_batch_size_are_not_compared(tmp_path):
    log = opened(tmp_path)
    log.append(1, 4, [share("a")])
    log.append(2, 8, [share("b")])
    log.close()
    log = opened(tmp_path, OTHER)
    log.append(2, 8, [share("x")])
    log.close()
    log = opened(tmp_path)
    log.append(2, 6, [share("y")])
    log.close()
    assert [line["recipe"] for line in lines(tmp_path)] == [
        "0123456789ab",
        "0123456789ab",
        "fedcba987654",
        "0123456789ab",
    ]
    assert lines(tmp_path)[2]["chain"] == sha(
        bytes.fromhex(sha(OTHER.encode())) + bytes.fromhex(sha(digest("x")))
    )


@pytest.mark.parametrize("torn", [b'{"step":2,"sequ', b'{"step":2,"x":"\xc3', b"{"])
def test_a_last_line_torn_by_a_kill_is_passed_over_and_ended_before_the_next(tmp_path, torn):
    log = opened(tmp_path)
    log.append(1, 1, [share("1")])
    log.close()
    with open(tmp_path / BATCHES, "ab") as file:
        file.write(torn)
    assert [line["step"] for line in read_lines(tmp_path / BATCHES)] == [1]
    log = opened(tmp_path)
    log.append(2, 2, [share("2")])
    log.append(3, 3, [share("3")])
    log.close()
    assert [line["step"] for line in read_lines(tmp_path / BATCHES)] == [1, 2, 3]
    assert (tmp_path / BATCHES).read_bytes().split(b"\n")[1] == torn
    third = list(read_lines(tmp_path / BATCHES))[2]
    untorn = opened(tmp_path / "untorn")
    for step in (1, 2, 3):
        untorn.append(step, step, [share(str(step))])
    untorn.close()
    assert third == lines(tmp_path / "untorn")[2]


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_line_cut_anywhere_never_stops_a_resume(tmp_path, cut):
    log = opened(tmp_path)
    log.append(1, 1, [share("1")])
    log.append(2, 2, [share("2")])
    log.close()
    path = tmp_path / BATCHES
    data = path.read_bytes()
    path.write_bytes(data[: -cut * 4])
    log = opened(tmp_path)
    log.append(2, 2, [share("2")])
    log.close()
    assert list(read_lines(path))[-1]["step"] == 2


def test_a_complete_line_that_is_not_json_is_an_error_with_file_and_line(tmp_path):
    (tmp_path / BATCHES).write_bytes(b'{"step":1}\n{"step":oops}\n{"step":3}\n')
    with pytest.raises(AuditError, match=f"{tmp_path / BATCHES}, line 2: not JSON"):
        list(read_lines(tmp_path / BATCHES))


def test_a_log_that_is_not_there_has_no_lines(tmp_path):
    assert list(read_lines(tmp_path / "none.jsonl")) == []


def test_the_cursor_of_each_segment_is_logged_once(tmp_path):
    log = opened(tmp_path)
    cursors = [(1, 0, '{"at": "ß"}'), (0, 0, '{"at": 0}')]
    log.append(1, 1, [share("1", cursors=cursors[:1]), share("2", cursors=cursors)])
    log.append(2, 2, [share("3", cursors=[(0, 1, '{"at": 5}')])])
    log.close()
    log = opened(tmp_path)
    log.append(2, 2, [share("3", cursors=[(0, 1, '{"at": 5}')])])
    log.append(3, 3, [share("4", cursors=[(1, 1, '{"at": 6}')])])
    log.close()
    assert lines(tmp_path, CURSORS) == [
        {"lane": 0, "segment": 0, "recipe": "0123456789ab", "cursor": {"at": 0}},
        {"lane": 1, "segment": 0, "recipe": "0123456789ab", "cursor": {"at": "ß"}},
        {"lane": 0, "segment": 1, "recipe": "0123456789ab", "cursor": {"at": 5}},
        {"lane": 1, "segment": 1, "recipe": "0123456789ab", "cursor": {"at": 6}},
    ]


def test_cursors_of_another_recipe_are_logged_too(tmp_path):
    for fingerprint in (FINGERPRINT, OTHER):
        log = opened(tmp_path, fingerprint)
        log.append(1, 1, [share("1", cursors=[(0, 0, "{}")])])
        log.close()
    assert [line["recipe"] for line in lines(tmp_path, CURSORS)] == [
        "0123456789ab",
        "fedcba987654",
    ]


@pytest.mark.parametrize(
    "sent",
    [
        share(),
        share("a", "b", tokens=[3, 2**40], cursors=[(0, 1, '{"x": "\\n"}')]),
        Share([b"\n" * 32, b"\0" * 32], [1], [(4095, 2**40, "ß\n")]),
    ],
)
def test_a_share_survives_the_way_to_the_writing_rank(sent):
    assert Share.from_bytes(sent.to_bytes()) == sent


def test_the_sums_of_a_step_are_those_of_its_sequences_values_plain_and_weighted_by_place():
    one, two, large = (n.to_bytes(8, "big") + bytes(24) for n in (1, 2, 2**61 - 1 + 5))
    assert step_sums([]) == (0, 0)
    assert step_sums([one, two]) == (3, 5)
    assert step_sums([two, one]) == (3, 4)
    assert step_sums([one, one, large]) == (7, 18)


def test_a_step_takes_at_most_400_bytes_of_the_log_with_five_datasets(tmp_path):
    names = ["fineweb-edu", "stack-v2", "wikipedia", "arxiv", "books"]
    log = AuditLog(tmp_path, FINGERPRINT, names, {})
    log.append(1_000_000, 4_096_000_000, [share("a", tokens=[33_554_432] * 5)])
    log.close()
    assert len((tmp_path / BATCHES).read_bytes()) <= 400
