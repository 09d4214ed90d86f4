"""Barcodes: bars are the digests' leading bits, and nothing that differs goes unseen."""

import hashlib
import sys
from pathlib import Path

import pytest

from torchtitan_zephon.audit.barcode import NoMatplotlibError, Track, png, terminal


def digests(steps: range, salt: str = "") -> dict[int, str]:
    return {s: hashlib.sha256(f"{salt}{s}".encode()).hexdigest() for s in steps}


def tracks(steps: int, differing: set[int], first: int = 1) -> list[Track]:
    sound = digests(range(1, steps + 1))
    wrong = digests(range(1, steps + 1), "wrong")
    faulty = {s: wrong[s] if s in differing else d for s, d in sound.items() if s >= first}
    return [Track("sound", sound), Track("faulty", faulty, frozenset(differing))]


def test_four_leading_bits_of_each_digest_are_bars_two_to_a_character() -> None:
    bits = {1: "f0", 2: "00", 3: "80", 4: "40", 5: "20", 6: "10", 7: "90"}
    track = Track("run", {s: b + "0" * 62 for s, b in bits.items()})
    assert terminal([track], columns=40, color=False).splitlines() == [
        "     1 2 3 4 5 6 7",
        "run  ██··▌ ▐  ▌ ▐▌▐",
    ]


def test_what_differs_is_red_and_marked_and_steps_that_are_not_there_are_blank() -> None:
    sound = Track("a", dict.fromkeys(range(1, 5), "f" * 64))
    other = Track("b", {3: "f" * 64, 4: "9" * 64}, frozenset([4]))
    assert terminal([sound, other], columns=40, color=False).splitlines() == [
        "   1 2 3 4",
        "a  ████████",
        "b      ██▌▐",
        "         ^^",
    ]
    assert terminal([sound, other], columns=40).splitlines()[1:3] == [
        "a  \033[32m████████\033[0m",
        "b      \033[32m██\033[31m▌▐\033[0m",
    ]


@pytest.mark.parametrize("steps", [1, 10, 79, 80, 81, 1000, 10_000])
def test_any_number_of_steps_fits_the_width_and_one_that_differs_is_seen(steps: int) -> None:
    for wrong in {1, (steps + 1) // 2, steps}:
        lines = terminal(tracks(steps, {wrong}), columns=100, color=False).splitlines()
        assert all(len(line) <= 100 for line in lines)
        marks = lines[3]
        assert set(marks) == {" ", "^"}
        place = (marks.index("^") - 8) / max(1, len(lines[1]) - 8)
        assert abs(place - (wrong - 1) / steps) < 0.03 + 1 / steps


def test_places_that_stand_for_several_steps_say_so() -> None:
    text = terminal(tracks(10_000, set()), columns=108, color=False)
    assert text.splitlines()[-1].strip() == "each place is 100 steps"
    assert text.splitlines()[0].split()[:3] == ["1", "1201", "2401"]


@pytest.mark.parametrize("steps", [1, 10, 180, 10_000])
def test_a_figure_is_green_where_runs_agree_with_red_only_where_they_do_not(
    steps: int, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    def red(path: Path) -> int:
        image = imread(path)
        return int(((image[..., 0] > 0.7) & (image[..., 1] < 0.4)).sum())

    png(tracks(steps, set(), first=(steps + 1) // 2), tmp_path / "same.png")
    png(tracks(steps, {(steps + 1) // 2}), tmp_path / "differ.png")
    assert imread(tmp_path / "same.png").shape[1] == 2200
    assert red(tmp_path / "same.png") == 0
    assert red(tmp_path / "differ.png") > 300


def test_without_matplotlib_a_figure_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(NoMatplotlibError, match=r"pip install 'torchtitan-zephon\[report\]'"):
        png(tracks(3, set()), tmp_path / "x.png")
