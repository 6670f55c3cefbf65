"""Whole elastic runs in virtual time: whatever comes and goes, the run ends and nothing is lost."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from pearl.core.settings import Borrowing, ElasticSettings, OnCancel, Roles
from tests.core.test_pipeline import surviving_ends
from tests.core.virtual_elastic import play_elastic

POLICIES = st.builds(
    ElasticSettings,
    inter_scale=st.booleans(),
    intra_scale=st.sampled_from(list(Borrowing)),
    roles=st.sampled_from(list(Roles)),
    fixed_ratio=st.sampled_from([(1, 1), (2, 1), (1, 3)]),
    on_cancel=st.sampled_from(list(OnCancel)),
    join_window_s=st.sampled_from([0.0, 5.0]),
    preparation_prior_s=st.just(6.0),
    return_deadline_s=st.sampled_from([0.5, 5.0, 50.0]),
    borrow_prior_s=st.just(0.1),
    return_prior_s=st.just(0.1),
)
RUNS = st.fixed_dictionaries(
    {
        "elastic": POLICIES,
        "seed": st.integers(0, 2**32),
        "fault_rate": st.sampled_from([0.0, 0.02, 0.1]),
        "spot": st.integers(0, 4),
        "overlap": st.integers(0, 3),
        "reserved": st.integers(1, 3),
        "checkpoints": st.booleans(),
        "abort_on_update": st.booleans(),
        "in_drawn_order": st.booleans(),
    }
)


@hypothesis_settings(max_examples=150, deadline=None)
@given(RUNS)
def test_every_elastic_run_ends_and_no_sample_is_lost(run: dict) -> None:
    virtual = play_elastic(**run)
    assert not virtual.end.failed, virtual.end.reason  # type: ignore[attr-defined]
    assert virtual.pipeline.samples_unfinished == 0, "a sample is lost"
    ended = Counter(e.sample for e in surviving_ends(virtual.log))
    assert all(count == 1 for count in ended.values()), "a sample ended twice in one lineage"
    assert sum(ended.values()) == virtual.pipeline.samples_drawn
