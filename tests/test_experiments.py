"""The experiments' arithmetic and reports, on hand-made records. No training."""

import hashlib
import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import elastic_resume_experiment
import topology_variance_experiment
from experiment import corpus, elastic_resume, report, runs, topology_variance
from experiment.train import row_digest


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def step_rows(zephon_differs: bool = False) -> list[dict[str, str]]:
    """Rows of a steps.csv: 4 steps, a checkpoint at step 2, resumed on 1 rank and on 8."""
    rows = []
    for loader in ("stock", "zephon"):
        for run, ranks, first in (
            ("reference", 4, 1),
            ("resumed-on-1", 1, 3),
            ("resumed-on-8", 8, 3),
        ):
            other = run != "reference" and (loader == "stock" or zephon_differs)
            for step in range(first, 5):
                data = f"{run} {step}" if other else f"{loader} {step}"
                loss = 8 - step + (0.25 if other else 0)
                row = {"loader": loader, "run": run, "ranks": ranks, "step": step, "loss": loss}
                row |= {"rows": 24, "rows_seen": 6 if other else 0}
                rows.append({k: str(v) for k, v in row.items()} | {"sha256": sha(data)})
    return rows


def run_rows() -> list[dict[str, str]]:
    """Rows of a runs.csv: 2 seeds on 1 and 2 ranks.

    Spreads are 0.5 and 0.25 of the stock loader, 0.001 and 0.002 of this one.
    """
    losses = {
        ("stock", 1): (5.0, 5.5),
        ("stock", 2): (5.25, 5.0),
        ("zephon", 1): (5.0, 5.001),
        ("zephon", 2): (5.102, 5.1),
    }
    return [
        {
            "loader": loader,
            "seed": str(seed),
            "ranks": str(ranks),
            "held_out_loss": str(loss),
            "train_loss": "4.0",
            "steps": "40",
            "equal_batches": "40" if loader == "zephon" or ranks == 1 else "0",
        }
        for (loader, seed), pair in losses.items()
        for ranks, loss in zip((1, 2), pair, strict=True)
    ]


def meta() -> dict:
    return {
        "checkpoint": 2,
        "refusal": "RuntimeError: Missing key",
        "command": "python x.py --dp 4",
        "commands": ["torchrun one", "torchrun two"],
        "seconds": {},
        "versions": {"torch": "2.14"},
    }


# --- what runs recorded ---------------------------------------------------------------------------


def test_row_digest_is_sha256_of_three_int32_arrays():
    expected = hashlib.sha256(b"\x01\0\0\0\x02\0\0\0\x02\0\0\0\x03\0\0\0\0\0\0\0\x01\0\0\0")
    assert row_digest([1, 2], [2, 3], [0, 1]) == expected.hexdigest()


def test_global_batch_digest_joins_the_ranks_rows_in_rank_order(tmp_path):
    rows = [sha(str(i)) for i in range(8)]
    # 2 steps of 4 rows: rank 0 has rows 0 1 of the first step and 4 5 of the second.
    (tmp_path / "rows-0.txt").write_text("\n".join(rows[i] for i in (0, 1, 4, 5)))
    (tmp_path / "rows-1.txt").write_text("\n".join(rows[i] for i in (2, 3, 6, 7)))
    batches = runs.read_batches(tmp_path, batch=4, ranks=2, first=31)
    assert batches == {31: rows[:4], 32: rows[4:]}
    joined = b"".join(bytes.fromhex(row) for row in rows[:4])
    assert runs.batch_digest(batches[31]) == hashlib.sha256(joined).hexdigest()


def test_ranks_that_recorded_different_steps_are_refused(tmp_path):
    (tmp_path / "rows-0.txt").write_text(f"{sha('a')}\n{sha('b')}\n")
    (tmp_path / "rows-1.txt").write_text(f"{sha('c')}\n")
    with pytest.raises(ValueError, match=r"\[2, 1\] rows"):
        runs.read_batches(tmp_path, batch=2, ranks=2, first=1)


