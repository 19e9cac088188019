"""Screenshots of the page at the admin port, for docs/observing.md.

Starts a gateway with two models, scores with a changing load, kills a worker, and takes pictures
with Chromium. Needs `chromium` of the system and the extra `browser`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from playwright.sync_api import sync_playwright

from iskander.client import Client

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "configs" / "models"
IMAGES = ROOT / "docs" / "images"
ADDRESS, ADMIN = "127.0.0.1:50061", "127.0.0.1:50062"
CONFIG = f"""
[server]
address = "{ADDRESS}"
[admin]
address = "{ADMIN}"
log_level = "warning"
[workers]
count = 2
[[models]]
name = "movielens-two-tower"
path = "{MODELS / "movielens-two-tower" / "1"}"
[[models]]
name = "wide-tabular"
path = "{MODELS / "wide-tabular" / "1"}"
"""
BYTES_MAX = 150_000
LOAD_S = 150.0
SETTLE_S = 10.0
"""Time between the replacement of the worker and the pictures."""
WIDE = {"width": 1280, "height": 1000}
PICTURES: dict[str, dict[str, Any]] = {
    "page-light": {"viewport": WIDE},
    "page-dark": {"viewport": WIDE, "color_scheme": "dark"},
    "page-phone": {"viewport": {"width": 360, "height": 740}, "device_scale_factor": 2},
}


def main() -> None:
    """Write the pictures."""
    with tempfile.TemporaryDirectory(prefix="iskander-") as folder:
        config = Path(folder) / "iskander.toml"
        config.write_text(CONFIG)
        command = [str(Path(sys.executable).parent / "iskander-gateway"), "--config", str(config)]
        environment = dict(os.environ, ISKANDER_SERVER__RUNTIME_DIRECTORY=folder)
        gateway = subprocess.Popen(command, env=environment)
        is_over = threading.Event()
        threads = [
            threading.Thread(target=load, args=(model, batch, is_over))
            for model, batch in (("movielens-two-tower", ratings()), ("wide-tabular", features()))
        ]
        try:
            with Client(ADDRESS) as client:
                wait_until_ready(client)
                for thread in threads:
                    thread.start()
                time.sleep(LOAD_S)
                os.kill(client.stats()["workers"][1]["pid"], signal.SIGKILL)
            time.sleep(SETTLE_S)
            take_pictures()
        finally:
            is_over.set()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            gateway.terminate()
            gateway.wait()


def ratings() -> pa.RecordBatch:
    """Return a batch of users and films."""
    sample = pq.read_table(MODELS / "movielens-two-tower" / "sample.parquet")
    return sample.select(["user_id", "item_id"]).combine_chunks().to_batches()[0].slice(0, 128)


def features() -> pa.RecordBatch:
    """Return a batch of wide rows."""
    values = pa.array(np.random.default_rng(0).random(256 * 64, np.float32))
    column = pa.FixedSizeListArray.from_arrays(values, 64)
    return pa.RecordBatch.from_arrays([column], ["features"])


def wait_until_ready(client: Client) -> None:
    """Wait for the workers."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if client.health()["ready"]:
                return
        except Exception:  # The gateway does not listen yet.
            pass
        time.sleep(0.1)
    sys.exit("the gateway did not become ready")


def load(model: str, batch: pa.RecordBatch, is_over: threading.Event) -> None:
    """Score with pauses of 2 to 22 ms, in waves of a minute."""
    with Client(ADDRESS) as client:
        while not is_over.is_set():
            client.score(model, batch)
            time.sleep(0.012 + 0.01 * np.sin(time.monotonic() / 10))


def take_pictures() -> None:
    """Open the page in each way, and write its picture."""
    IMAGES.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        # Root cannot use Chromium's sandbox.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        path = shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        for name, options in PICTURES.items():
            page = browser.new_context(**options).new_page()
            page.goto(f"http://{ADMIN}/")
            # Two updates.
            page.wait_for_timeout(2500)
            file = IMAGES / f"{name}.png"
            page.screenshot(path=file)
            size = file.stat().st_size
            print(f"{file.relative_to(ROOT)}: {size:,} bytes")
            if size > BYTES_MAX:
                sys.exit(f"limit {BYTES_MAX:,} bytes")
        browser.close()


if __name__ == "__main__":
    main()
