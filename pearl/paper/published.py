"""What the source prints (arXiv 2609.35158v1). Gains are in per cent, times in seconds; workers have two GPUs."""

from __future__ import annotations

SMALL, LARGE = "qwen3-8b", "qwen3-30b-a3b"
MODELS = (SMALL, LARGE)

# Fitted (world.yaml): section 3.1, 3.2 and 2.1.
PREFILL_TOKEN_SHARE, PREFILL_TIME_SHARE = 0.9668, 0.2648
UNLIMITED_ROLLOUT_S, TRAINING_S = 216.3, 163.8
ROLLOUT_SHARE = 0.818
"""Of a step's time, with four times as many rollout GPUs as training GPUs."""

# Section 3.1: rollout time by GPUs, against 16, and rollout over training at 16.
SCALING_CUT = {24: 10.3, 32: 10.3 + 8.9}
ROLLOUT_OVER_TRAINING = 5.7

# Section 3.3: best pairs against colocated workers, Qwen3-30B-A3B on 16 GPUs, by batch.
PAIRS_GAIN = {32: 9.7, 80: 1.4, 96: -6.1}
BEST_PREFILL = {48: 4, 64: 5}
PAIRS_BATCHES = (32, 48, 64, 80, 96)

# Figure 5 and section 6.2.
OVER_RLBOOST = {SMALL: (5.9, 26.9, 10.6), LARGE: (7.4, 36.3, 19.0)}
OVER_ROLL = {SMALL: (2.17, 2.37), LARGE: (2.43, 2.79)}
MEAN_ROLLOUT_GPUS = (13.6, 9.0, 11.8)
LARGE_POOLS = (14, 10, 12)

# Figure 7: against ROLL on as many GPUs; pairs, with borrowing, with the gate.
ABLATION_GPUS = (4, 8, 12, 16)
ABLATION_AT_4 = {SMALL: (-20.6, 93.6, 92.3), LARGE: (-30.9, 118.3, 129.5)}
ABLATION_FROM_8 = {
    SMALL: ((12.8, 15.3), (16.2, 26.5), (17.9, 26.5)),
    LARGE: ((7.8, 8.9), (9.4, 26.2), (9.2, 27.5)),
}
"""(least, most) over 8, 12 and 16 GPUs."""

# Figure 8: Qwen3-8B on 8 GPUs, against RLBoost+.
BATCH_GAIN, BATCHES = (5.3, 63.7), (32, 48, 64, 80, 96, 112, 128)
PEAK_BATCH = {"rlboost+": 64, "pearl": 96}
LENGTH_GAIN, LENGTHS = (9.8, 26.5), (8192, 16_384, 24_576, 32_768)

# Table 2, Qwen3-8B: GPUs, with the overlap zone's 8 workers -> selected, measured best.
RATIOS = {
    (10, False): ("2P3D", "2P3D"), (10, True): ("4P9D", "5P8D"),
    (12, False): ("3P3D", "3P3D"), (12, True): ("4P10D", "4P10D"),
    (16, False): ("3P5D", "3P5D"), (16, True): ("4P12D", "4P12D"),
}  # fmt: skip
RATIO_MISS = 0.4
"""By how much the one other choice is slower than the best, in per cent."""

# Table 3: preparation and finalisation of an expansion, activation and deactivation of a borrowing.
RECONFIGURATION_S = {SMALL: (56.29, 11.05, 6.26, 3.18), LARGE: (67.06, 17.89, 6.09, 4.38)}
PREFILL_AGAIN = 1.0
"""Less than so many per cent of a trajectory's generation goes into prefilling an interrupted request again."""
