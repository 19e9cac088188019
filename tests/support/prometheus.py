"""A real Prometheus on loopback with the rules of `configs/prometheus`, 60 times as fast."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from support.models import ROOT
from support.processes import eventually

RULES = ROOT / "configs" / "prometheus"
RULE_FILES = ("objectives.yml", "recording.yml", "alerts.yml")
SCALE = {"m": "s", "h": "m"}
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")


def rules() -> list[dict[str, Any]]:
    """All recording and alert rules."""
    files = [yaml.safe_load((RULES / name).read_text()) for name in RULE_FILES]
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    """The alert rules."""
    return [rule for rule in rules() if "alert" in rule]


def scaled(text: str) -> str:
    """Rules with a sixtieth of each window and each `for`."""
    return re.sub(
        r"(\[|for: )(\d+)([mh])\b", lambda found: f"{found[1]}{found[2]}{SCALE[found[3]]}", text
    )


def free_port() -> int:
    """A port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


class Prometheus:
    """A Prometheus that scrapes its targets once a second, and evaluates the scaled rules."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._targets: dict[str, str] = {}
        self._write_targets()
        for name in RULE_FILES:
            (folder / name).write_text(scaled((RULES / name).read_text()))
        config = yaml.safe_load((RULES / "prometheus.yml").read_text())
        config["global"] = {
            "scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s",
        }  # fmt: skip
        job = config["scrape_configs"][0]
        del job["static_configs"]
        job["file_sd_configs"] = [{"files": ["targets.json"], "refresh_interval": "1s"}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._url = f"http://127.0.0.1:{free_port()}"
        with (folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    str(PROMETHEUS),
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address={self._url.removeprefix('http://')}",
                    "--log.level=warn",
                ],
                stdout=log,
                stderr=log,
                cwd=folder,
            )

    def wait_ready(self) -> None:
        """Wait until it answers queries."""
        eventually(self._is_ready, 60, "Prometheus")

    def scrape(self, name: str, address: str) -> None:
        """Scrape an address with the label `instance`, and wait for the first scrape."""
        self._targets[name] = address
        self._write_targets()
        eventually(lambda: self.query(f'up{{instance="{name}"}}'), 60, f"a scrape of {name}")

    def forget(self, name: str) -> None:
        """Scrape it no more."""
        self._targets.pop(name, None)
        self._write_targets()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The current samples of an expression."""
        path = f"/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        samples: list[dict[str, Any]] = self._get(path)["result"]
        return samples

    def firing(self, name: str) -> set[str]:
        """Names of the firing alerts of an instance."""
        return {
            alert["labels"]["alertname"]
            for alert in self._get("/api/v1/alerts")["alerts"]
            if alert["state"] == "firing" and alert["labels"]["instance"] == name
        }

    def stop(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait(30)

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self._url}{path}", timeout=10) as response:
            return json.load(response)["data"]

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, (self._folder / "prometheus.log").read_text()
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=10):
                return True
        except OSError:
            return False

    def _write_targets(self) -> None:
        """Replace the list of targets atomically."""
        listed = [
            {"targets": [address], "labels": {"instance": name}}
            for name, address in self._targets.items()
        ]
        (self._folder / ".targets.json").write_text(json.dumps(listed))
        (self._folder / ".targets.json").replace(self._folder / "targets.json")
