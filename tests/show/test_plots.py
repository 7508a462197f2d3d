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


PARTS = ("plan", "product", "attention", "rest")


def test_a_steps_parts_add_up_to_the_whole(tmp_path):
    steps = {"prefill": dict(zip(PARTS, (0.001, 0.08, 0.01, 0.009), strict=True)), "decode": dict.fromkeys(PARTS, 0.002)}
    figure = plots.step_profile(steps, "title")
    (axis,) = figure.axes
    rights = [max(bar.get_x() + bar.get_width() for container in axis.containers for bar in [container[i]]) for i in range(2)]
    assert rights == pytest.approx([100.0, 100.0])
    assert [container.get_label() for container in axis.containers] == list(PARTS)
    said = [text.get_text() for text in axis.texts]
    assert "80 %" in said
    assert {"100 ms", "8 ms"} <= set(said)
    plots.save(figure, tmp_path / "p.png")


def test_parts_that_are_small_everywhere_go_to_the_last():
    steps = {"one": {"tiny": 0.001, "large": 0.899, "rest": 0.1}, "two": {"tiny": 0.002, "large": 0.498, "rest": 0.5}}
    figure = plots.step_profile(steps, "title", least_share=0.01)
    large, rest = figure.axes[0].containers
    assert [bar.get_width() for bar in large] == pytest.approx([89.9, 49.8])
    assert [bar.get_width() for bar in rest] == pytest.approx([10.1, 50.2])


def test_ten_parts_look_different():
    figure = plots.step_profile({"one": {f"part {i}": 1.0 for i in range(10)}}, "title")
    looks = {(container[0].get_facecolor(), container[0].get_hatch()) for container in figure.axes[0].containers}
    assert len(looks) == 10


def test_scaling_is_drawn(tmp_path):
    def step(sequences, context, pool=None):
        return {"sequences": sequences, "context": context, "pool_blocks": pool, "step_s": 0.01, "limit_s": 0.004}

    found = {
        "batch": [step(1, 64), step(8, 64)],
        "context": [step(count, tokens) for count in (1, 8) for tokens in (64, 256)],
        "pool": [step(8, 64, blocks) for blocks in (256, 1024)],
        "memory": [{"what": "weights", "computed_bytes": 10**7, "tensor_bytes": 10**7, "rss_bytes": None}],
        "bookkeeping": [{"cached_blocks": n, "decode_us_per_token": 6.0, "lookup_us_per_prompt_token": 0.4} for n in (1_000, 10_000)],
        "start_up_s": {"warm": {"first_token_s": 2.0, "second_token_s": 2.1}, "empty": {"first_token_s": 20.0, "second_token_s": 31.0}},
    }
    figure = plots.scaling(found, "title")
    assert len(figure.axes) == 6
    batch = figure.axes[0].lines
    assert list(batch[0].get_ydata()) == [10.0, 10.0]
    assert list(batch[1].get_ydata()) == [4.0, 4.0]
    plots.save(figure, tmp_path / "s.png")


def test_whole_numbers():
    assert console.whole_numbers("3,1,3") == [1, 3]
    for wrong in ("", "a", "1,,2", "0", "-1", "1.5"):
        with pytest.raises(ValueError, match="number"):
            console.whole_numbers(wrong)


def test_a_rule_separates_what_fits_from_what_does_not():
    table = console.cliff_table([row(7), row(8), row(9)], 8)
    assert [each.end_section for each in table.rows] == [False, True, False]
