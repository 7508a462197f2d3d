"""The figures that the course's sources claim, computed again: what is right, and what is not.

Sources: the talk (K. Shams, QCon AI Boston 2026), the blog (S. Shubham, "How prompt caching works", 2025) and the explainer
(A. Chawla, "KV Caching in LLMs, clearly explained").
"""

from __future__ import annotations

import pytest

from minikv.shape.hardware import HARDWARE, Hardware
from minikv.shape.model_shape import PRESETS
from minikv.shape.roofline import step_cost
from minikv.shape.size import fitting_requests, kv_bytes, with_unit

KB, MB, GB = 10**3, 10**6, 10**9
KIB, MIB, GIB = 2**10, 2**20, 2**30
QWEN, LLAMA_7B, QWEN_72B = PRESETS["qwen3-4b"], PRESETS["llama-2-7b"], PRESETS["qwen2.5-72b"]


def near(value: float, claimed: float, share: float) -> bool:
    return abs(value / claimed - 1) <= share


# ---------------------------------------------------------------- the talk


def test_72_kb_a_token_is_right_only_in_fp8_or_with_the_factor_two_forgotten():
    assert QWEN.kv_bytes_per_token("bf16") == 147_456 == 144 * KIB
    assert QWEN.kv_bytes_per_token("fp8") == 73_728 == 72 * KIB == QWEN.kv_bytes_per_token("bf16") // 2


def test_128_is_the_head_dim_and_not_the_embedding():
    assert (QWEN.head_dim, QWEN.hidden) == (128, 2_560)


def test_20_000_tokens_are_less_than_the_1_6_gb_that_22_800_are_near():
    assert near(kv_bytes(QWEN, 20_000, kv_dtype="fp8") / GB, 1.47, 0.01)
    assert near(kv_bytes(QWEN, 22_800, kv_dtype="fp8") / GB, 1.68, 0.01)


def test_13_conversations_fit_only_with_a_shared_prefix():
    left = 24 * GB - 4_400 * MB
    alone = kv_bytes(QWEN, 22_800, 13, kv_dtype="fp8")
    sharing = kv_bytes(QWEN, 22_800, 13, shared_tokens=10_000, kv_dtype="fp8")
    assert near(alone / GB, 21.9, 0.01)
    assert alone > left
    assert sharing == 176_400 * 73_728
    assert near(sharing / GB, 13.0, 0.01)
    assert sharing < left


def test_the_capacity_of_an_l4_is_9_to_10_sessions_alone_and_about_16_sharing():
    left = int(0.9 * 24 * GB - 4.4 * GB - 1 * GB)
    assert 9 <= fitting_requests(QWEN, left, 22_800, kv_dtype="fp8") <= 10
    assert fitting_requests(QWEN, left, 22_800, 10_000, "fp8") in (16, 17)


def test_the_published_jump_is_about_15_times():
    assert near(38.9 / 2.6, 14.96, 0.001)


def test_32_gb_hold_28_whole_sessions_and_16_gb_14():
    assert near(kv_bytes(QWEN, 22_800, 28, 10_000, "fp8") / GB, 27.2, 0.01)
    assert near(kv_bytes(QWEN, 22_800, 14, 10_000, "fp8") / GB, 13.9, 0.01)


def test_two_gpus_with_affinity_reach_91_percent_of_what_58_percent_implies():
    ideal = 128 / 0.58
    assert near(ideal, 220.7, 0.001)
    assert near(201 / ideal, 0.91, 0.01)


def test_44_percent_of_the_talks_own_conversation_is_shared():
    assert near(10_000 / 22_800, 0.44, 0.01)


# ---------------------------------------------------------------- the blog


def test_half_a_mebibyte_a_token_is_the_7b_models_with_mha_and_a_gqa_models_is_a_quarter():
    assert LLAMA_7B.attention == "MHA"
    assert kv_bytes(LLAMA_7B, 1) == 512 * KIB
    assert kv_bytes(LLAMA_7B, 1_024) == 512 * MIB
    assert kv_bytes(LLAMA_7B, 1_024, 100) == 50 * GIB
    assert near(kv_bytes(LLAMA_7B, 1_024, 100) / GB, 53.7, 0.001)
    assert PRESETS["llama-3.1-8b"].kv_bytes_per_token() == 128 * KIB


