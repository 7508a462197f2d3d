"""The simulator makes the real engine's decisions, and its clock follows the roofline's formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest

import minikv
from minikv.engine.engine import Engine
from minikv.engine.runner import TorchRunner
from minikv.lab.simulate import RooflineRunner, Scenario
from minikv.lab.workload import Turn, Workload, run_sessions
from minikv.model.sampling import Sampling
from minikv.shape.hardware import HARDWARE, Hardware, hardware
from minikv.shape.model_shape import PRESETS
from minikv.shape.roofline import step_cost

SMALL = minikv.ModelShape(layers=1, hidden=16, heads=2, kv_heads=1, head_dim=8, vocab=64, ffn=16, max_context=1024)
MACHINE = Hardware("test", memory_bytes=1e9, bytes_per_s=1e9, flops_per_s=1e12)


def decisions(turns: list[Turn]) -> dict[tuple[int, int], tuple[int, int, int]]:
    return {(turn.session, turn.turn): (turn.prompt_tokens, turn.cached_tokens, turn.computed_tokens) for turn in turns}


@pytest.mark.parametrize("sessions", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("budget", [24, 64, 512])
@pytest.mark.parametrize("block_size", [4, 16])
def test_hits_are_those_of_the_real_engine_request_by_request(sessions, budget, block_size):
    workload = Workload(system_tokens=32, turns=6, turn_tokens=11, output_tokens=5)
    blocks = workload.blocks(3, block_size)
    model = minikv.load(shape=SMALL)
    real = Engine(runner=TorchRunner(model, blocks, block_size), max_batch_tokens=budget)
    simulated = Engine(runner=RooflineRunner(SMALL, MACHINE, blocks, block_size), max_batch_tokens=budget)
    assert decisions(run_sessions(real, workload, sessions)) == decisions(run_sessions(simulated, workload, sessions))
    for counter in ("hit_tokens", "computed_tokens", "evictions", "preemptions", "steps", "cached_blocks"):
        assert real.stats()[counter] == simulated.stats()[counter]


def test_one_request_alone_takes_what_the_formula_says():
    shape, gpu = PRESETS["qwen3-4b"], HARDWARE["l4"]
    engine = Engine(runner=RooflineRunner(shape, gpu, 2_000, 16, "fp8", "fp8"), max_batch_tokens=30_000)
    (out,) = engine.generate([[1] * 20_000], Sampling(max_new_tokens=3))
    # By hand: 20,000 tokens through every matrix, and each query with all keys up to its own; then the head for one row.
    matrices = 36 * (2560 * 128 * (32 + 8 + 8) + 32 * 128 * 2560 + 3 * 2560 * 9728)
    attention = 36 * 32 * 4 * 128 * (20_000 * 20_001 // 2)
    assert out.ttft_s == pytest.approx((2 * (20_000 * matrices + 2560 * 151_936) + attention) / 51e12)
    weights = shape.parameters  # fp8: a byte each, all read for one token (the head is the embedding)
    for number, context in enumerate((20_001, 20_002)):
        step = out.token_times_s[number + 1] - out.token_times_s[number]
        assert step == pytest.approx((weights + context * 73_728) / 300e9, rel=1e-6)


def test_twice_the_bandwidth_halves_a_step_that_memory_binds():
    shape, gpu = PRESETS["qwen3-4b"], HARDWARE["l4"]
    slow = RooflineRunner(shape, gpu, 10, 16).step_seconds([(1, 1_000)], 1)
    fast = RooflineRunner(shape, replace(gpu, bytes_per_s=2 * gpu.bytes_per_s), 10, 16).step_seconds([(1, 1_000)], 1)
    more_compute = RooflineRunner(shape, replace(gpu, flops_per_s=2 * gpu.flops_per_s), 10, 16).step_seconds([(1, 1_000)], 1)
    assert slow == pytest.approx(2 * fast)
    assert more_compute == slow


def test_weights_and_cache_have_their_own_dtypes():
    shape = PRESETS["qwen3-4b"]
    eight, sixteen = (step_cost(shape, [(1, 1_000)], 1, "fp8", dtype) for dtype in ("fp8", "bf16"))
    assert sixteen.kv_bytes == 2 * eight.kv_bytes == 1_000 * 147_456
    assert sixteen.weight_bytes == eight.weight_bytes


@pytest.mark.parametrize("sessions", [2, 3, 5])
def test_one_session_too_many_misses_as_the_rotation_argument_says(sessions):
    """K + 1 equal sessions, one at a time, over room for K: each finds only the shared prompt; with room for all, everything."""
    workload = Workload(system_tokens=64, turns=9, turn_tokens=12, output_tokens=4)
    shape = replace(SMALL, max_context=4096)

    def last_turns(room: int) -> list[Turn]:
        # A long think time: nobody overlaps, so the order is a strict rotation.
        engine = Engine(runner=RooflineRunner(shape, MACHINE, workload.blocks(room, 16), 16))
        turns = run_sessions(engine, replace(workload, think_time_s=10.0), sessions + 1)
        return [turn for turn in turns if turn.turn == workload.turns - 1]

    enough, short = last_turns(sessions + 1), last_turns(sessions)
    assert all(turn.cached_tokens == workload.cacheable_tokens(turn.turn, 16) for turn in enough)
    assert sum(turn.cached_tokens for turn in short) < sum(turn.cached_tokens for turn in enough)
    assert min(turn.cached_tokens for turn in short) == workload.system_tokens


def test_the_published_cliff_is_where_the_arithmetic_puts_it():
    scenario = Scenario(block_size=64).with_capacity(13)
    assert scenario.fits == 13
    rows = {sessions: scenario.run(sessions) for sessions in (6, 12, 13, 14)}
    for sessions in (6, 12, 13):
        assert rows[sessions].hit_rate == rows[sessions].best_hit_rate
    assert rows[14].hit_rate < rows[14].best_hit_rate
    assert rows[6].p99_ttft_s < 2  # published: 6 sessions are safe, under 2 s
    assert 1 / 2.5 <= rows[12].p99_ttft_s / 2.6 <= 2.5
    assert 1 / 2.5 <= rows[14].p99_ttft_s / 38.9 <= 2.5
    assert rows[14].p99_ttft_s > 5 * rows[13].p99_ttft_s


def test_the_kv_dtype_moves_the_cliff_as_the_arithmetic_says():
    scenario = Scenario()
    own = 12 * (1_000 + 75)
    for dtype, bytes_per_number in (("bf16", 2), ("fp8", 1), ("int4", 0.5625)):
        moved = replace(scenario, kv_dtype=dtype)
        blocks = int(scenario.kv_bytes // (16 * 2 * 36 * 8 * 128 * bytes_per_number))
        assert moved.fits == (blocks - 10_000 // 16) // -(-own // 16)
        below, above = (moved.run(sessions) for sessions in (moved.fits, moved.fits + 1))
        assert below.hit_rate == below.best_hit_rate
        assert above.hit_rate < above.best_hit_rate


@pytest.mark.parametrize("start", [0.1, 12_345.678, 1e6 / 3, 1e9 / 7])
def test_decisions_do_not_hang_on_what_the_clock_showed_at_the_start(start):
    """Whoever ends in the same step comes back in the same order, however the sums of times are rounded."""
    workload = Workload(system_tokens=32, turns=12, turn_tokens=11, output_tokens=5)

    def run(clock: float) -> dict[tuple[int, int], tuple[int, int, int]]:
        runner = RooflineRunner(SMALL, MACHINE, workload.blocks(5, 4), 4)
        runner.wait_until(clock)
        return decisions(run_sessions(Engine(runner=runner, max_batch_tokens=64), workload, 8))

    assert run(start) == run(0.0)


def test_every_turn_of_a_simulation_is_told():
    told: list[Turn] = []
    scenario = Scenario(workload=Workload(10_000, 2, 1_000, 5), block_size=500).with_capacity(3)
    row = scenario.run(3, told.append)
    assert sorted((turn.session, turn.turn) for turn in told) == [(session, turn) for session in range(3) for turn in range(2)]
    assert row.p99_ttft_s == max(turn.ttft_s for turn in told if turn.turn)
    assert row == scenario.run(3)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"kv_bytes": 10**9}, "less than one session"),
        ({"block_size": 0}, "block size"),
        ({"max_batch_tokens": 0}, "tokens a step"),
        ({"workload": Workload(system_tokens=41_000)}, "context"),
    ],
)
def test_a_scenario_that_cannot_be_is_refused(wrong, said):
    with pytest.raises(minikv.RequestError, match=said):
        Scenario(**wrong)


def test_unknown_hardware_lists_the_known():
    with pytest.raises(ValueError, match=r"l4, a100-80, h100, h200, b200"):
        hardware("tpu")
    with pytest.raises(ValueError, match="bytes_per_s"):
        Hardware("x", 1.0, 0.0, 1.0)
