"""Dependencies: bounds, licences, and the software bill of materials of each wheel."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import licences  # noqa: E402
import locked  # noqa: E402
import sbom  # noqa: E402

UNBOUNDED = {
    "adbc-driver-manager", "argon2-cffi", "cryptography", "pyarrow", "pyzmq",
}  # fmt: skip
"""Packages from 1.0 on whose major version is no promise: a date, or one for each release."""
REQUIREMENT = re.compile(r"([A-Za-z0-9.-]+?)(?:\[[a-z,-]+\])?((?:[<>=!]=?[0-9.]+,?)+)")


def requirements() -> dict[str, str]:
    """Version specifiers of the project and its runtime extras, by package."""
    project = locked.project()
    extras = (project["optional-dependencies"][name] for name in locked.runtime_extras())
    found = {}
    for requirement in [*project["dependencies"], *(each for extra in extras for each in extra)]:
        match = REQUIREMENT.fullmatch(requirement.partition(";")[0])
        assert match is not None, f"`{requirement}` has no bound"
        found[match[1]] = match[2]
    return found


@pytest.mark.parametrize(("name", "bounds"), requirements().items())
def test_each_dependency_is_bounded(name: str, bounds: str) -> None:
    """From below always; from above where a new major version may break callers."""
    least = re.search(r"[>=]=([0-9]+)", bounds)
    assert least is not None, "no lower bound"
    has_upper = "<" in bounds or "==" in bounds
    assert has_upper or least[1] == "0" or name in UNBOUNDED, bounds


def rules(**packages: str) -> licences.Rules:
    return licences.Rules(frozenset({"MIT", "Zlib"}), {"LicenseRef-X": ["torch"]}, packages)


def package(name: str = "a", *extras: str) -> locked.Locked:
    return locked.Locked(name, "1", extras or ("",), ())


def test_each_locked_package_has_an_allowed_licence() -> None:
    table = licences.read_rules(licences.TABLE)
    assert licences.audit(table, locked.runtime_packages()) == []
    assert licences.differences(table) == []


@pytest.mark.parametrize(
    ("expression", "extra", "is_allowed"),
    [
        ("MIT", "", True),
        ("GPL-3.0-only", "", False),
        ("GPL-3.0-only OR MIT", "", True),
        ("GPL-3.0-only AND MIT", "", False),
        ("MIT AND Zlib", "", True),
        ("LicenseRef-X", "torch", True),
        ("LicenseRef-X", "", False),
    ],
)
def test_licences_are_allowed_by_expression(expression: str, extra: str, is_allowed: bool) -> None:
    problems = licences.audit(rules(a=expression), [package("a", extra)])
    assert problems == ([] if is_allowed else [f"a: the licence {expression} is not allowed"])


def test_package_without_an_entry_and_entry_without_a_package_are_problems() -> None:
    missing, old = licences.audit(rules(b="MIT"), [package("no-such-package")])
    assert "no-such-package: no licence" in missing and old.startswith("b: ")


def test_entry_that_contradicts_the_metadata_is_a_problem() -> None:
    (problem,) = licences.differences(rules(pytest="Zlib"))
    assert problem == "pytest: scripts/licences.toml has Zlib, its metadata MIT"


def test_generated_files_are_fresh() -> None:
    table, packages = licences.read_rules(licences.TABLE), locked.runtime_packages()
    assert licences.PAGE.read_text() == licences.render(table, packages)
    for name, text in sbom.documents().items():
        assert (sbom.FOLDER / name).read_text() == text, f"{name}: run `make docs`"


def test_bill_of_materials_lists_what_is_locked() -> None:
    document: dict[str, Any] = json.loads(sbom.documents()["iskander.cdx.json"])
    listed = {each["name"]: each for each in document["components"]}
    packages = {each.name: each for each in locked.runtime_packages()}
    assert listed.keys() == packages.keys()
    for name, component in listed.items():
        assert component["version"] == packages[name].version
        is_required = locked.BASE in packages[name].extras
        assert component["scope"] == ("required" if is_required else "optional")
    references = {each["bom-ref"] for each in document["components"]}
    assert all(set(each["dependsOn"]) <= references for each in document["dependencies"])


@pytest.mark.skipif(
    importlib.util.find_spec("cyclonedx") is None, reason="the extra `lint` is not installed"
)
@pytest.mark.parametrize("name", ["iskander.cdx.json", "iskander-client.cdx.json"])
def test_bill_of_materials_matches_its_schema(name: str) -> None:
    text = sbom.documents()[name]
    assert sbom.schema_errors(text) == []
    assert sbom.schema_errors(text.replace('"library"', '"book"')) != []