def test_losses_are_read_by_kind_with_all_their_digits(tmp_path):
    text = "validate,1,8.5\ntrain,1,8.123456789\ntrain,2,8.0\nvalidate,2,7.5\n"
    (tmp_path / "losses.csv").write_text(text)
    assert runs.read_losses(tmp_path, "train") == {1: 8.123456789, 2: 8.0}
    assert runs.read_losses(tmp_path, "validate") == {1: 8.5, 2: 7.5}


def test_csv_round_trip(tmp_path):
    rows = step_rows()
    runs.write_csv(tmp_path / "steps.csv", rows)
    assert runs.read_csv(tmp_path / "steps.csv") == rows


@pytest.mark.parametrize(
    ("ranks", "at_least", "batch"),
    [((4, 1, 2, 8), 24, 24), ((16, 8, 32, 64), 24, 64), ((3, 4), 25, 36)],
)
def test_global_batch_is_a_multiple_of_every_rank_count(ranks, at_least, batch):
    assert runs.global_batch(ranks, at_least) == batch


def test_commands_name_no_absolute_path():
    arm = runs.Arm("stock/resumed-on-2", "stock", 2, "out/train.toml", 31, ("--x", "1"))
    command = arm.command("out")
    assert command[:4] == ["torchrun", "--standalone", "--nproc-per-node", "2"]
    assert command[-2:] == ["--x", "1"]
    assert not any(word.startswith("/") for word in command)


# --- experiment 1 ---------------------------------------------------------------------------------


def test_resumed_runs_are_compared_with_their_own_loaders_reference():
    stock, zephon = elastic_resume.summarize(step_rows(), checkpoint=2)
    assert (stock.loader, stock.reference.ranks, stock.reference.steps) == ("stock", 4, 4)
    assert [run.ranks for run in stock.resumed] == [1, 8]
    assert stock.resumed[0].differing == {3, 4}
    assert stock.resumed[0].largest_gap == 0.25
    assert stock.resumed[0].verdict() == "- 0 of 2"
    assert (stock.resumed[0].seen_again, stock.resumed[0].rows) == (12, 48)
    assert zephon.resumed[1].differing == frozenset()
    assert zephon.resumed[1].verdict() == "+ 2 of 2"
    assert zephon.resumed[1].verdict(plain=True) == "2 of 2"


def test_a_loader_that_fails_is_not_called_equal():
    _, zephon = elastic_resume.summarize(step_rows(zephon_differs=True), checkpoint=2)
    assert [run.equal for run in zephon.resumed] == [0, 0]


def test_a_run_that_did_not_resume_is_refused():
    with pytest.raises(ValueError, match="started at step 3, not 31"):
        elastic_resume.summarize(step_rows(), checkpoint=30)


def test_an_audit_log_that_disagrees_with_the_record_is_an_error(tmp_path):
    arm = runs.Arm("zephon/reference", "zephon", 1, "train.toml", 1)
    log = tmp_path / arm.name / "audit/global_batches.jsonl"
    log.parent.mkdir(parents=True)
    log.write_text(json.dumps({"step": 1, "sha256": sha("a")}) + "\n")
    elastic_resume_experiment.check_against_audit(arm, {1: sha("a")}, tmp_path)
    with pytest.raises(RuntimeError, match="not the digests"):
        elastic_resume_experiment.check_against_audit(arm, {1: sha("b")}, tmp_path)


def test_elastic_resume_report_is_one_file_with_figure_table_and_commands(tmp_path):
    pytest.importorskip("matplotlib")
    results = elastic_resume.summarize(step_rows(), checkpoint=2)
    elastic_resume.draw(results, 2, tmp_path / "elastic_resume.png")
    (tmp_path / "train.toml").write_text("[training]\nsteps = 4\n")
    page = elastic_resume_experiment.make_page(results, meta(), tmp_path)
    assert_self_contained(page)
    assert "With this loader 4 of 4 global batches" in page
    assert "stock loader 0 of 4 are" in page
    assert '<td class="good">2 of 2</td>' in page
    assert '<td class="bad">0 of 2</td>' in page


