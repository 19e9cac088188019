"""Limits of a grant: rates, outstanding rows, batch size, division, and the bound of metrics."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iskander.config.auth import AccessConfig, GrantLimits
from iskander.errors import ClientOverShare, ConfigError, LimitExceeded, RateLimited
from iskander.foundation.clock import NS_PER_S
from iskander.gateway.auth.grants import ANONYMOUS, Authenticator
from iskander.gateway.auth.quota import NAMES_MAX, NO_LIMITS, OTHER, Quota, Quotas, TokenBucket
from iskander.gateway.auth.tokens import digest, read_tokens

MS = NS_PER_S // 1000


def quota_of(processes: int = 1, **limits: float) -> Quota:
    quota = Quota("scoring", processes)
    quota.configure(GrantLimits(**limits))
    return quota


def admitted(quota: Quota, times_ns: list[int], rows: int = 1) -> int:
    count = 0
    for at_ns in times_ns:
        try:
            quota.take_rate(rows, at_ns)
        except RateLimited:
            continue
        count += 1
    return count


@given(
    st.floats(0.1, 1000),
    st.integers(0, 50),
    st.lists(st.integers(0, 50 * MS), min_size=1, max_size=200),
)
def test_no_more_than_rate_and_burst_is_admitted(rate: float, burst: int, gaps: list[int]) -> None:
    quota, at_ns, times = quota_of(requests_per_s=rate, burst_requests=burst), 5, []
    for gap in gaps:
        at_ns += gap
        times.append(at_ns)
    count = admitted(quota, times)
    most = max(burst or rate, 1) + rate * (times[-1] - times[0]) / NS_PER_S
    assert 1 <= count <= most + 1e-6 and count == quota.counts["requests"]


def test_request_after_the_named_time_is_admitted() -> None:
    quota = quota_of(requests_per_s=10, burst_requests=2)
    assert admitted(quota, [0, 0, 0, 0]) == 2
    with pytest.raises(
        RateLimited, match=r"more than 10 requests/s by the token of `scoring`"
    ) as e:
        quota.take_rate(1, 20 * MS)
    assert e.value.retryable and e.value.fault == "client" and e.value.retry_after_ms == 80
    assert e.value.http_status == 429
    quota.take_rate(1, 20 * MS + e.value.retry_after_ms * MS)
    assert quota.counts["refused.rate_limited"] == 3


def test_batch_above_the_burst_of_rows_leaves_a_debt() -> None:
    quota = quota_of(rows_per_s=1000)
    quota.take_rate(5000, 0)
    with pytest.raises(RateLimited, match=r"1000 rows/s") as caught:
        quota.take_rate(1, 0)
    assert caught.value.retry_after_ms == 4001
    quota.take_rate(1, 4001 * MS)


def test_one_rate_is_not_taken_if_the_other_refuses() -> None:
    quota = quota_of(requests_per_s=1, burst_requests=1, rows_per_s=10)
    quota.take_rate(10, 0)
    for _ in range(5):
        with pytest.raises(RateLimited):
            quota.take_rate(10, 500 * MS)
    quota.take_rate(10, NS_PER_S)


def test_outstanding_rows_are_limited_but_for_the_first_batch() -> None:
    quota = quota_of(processes=4, outstanding_rows=400)
    quota.require_capacity(300)
    quota.outstanding_rows = 300
    with pytest.raises(ClientOverShare, match="limit 100 in each of 4 processes") as caught:
        quota.require_capacity(1)
    assert caught.value.retryable and caught.value.fault == "client"
    quota.outstanding_rows = 60
    quota.require_capacity(40)
    with pytest.raises(LimitExceeded, match=r"401 rows, limit 400"):
        quota.require_size(401, 0)


def test_size_of_a_batch_is_limited() -> None:
    quota = quota_of(batch_rows=10, batch_bytes=100)
    quota.require_size(10, 100)
    with pytest.raises(LimitExceeded, match=r"11 rows, limit 10 .*`limits.batch_rows`") as caught:
        quota.require_size(11, 100)
    assert not caught.value.retryable and caught.value.fields["wanted"] == 10
    with pytest.raises(LimitExceeded, match=r"101 bytes of inputs, limit 100"):
        quota.require_size(10, 101)


def test_each_process_enforces_its_part_of_the_rate() -> None:
    whole = admitted(quota_of(requests_per_s=100), [n * MS for n in range(10_000)])
    part = admitted(quota_of(processes=4, requests_per_s=100), [n * MS for n in range(10_000)])
    assert whole == pytest.approx(4 * part, abs=4) and part == pytest.approx(275, abs=1)


def test_changed_limits_keep_usage_and_do_not_refill() -> None:
    quotas = Quotas()
    quotas.configure({"a": GrantLimits(requests_per_s=1, burst_requests=5)})
    quota = quotas.by_name["a"]
    quota.outstanding_rows = 7
    assert admitted(quota, [0] * 9) == 5
    quotas.configure({"a": GrantLimits(requests_per_s=1, burst_requests=50)})
    assert quotas.by_name["a"] is quota and quota.outstanding_rows == 7
    assert admitted(quota, [0] * 9) == 0
    quotas.configure({})
    assert not quotas.by_name


def test_bucket_without_a_rate_is_no_limit() -> None:
    bucket = TokenBucket()
    assert not bucket.wait_ns(1e12, 5)
    bucket.configure(1, 1)
    bucket.take(1)
    bucket.configure(0, 1)
    assert not bucket.wait_ns(1e12, 5)


def test_metrics_have_a_bounded_number_of_names() -> None:
    quotas = Quotas()
    quotas.configure({f"t{n}": GrantLimits(batch_rows=1) for n in range(1000)})
    for quota in quotas:
        quota.outstanding_rows = 2
        quota.counts["rows"] = 3
    usage = quotas.usage()
    assert len(usage) == NAMES_MAX and usage[-1].grant == OTHER
    assert sum(each.outstanding_rows for each in usage) == 2000
    assert sum(each.counts["rows"] for each in usage) == 3000


def table(name: str, token: str, limits: str = "") -> str:
    return f"[[tokens]]\nname = '{name}'\nsha256 = '{digest(token)}'\n{limits}\n"


def test_tables_of_one_name_share_their_limits(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    limits = "limits = {requests_per_s = 5}"
    path.write_text(
        table("a", "1", limits) + table("a", "2", limits) + table("b", "3")
        + "[anonymous]\nbatch_rows = 9\n"
    )  # fmt: skip
    access = Authenticator(AccessConfig(tokens=str(path), anonymous=("*",)), lambda: None)
    assert access.quotas.by_name.keys() == {"a", ANONYMOUS}
    assert access.quotas.by_name[ANONYMOUS].limits == GrantLimits(batch_rows=9)
    path.write_text(table("a", "1", limits) + table("a", "2"))
    with pytest.raises(ConfigError, match="the tables of `a` have different limits"):
        read_tokens(path)


@pytest.mark.parametrize(
    "limits", ["{rows = 1}", "{batch_rows = -1}", "{requests_per_s = 'x'}", "{batch_rows = 1.5}"]
)
def test_invalid_limits_are_rejected(tmp_path: Path, limits: str) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text(table("a", "1", f"limits = {limits}"))
    with pytest.raises(ConfigError, match="limits"):
        read_tokens(path)


def test_file_without_limits_has_no_quotas(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text(table("a", "1"))
    assert read_tokens(path).tokens[0].limits == NO_LIMITS
    assert not Authenticator(AccessConfig(tokens=str(path)), lambda: None).quotas.by_name
