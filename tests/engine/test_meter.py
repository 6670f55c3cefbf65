"""Decode batches as they are seen from outside an engine, and the telemetry that is made of them."""

from __future__ import annotations

import pytest

from actors.sglang.meter import Decoded, DecodeMeter
from pearl.live.rollout import turn_telemetry


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_batch_and_contexts_are_means_over_a_request_s_decoding() -> None:
    clock = Clock()
    meter = DecodeMeter(clock)
    meter.joined("a", 100, 50, None)
    clock.now = 1.0
    meter.joined("b", 300, 50, None)
    clock.now = 3.0
    meter.grew("a", 50)
    clock.now = 4.0
    decoded = meter.left("a")
    assert decoded.batch == pytest.approx((1 * 1 + 3 * 2) / 4)
    assert decoded.kv_tokens == pytest.approx((1 * 100 + 2 * 400 + 1 * 450) / 4)
    clock.now = 6.0
    assert meter.left("b").batch == pytest.approx((3 * 2 + 2 * 1) / 5)


def test_prompts_of_one_iteration_hold_decoding_up_once_and_share_its_time() -> None:
    clock = Clock()
    meter = DecodeMeter(clock)
    meter.joined("a", 10, 10, (10.0, 11.0))
    meter.joined("b", 30, 30, (12.0, 13.5))
    meter.joined("c", 100, 60, (12.0, 13.5))
    meter.joined("d", 10, 10, (13.0, 14.0))
    clock.now = 5.0
    a, b, c, d = (meter.left(name) for name in "abcd")
    assert a.stall_s == pytest.approx(2.0)
    assert (a.prefill_s, b.prefill_s, c.prefill_s, d.prefill_s) == pytest.approx((1.0, 0.5, 1.0, 1.0))
    assert (a.prefill_share, b.prefill_share, c.prefill_share) == pytest.approx((1.0, 1 / 3, 2 / 3))


def test_a_request_that_never_decoded_has_no_means() -> None:
    meter = DecodeMeter(Clock())
    assert meter.left("never") == Decoded()
    meter.joined("at once", 5, 5, None)
    assert meter.left("at once") == Decoded()


REPLY = {
    "token_ids": list(range(33)),
    "first_token_s": 1.0,
    "first_tokens": 1,
    "seconds": 5.0,
    "cached_tokens": 40,
    "queue_s": 0.1,
    "prefill_s": 0.8,
    "prefill_share": 1.0,
    "decode_batch": 2.0,
    "decode_kv_tokens": 300.0,
    "stall_s": 0.5,
}


def test_decoding_is_timed_over_the_tokens_that_were_seen_to_come() -> None:
    telemetry = turn_telemetry(100, REPLY)
    assert telemetry is not None
    assert (telemetry.decode_s, telemetry.stall_s, telemetry.prompt_tokens) == (4.0, 0.5, 100)
    streamed = turn_telemetry(100, {**REPLY, "first_tokens": 17})
    assert streamed is not None
    assert (streamed.decode_s, streamed.stall_s) == (8.0, 1.0)


def test_what_was_not_seen_is_not_told() -> None:
    at_once = turn_telemetry(100, {**REPLY, "first_tokens": 33})
    assert at_once is not None
    assert at_once.decode_s < 0
    assert turn_telemetry(100, {**REPLY, "token_ids": [], "first_token_s": None, "first_tokens": 0}) is None