def test_rows_seen_before_the_checkpoint_are_counted(tmp_path):
    recorded = {
        "reference": [sha(c) for c in "abcd"],  # 2 steps of 2 rows
        "resumed-on-1": [sha(c) for c in "bx"],  # step 2: a row of step 1, and another one
    }
    for name, rows in recorded.items():
        record = tmp_path / "stock" / name / "record"
        record.mkdir(parents=True)
        (record / "rows-0.txt").write_text("\n".join(rows))
        first = 1 if name == "reference" else 2
        lines = [f"train,{first + i},4.0\n" for i in range(len(rows) // 2)]
        (record / "losses.csv").write_text("".join(lines))
    reference = runs.Arm("stock/reference", "stock", 1, "train.toml", 1)
    resumed = runs.Arm("stock/resumed-on-1", "stock", 1, "train.toml", 2)
    rows = elastic_resume_experiment.collect([reference], [resumed], 2, 1, tmp_path)
    assert [(r["run"], r["step"], r["rows_seen"]) for r in rows] == [
        ("reference", 1, 2),
        ("reference", 2, 0),
        ("resumed-on-1", 2, 1),
    ]


# --- experiment 2 ---------------------------------------------------------------------------------


def test_spreads_and_their_ratio():
    results = topology_variance.repeats(run_rows())
    assert [r.spread for r in results["stock"]] == pytest.approx([0.5, 0.25])
    assert topology_variance.mean_spread(results["zephon"]) == pytest.approx(0.0015)
    assert topology_variance.ratio(results) == pytest.approx(250)
    # 5.0 and 5.25 on 1 rank, 5.5 and 5.0 on 2
    assert topology_variance.seed_noise(results["stock"]) == pytest.approx(0.375)
    assert topology_variance.seed_noise(results["stock"][:1]) is None


def test_a_loader_without_any_spread_can_be_reported_too(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [r | {"held_out_loss": "5.0"} if r["loader"] == "zephon" else r for r in run_rows()]
    results = topology_variance.repeats(rows)
    assert topology_variance.ratio(results) == float("inf")
    topology_variance.draw(results, tmp_path / "topology_variance.png")
    assert report.times(topology_variance.ratio(results)) == "infinitely many"


def test_topology_variance_report_is_one_file_with_figure_table_and_commands(tmp_path):
    pytest.importorskip("matplotlib")
    rows = run_rows()
    results = topology_variance.repeats(rows)
    topology_variance.draw(results, tmp_path / "topology_variance.png")
    (tmp_path / "seed-1.toml").write_text("[training]\nsteps = 4\n")
    page = topology_variance_experiment.make_page(results, rows, meta(), tmp_path)
    assert_self_contained(page)
    assert "250 times less" in page
    assert '<td class="good">40 of 40</td>' in page
    assert '<td class="bad">0 of 40</td>' in page
    assert "<td>0.82</td><td>0.05</td><td>16</td>" in page


# --- report and corpus ----------------------------------------------------------------------------


def assert_self_contained(page: str) -> None:
    assert page.count("data:image/png;base64,") == 1
    assert not re.findall(r'(?:src|href)="(?!data:)', page)
    assert "<pre>python x.py --dp 4</pre>" in page
    assert "torchrun one\ntorchrun two" in page
    assert "[training]" in page
    assert "<td>torch</td><td>2.14</td>" in page


def test_text_in_a_report_is_escaped():
    assert "&lt;b&gt;" in report.page("<b>", "lead", [])
    assert "<td>&amp;</td>" in report.table(["h"], [["&"]])


def test_documents_are_cut_at_empty_lines_and_nothing_is_lost():
    text = "\n\n".join(f"paragraph {i}" for i in range(20))
    documents = corpus.paragraphs(text, 60)
    assert max(map(len, documents)) <= 62
    assert "".join(documents).rstrip() == text
