"""Names in the pages exist: headings, files, settings, metrics, commands, extras, tests."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import msgspec
from support.commands import options, parsers
from support.loops import for_each

from iskander.cli.startup.systemd_units import STOP_SLACK_S
from iskander.config.reference import settings
from iskander.config.schema import Config
from iskander.gateway.protocols.terms import ClientTerms

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "protocols").glob("*.md")),
    *sorted((ROOT / "benchmarks").rglob("README.md")),
    *sorted((ROOT / "configs").rglob("README.md")),
]
ROOTS = (
    ROOT,
    ROOT / "iskander",
    ROOT / "workers",
    ROOT / "workers/iskander_worker",
    ROOT / "configs",
)
"""Folders to which paths in the pages are relative, beside that of the page."""
EXAMPLES = ("adder/", "far/")
"""Folders of models that the pages create."""

PARAMETERS = {f"iskander_{name}" for name in ClientTerms.__struct_fields__}
"""Names of request parameters, which are no metrics."""
METRIC = re.compile(r"(grep )?(?<![\w:./-])(iskander_[a-z_]+)(?<!_worker)(\*?)(?=[`{\s])")

each_page = for_each(PAGES)


@each_page
def test_links_to_headings(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]*#[^)\s]+)\)", page.read_text("utf-8")):
        name, _, heading = target.partition("#")
        if "://" not in target:
            assert heading in headings(page.parent / name if name else page), target


def headings(page: Path) -> set[str]:
    """Fragments of the headings of a page, as GitHub derives them."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@each_page
def test_files(page: Path) -> None:
    pattern = r"`([\w./-]+/[\w./-]+\.(?:cfg|conf|md|py|service|sh|toml|ya?ml))`"
    for name in re.findall(pattern, page.read_text("utf-8")):
        if not name.startswith(("/", *EXAMPLES)):
            folders = (page.parent, *ROOTS)
            assert any((folder / name).exists() for folder in folders), name


@each_page
def test_names_of_code(page: Path) -> None:
    """In "`file.py`, `Name`", and "`Name` of `file.py`", the file contains the name."""
    text = " ".join(page.read_text("utf-8").split())
    named = re.findall(r"`([\w./-]+/[\w-]+\.py)`, `([\w.]+)`", text)
    named += [pair[::-1] for pair in re.findall(r"`([\w.]+)` (?:of|in) `([\w./-]+\.py)`", text)]
    for file, name in named:
        paths = [folder / file for folder in (page.parent, *ROOTS) if (folder / file).exists()]
        assert paths, file
        source = paths[0].read_text("utf-8")
        missing = [part for part in name.split(".") if not re.search(rf"\b{part}\b", source)]
        assert Path(name).suffix == ".py" or not missing, (file, name)


@each_page
def test_settings(page: Path) -> None:
    known = {setting.path for setting in settings()}
    sections = {path.partition(".")[0] for path in known}
    for name in re.findall(r"`([a-z_]+\.[a-z_.]+?)(?: = [^`]*)?`", page.read_text("utf-8")):
        if name.partition(".")[0] in sections and Path(name).suffix not in (".toml", ".py"):
            assert {name, name.rpartition(".")[0]} & known, name


@each_page
def test_configurations(page: Path) -> None:
    """The tables of settings in each block, beside those of manifests and tokens."""
    sections = {field.encode_name for field in msgspec.structs.fields(Config)}
    for block in re.findall(r"^```toml\n(.*?)^```", page.read_text("utf-8"), re.S | re.M):
        tables = tomllib.loads(block)
        msgspec.convert({name: tables[name] for name in sections & tables.keys()}, Config)


@each_page
def test_metrics(page: Path) -> None:
    reference = (ROOT / "docs" / "reference" / "metrics.md").read_text("utf-8")
    known = set(re.findall(r"^- `(\w+)`[ :]", reference, re.MULTILINE)) | PARAMETERS
    for before, name, is_prefix in METRIC.findall(page.read_text("utf-8")):
        if is_prefix or before:
            assert any(each.startswith(name) for each in known), name
        else:
            assert name in known, name


@each_page
def test_commands_and_options(page: Path) -> None:
    known = parsers()
    for line in re.findall(r"(?:^|`|[$#] )(iskander [a-z][^`\n|]*)", page.read_text("utf-8"), re.M):
        own = re.sub(r"\$\(.*?\)", "", line.partition(" #")[0])
        words = tuple(own.split()[1:])
        command = max((words[:count] for count in range(3) if words[:count] in known), key=len)
        assert command, line
        given = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert given <= options(known[command]), line


@each_page
def test_targets_of_make(page: Path) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"`make ([\w-]+)", page.read_text("utf-8"))) <= set(targets)


@each_page
def test_extras(page: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    known = project["optional-dependencies"].keys()
    text = page.read_text("utf-8")
    named = re.findall(r"extras? +`([a-z]+)`", " ".join(text.split()))
    for several in re.findall(r"iskander\[([a-z,]+)\]", text):
        named += several.split(",")
    assert set(named) <= known


def test_every_script_is_used_or_documented() -> None:
    """By the Makefile, a page, a package or a test, or by another script that imports it."""
    python = (
        path for name in ("iskander", "tests", "scripts") for path in (ROOT / name).rglob("*.py")
    )
    files = [*PAGES, *python, ROOT / "Makefile", ROOT / "pyproject.toml"]
    texts = {path: path.read_text("utf-8") for path in files}
    for script in sorted((ROOT / "scripts").glob("*.*")):
        used = re.compile(rf"\b{re.escape(script.name)}\b|^(?:from|import) {script.stem}\b", re.M)
        others = [text for path, text in texts.items() if path != script and script.stem in text]
        assert any(used.search(text) for text in others), script.name


def test_tests_of_the_security_page() -> None:
    tests = "\n".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", (ROOT / "docs" / "security.md").read_text("utf-8"))
    assert named and [name for name in named if f"def {name}(" not in tests] == []


@each_page
def test_values_of_settings(page: Path) -> None:
    """A number in brackets behind the name of a setting is its default."""
    defaults = {setting.path: setting.default for setting in settings()}
    pattern = r"`([a-z_]+\.[a-z_]+)` \((\d[\d,.]*) ?(|s|ms|us|%|batches)\)"
    for name, value, _ in re.findall(pattern, page.read_text("utf-8")):
        assert float(value.replace(",", "")) == defaults[name], name


def test_stop_timeout_of_the_unit() -> None:
    unit = (ROOT / "configs" / "systemd" / "iskander-gateway.service").read_text("utf-8")
    (stop_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    server = Config().server
    assert int(stop_s) >= server.lame_duck_s + 2 * server.drain_s + STOP_SLACK_S
