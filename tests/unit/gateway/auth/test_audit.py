"""The audit log: records, the file and its rotation, a full disk, a full queue, summaries."""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from iskander.errors import ConfigError, PermissionDenied
from iskander.gateway.auth import audit as audit_module
from iskander.gateway.auth.audit import HOSTS_MAX, OTHER, AuditLog
from iskander.gateway.auth.origin import Origin, certificate_names

ORIGIN = Origin("10.0.0.7:5000", ("URI:spiffe://example.org/operator",))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_actions_are_appended_with_their_outcome(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_text('{"before": 1}\n')
    path.chmod(0o640)
    audit = AuditLog(str(path), process=3)
    audit.start()
    with audit.action("load", "churn", "operator", ORIGIN):
        pass
    with (
        pytest.raises(PermissionDenied),
        audit.action("unload", "churn", "reader", Origin("unix:uid=7,pid=9")),
    ):
        raise PermissionDenied("no")
    with pytest.raises(ZeroDivisionError), audit.action("drain", "", "operator", ORIGIN):
        raise ZeroDivisionError
    audit.stop()
    kept, load, unload, drain = lines(path)
    assert kept == {"before": 1} and stat.S_IMODE(path.stat().st_mode) == 0o640
    assert load.pop("time").endswith("+00:00")
    assert load == {
        "action": "load", "target": "churn", "outcome": "ok", "actor": "operator",
        "peer": "10.0.0.7:5000", "certificate": ["URI:spiffe://example.org/operator"],
        "process": 3,
    }  # fmt: skip
    assert (unload["outcome"], unload["peer"]) == ("permission_denied", "unix:uid=7,pid=9")
    assert drain["outcome"] == "failed" and audit.counts == {"written": 3}


def test_new_file_is_private_and_no_link_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit = AuditLog(str(path))
    audit.start()
    audit.stop()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(tmp_path / "fifo")
    for name in ("link", "fifo", "missing/audit.jsonl", "."):
        with pytest.raises(ConfigError, match=r"access\.audit_file: cannot be opened"):
            AuditLog(str(tmp_path / name)).start()


@pytest.mark.parametrize("is_removed", [False, True])
def test_renamed_file_is_opened_again(tmp_path: Path, is_removed: bool) -> None:
    path, old = tmp_path / "audit.jsonl", tmp_path / "audit.jsonl.1"
    audit = AuditLog(str(path))
    audit.start()
    audit.record("first")
    while not path.read_text():
        pass
    if is_removed:
        path.unlink()
    else:
        path.rename(old)
    audit.record("second")
    audit.stop()
    assert [line["action"] for line in lines(path)] == ["second"]
    if not is_removed:
        assert [line["action"] for line in lines(old)] == ["first"]


def test_record_of_a_full_disk_is_logged_and_the_next_line_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first write is cut, the second fails; then there is space again."""
    path = tmp_path / "audit.jsonl"
    write, outcomes = os.write, [5, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))]

    def full(fd: int, raw: bytes) -> int:
        outcome = outcomes.pop(0) if outcomes else len(raw)
        if isinstance(outcome, OSError):
            raise outcome
        return write(fd, raw[:outcome])

    monkeypatch.setattr(audit_module.os, "write", full)
    audit = AuditLog(str(path))
    audit.start()
    with caplog.at_level(logging.INFO, "iskander.audit"):
        for name in ("cut", "failed", "third", "fourth"):
            audit.record(name)
        audit.stop()
    text = [record.getMessage() for record in caplog.records]
    assert "5 of" in text[0] and json.loads(text[1])["action"] == "cut"
    assert json.loads(text[2])["action"] == "failed" and len(text) == 3
    torn, *rest = path.read_text().splitlines()
    assert torn == '{"tim' and [json.loads(line)["action"] for line in rest] == ["third", "fourth"]
    assert audit.counts == {"written": 2, "logged": 2}


def test_full_queue_drops_records_and_does_not_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_module, "QUEUE_MAX", 8)
    audit = AuditLog(str(tmp_path / "audit.jsonl"))
    audit._thread = object()  # type: ignore[assignment]
    for _ in range(20):
        audit.record("load")
    assert audit._queue.qsize() == 8 and audit.counts["dropped"] == 12


def test_without_a_file_records_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    audit = AuditLog()
    audit.start()
    with caplog.at_level(logging.INFO, "iskander.audit"):
        audit.record("start", "127.0.0.1:5")
    audit.stop()
    assert json.loads(caplog.records[0].getMessage())["target"] == "127.0.0.1:5"
    assert audit.counts == {"logged": 1}


def test_failed_authentications_are_summarized_by_a_bounded_number_of_hosts(
    tmp_path: Path,
) -> None:
    path = tmp_path / "audit.jsonl"
    audit = AuditLog(str(path))
    audit.start()
    for number in range(1000):
        audit.on_unauthenticated(Origin(f"10.0.{number % 200}.1:{number}"))
    audit.on_unauthenticated(Origin("unix:uid=7,pid=123"))
    assert len(audit._refusals["authenticate"]) <= HOSTS_MAX + 1
    audit.stop()
    found = {line["peer"]: line["count"] for line in lines(path)}
    assert len(found) == HOSTS_MAX + 1 and found["10.0.3.1"] == 5
    assert found[OTHER] == 1001 - 5 * HOSTS_MAX


def test_host_of_a_peer() -> None:
    assert Origin("[::1]:5").host == "[::1]"
    assert Origin("unix:uid=7,pid=9").host == "unix:uid=7" and not Origin().host


def test_names_of_a_certificate() -> None:
    subject = ((("organizationName", "x"),), (("commonName", "Robot 8"),))
    assert certificate_names({"subject": subject}) == ("CN:Robot 8",)
    sans = (
        ("DNS", "A.Example"),
        ("IP Address", "1.2.3.4"),
        ("email", "Me@x"),
        ("URI", "spiffe://A/b"),
    )
    assert certificate_names({"subject": subject, "subjectAltName": sans}) == (
        "DNS:a.example",
        "email:Me@x",
        "URI:spiffe://A/b",
    )
    assert certificate_names({}) == ()


def test_denied_actions_do_not_displace_a_record(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit = AuditLog(str(path))
    audit.start()
    for number in range(10_000):
        with (
            pytest.raises(PermissionDenied),
            audit.action("load", f"m{number}", "reader", Origin(f"10.0.0.9:{number}")),
        ):
            raise PermissionDenied("no")
    with audit.action("drain", "", "operator", ORIGIN):
        pass
    audit.stop()
    first, drain, others = lines(path)
    assert (first["target"], first["actor"]) == ("m0", "reader") and drain["action"] == "drain"
    assert (others["count"], others["actor"], others["peer"]) == (9999, "reader", "10.0.0.9")
    assert audit.counts == {"written": 3}


def test_records_of_refused_callers_leave_room_in_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_module, "REFUSALS_MAX", 4)
    audit = AuditLog(str(tmp_path / "audit.jsonl"))
    audit._thread = object()  # type: ignore[assignment]
    for _ in range(6):
        audit.record("load", outcome=PermissionDenied.code)
    audit.record("drain")
    assert audit._queue.qsize() == 5 and audit.counts["dropped"] == 2


def test_record_of_a_failing_file_is_logged_at_every_level(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "folder").mkdir()
    audit = AuditLog(str(tmp_path / "folder" / "audit.jsonl"))
    audit.start()
    (tmp_path / "folder" / "audit.jsonl").unlink()
    (tmp_path / "folder").rmdir()
    with caplog.at_level(logging.WARNING, "iskander.audit"):
        audit.record("drain")
        audit.stop()
    assert [json.loads(caplog.messages[-1])["action"], audit.counts["logged"]] == ["drain", 1]


def test_record_after_a_torn_line_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_text('{"time": "2')
    audit = AuditLog(str(path))
    audit.start()
    audit.record("first")
    audit.stop()
    torn, line = path.read_text().splitlines()
    assert torn == '{"time": "2' and json.loads(line)["action"] == "first"
