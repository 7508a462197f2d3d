"""The KV calculator says what the engine's own arithmetic says, at every corner of its controls."""

from __future__ import annotations

import itertools

import matplotlib.pyplot
import pytest

from minikv.classroom.explorers.kv_calculator import CONTROLS, draw
from minikv.shape.hardware import HARDWARE
from minikv.shape.model_shape import PRESETS
from minikv.shape.roofline import step_cost
from minikv.show.widgets import Choice, Picture, Slider, png

START = {name: control.start for name, control in CONTROLS.items()}


def corners():
    values = [
        (control.values[0], control.values[-1]) if isinstance(control, Slider) else control.options
        for control in CONTROLS.values()
        if isinstance(control, (Slider, Choice))
    ]
    return [dict(zip(CONTROLS, corner, strict=True)) for corner in itertools.product(*values)]


def test_the_picture_at_the_start_has_the_numbers_of_the_engine():
    shape, gpu = PRESETS["llama-3.1-8b"], HARDWARE["a100-80"]
    picture = draw(**START)
    assert f"{2 * shape.parameters / 1e9:.1f} GB of weights" in picture.summary
    assert f"{16 * 8192 * 131_072 / 1e9:.1f} GB of K and V (bf16, 131,072 bytes a token)" in picture.summary
    fit = int((80e9 - 2 * shape.parameters) // (8192 * 131_072))
    assert f"and so would {fit} requests of 8,192 tokens" in picture.summary
    cost = step_cost(shape, [(1, 8192)] * 16, 16, "bf16")
    seconds = cost.bytes / gpu.bytes_per_s
    assert f"at least {1000 * seconds:.1f} ms, memory-bound: {16 / seconds:,.0f} tokens/s" in picture.summary
    assert "this GPU needs 153" in picture.summary


def test_what_does_not_fit_is_said_in_gb_and_in_requests():
    summary = draw(**START | {"requests": 128}).summary
    over = 2 * PRESETS["llama-3.1-8b"].parameters + 128 * 8192 * 131_072 - 80e9
    assert f"{over / 1e9:.1f} GB more than its 80" in summary
    assert "would take at least" in summary
    assert "the weights alone are more than its 24 GB" in draw(**START | {"model": "qwen2.5-72b", "gpu": "l4"}).summary


def test_a_short_context_and_many_requests_are_bound_by_compute():
    assert "compute-bound: " in draw("llama-3.1-8b", 512, 512, "bf16", "a100-80").summary
    assert "memory-bound: " in draw("llama-3.1-8b", 131_072, 512, "bf16", "a100-80").summary


def test_a_smaller_dtype_weighs_less():
    assert "73,728 bytes a token" in draw(**START | {"model": "qwen3-4b", "dtype": "fp8"}).summary
    assert "41,472 bytes a token" in draw(**START | {"model": "qwen3-4b", "dtype": "int4"}).summary


def test_every_corner_of_the_controls_gives_a_picture_and_leaves_none_open():
    for values in corners():
        picture = draw(**values)
        assert isinstance(picture, Picture)
        assert picture.summary.count(values["model"]) == 1
        assert "nan" not in picture.summary
    assert png(draw(**START).figure).startswith(b"\x89PNG")
    assert not matplotlib.pyplot.get_fignums()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model": "gpt-9"}, "unknown model 'gpt-9'"),
        ({"gpu": "abacus"}, "unknown hardware 'abacus'"),
        ({"dtype": "fp5"}, "unknown KV dtype 'fp5'"),
        ({"requests": 0}, "at least one request of one token, not 0 of 8192"),
        ({"model": "deepseek-v3"}, "the weights of deepseek-v3 are not counted"),
    ],
)
def test_what_cannot_be_is_refused_by_name(wrong, message):
    with pytest.raises(ValueError, match=message):
        draw(**START | wrong)