def test_50_gb_beside_the_weights_on_an_a100_is_67_gb():
    weights = 2 * LLAMA_7B.parameters
    assert near(weights / GB, 13.5, 0.01)
    assert near((weights + kv_bytes(LLAMA_7B, 1_024, 100)) / GB, 67, 0.01)


def test_a_500_token_prompt_is_250_mib_and_a_hundred_are_24_4_gib():
    assert kv_bytes(LLAMA_7B, 500) == 250 * MIB
    assert near(kv_bytes(LLAMA_7B, 500, 100) / GIB, 24.4, 0.001)


def test_reserving_1_024_for_100_wastes_90_percent():
    assert 128 / 4 == 32
    assert 1_024 - 100 == 924
    assert near(924 / 1_024, 0.902, 0.001)


def test_fifty_tokens_without_a_cache_recompute_1_225():
    assert sum(step - 1 for step in range(1, 51)) == 1_225
    recomputed = [50 - item for item in range(1, 50)]  # item i in the steps after its own
    assert sum(recomputed) == 1_225
    assert recomputed[0] == 49  # only the first item 49 times
    assert recomputed.count(49) == 1


def test_the_gain_of_a_cache_saturates_at_the_output_length():
    def gain(prompt: int, output: int) -> float:
        without = sum(prompt + step for step in range(output))
        return without / (prompt + output - 1)

    assert gain(50_000, 500) == pytest.approx(500 * (50_000 + 499 / 2) / (50_000 + 499))
    assert gain(10, 500) < gain(1_000, 500) < gain(50_000, 500) < gain(10**7, 500) < 500
    assert near(gain(10**7, 500), 500, 0.001)


# ---------------------------------------------------------------- the explainer


def test_qwen_72b_at_32k_is_10_gib_with_gqa_and_would_be_80_with_mha():
    assert QWEN_72B.kv_bytes_per_token() == 320 * KIB
    assert kv_bytes(QWEN_72B, 32_768) == 10 * GIB
    assert kv_bytes(QWEN_72B, 32_768) * QWEN_72B.group == 80 * GIB


def test_the_cache_exceeds_the_weights_at_14_requests_of_32k_and_108_of_4k():
    weights = 2 * QWEN_72B.parameters
    assert near(weights / GB, 145, 0.01)
    assert int(weights / kv_bytes(QWEN_72B, 32_768)) + 1 == 14
    assert near(weights / kv_bytes(QWEN_72B, 4_096), 108, 0.01)


# ---------------------------------------------------------------- elsewhere


def test_the_l4_takes_in_the_talks_conversation_in_about_six_seconds():
    def seconds(new: int, context: int) -> float:
        return step_cost(QWEN, [(new, context)], 1, "fp8").seconds(HARDWARE["l4"].bytes_per_s, HARDWARE["l4"].flops_per_s)

    assert near(seconds(22_800, 22_800), 6.3, 0.2)  # a full prefill
    assert near(seconds(12_800, 22_800), 4.2, 0.2)  # behind the shared prefix
    assert near(seconds(1_000, 22_800), 0.4, 0.25)  # a last turn on a hit


@pytest.mark.parametrize(("name", "ratio"), [("l4", 403), ("a100-80", 153), ("h100", 295), ("h200", 206), ("b200", 281)])
def test_operations_for_each_byte(name, ratio):
    assert round(HARDWARE[name].flops_per_byte) == ratio


def test_38_days_of_writing_wear_out_a_drive():
    assert near(14e15 / 4.3e9 / 86_400, 38, 0.01)


def test_a_terabyte_of_dram_holds_about_three_million_tokens_of_320_kb():
    assert near(1e12 / (320 * KB), 3e6, 0.05)


def test_units_are_named_and_never_mixed():
    assert with_unit(147_456) == "147,456 B = 147.46 KB = 144.00 KiB"
    assert with_unit(50 * GIB) == "53,687,091,200 B = 53.69 GB = 50.00 GiB"
    assert with_unit(999) == "999 B"


def test_sizes_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="all 10 tokens are shared"):
        fitting_requests(QWEN, GB, 10, 10)
    with pytest.raises(ValueError, match="fp5"):
        kv_bytes(QWEN, 1, kv_dtype="fp5")
    assert fitting_requests(QWEN, -5, 10) == 0
    with pytest.raises(ValueError, match="memory_bytes"):
        Hardware("x", 0, 1, 1)
