"""Figures come out as files, and say what they must, whatever the numbers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from minikv.show import console, plots


def row(sessions: int, **more: float) -> SimpleNamespace:
    values = {
        "p50_ttft_s": 0.1, "p99_ttft_s": 0.2, "luckiest_ttft_s": 0.05, "unluckiest_ttft_s": 0.15, "hit_rate": 0.9, "best_hit_rate": 0.9,
        "tokens_per_s": 100.0, "cold_p99_ttft_s": 1.0,
    }  # fmt: skip
    return SimpleNamespace(sessions=sessions, **(values | more))


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_a_cliff_is_drawn(tmp_path, ending):
    figure = plots.cliff([row(1), row(3), row(9, p99_ttft_s=5.0)], 8, "title", {4: [row(3), row(5)]}, [(9, 4.0)])
    plots.save(figure, tmp_path / f"cliff.{ending}")
    assert (tmp_path / f"cliff.{ending}").stat().st_size > 5_000


def test_the_mark_stands_where_the_arithmetic_says():
    figure = plots.cliff([row(1), row(9)], 8, "title")
    for axis in figure.axes:
        assert any(list(line.get_xdata()) == [8.5, 8.5] for line in axis.lines)
    assert any("8 sessions fill the pool" in text.get_text() for text in figure.axes[1].texts)


def test_one_row_alone_is_drawn():
    plots.cliff([row(1)], 8, "title")


def test_labels_do_not_run_into_each_other():
    assert plots._labels_with_room([1, 12, 13, 14, 48], keep=(14,)) == ["1", "12", "", "14", "48"]


def test_a_curve_of_capacities_is_drawn(tmp_path):
    figure = plots.capacity({"lru": [(512, 0.0), (5_120, 0.3)], "optimal": [(512, 0.1), (5_120, 0.3)]}, "title")
    plots.save(figure, tmp_path / "c.png")
    assert (tmp_path / "c.png").exists()


def test_whole_numbers():
    assert console.whole_numbers("3,1,3") == [1, 3]
    for wrong in ("", "a", "1,,2", "0", "-1", "1.5"):
        with pytest.raises(ValueError, match="number"):
            console.whole_numbers(wrong)


def test_a_rule_separates_what_fits_from_what_does_not():
    table = console.cliff_table([row(7), row(8), row(9)], 8)
    assert [each.end_section for each in table.rows] == [False, True, False]
