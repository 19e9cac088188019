"""Software bill of materials of each wheel, in CycloneDX 1.6.

    python scripts/sbom.py            write scripts/sboms/*.cdx.json
    python scripts/sbom.py --check    fail if they are stale or do not match the schema

The build puts them in `.dist-info/sboms/` of the wheels, as PEP 770 specifies. They list the
dependencies in the versions of `uv.lock`, which the release was tested with; a user's environment
may have others. Those of extras have the scope `optional`. Equal inputs give equal bytes, so there
is no time and no random serial number.
"""

from __future__ import annotations

import json
import re
import sys
import uuid
from typing import Any, Final

from build_client import DEPENDENCIES
from licences import TABLE, read_rules
from locked import BASE, ROOT, Locked, project, runtime_packages

FOLDER: Final = ROOT / "scripts" / "sboms"
SPECIFICATION: Final = "1.6"
UNKNOWN: Final = "LicenseRef-unknown"
"""Of a package without an entry, which `licences.py --check` reports."""
EXTRAS: Final = "iskander:extras"
"""Property of a component: the extras that need it."""
_ID: Final = re.compile(r"[A-Za-z0-9.-]+")


def main() -> int:
    """Write or check the files; print problems."""
    problems = []
    for name, text in documents().items():
        path = FOLDER / name
        if "--check" not in sys.argv:
            FOLDER.mkdir(exist_ok=True)
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            problems.append(f"stale file: scripts/sboms/{name}; run `make docs`")
        problems += [f"{name}: {error}" for error in schema_errors(text)]
    sys.stderr.writelines(f"{problem}\n" for problem in problems)
    return min(len(problems), 1)


def documents() -> dict[str, str]:
    """The bill of each distribution, by its file name."""
    packages = {package.name: package for package in runtime_packages()}
    own = {name for name, package in packages.items() if BASE in package.extras}
    direct = [each for each in map(_name_of, project()["dependencies"]) if each in packages]
    client = _reachable(DEPENDENCIES, packages)
    return {
        "iskander.cdx.json": bill("iskander", packages, own, direct),
        "iskander-client.cdx.json": bill(
            "iskander-client",
            {name: packages[name] for name in sorted(client)},
            client,
            DEPENDENCIES,
        ),
    }


def bill(
    name: str, packages: dict[str, Locked], required: set[str], direct: tuple[str, ...] | list[str]
) -> str:
    """The bill of a distribution.

    Args:
        name: Its name.
        packages: Its dependencies, and those of its extras.
        required: The packages that are always installed.
        direct: The packages that its metadata names.
    """
    licences = read_rules(TABLE).packages
    root = _reference(name, version())
    components = [
        {
            "type": "library",
            "bom-ref": _reference(each.name, each.version),
            "name": each.name,
            "version": each.version,
            "scope": "required" if each.name in required else "optional",
            "licenses": [_licence(licences.get(each.name, UNKNOWN))],
            "purl": _reference(each.name, each.version),
            **_extras(each, required),
        }
        for each in packages.values()
    ]
    references = {each.name: _reference(each.name, each.version) for each in packages.values()}
    document = {
        "$schema": f"http://cyclonedx.org/schema/bom-{SPECIFICATION}.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": SPECIFICATION,
        "serialNumber": "",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application" if name == "iskander" else "library",
                "bom-ref": root,
                "name": name,
                "version": version(),
                "purl": root,
            }
        },
        "components": components,
        "dependencies": [
            {"ref": root, "dependsOn": sorted(references[each] for each in direct)},
            *(
                {
                    "ref": references[each.name],
                    "dependsOn": [references[one] for one in each.requires if one in references],
                }
                for each in packages.values()
            ),
        ],
    }
    content = json.dumps(document, sort_keys=True)
    document["serialNumber"] = f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, content)}"
    return json.dumps(document, indent=1) + "\n"


def schema_errors(text: str) -> list[str]:
    """Errors of a document against the schema of CycloneDX."""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    return [] if error is None else [str(error)]


def version() -> str:
    """The version of both distributions."""
    text = (ROOT / "iskander" / "__init__.py").read_text()
    return re.search(r'__version__ = "([^"]+)"', text)[1]  # type: ignore[index]


def _name_of(requirement: str) -> str:
    return _ID.match(requirement)[0].rstrip(".")  # type: ignore[index]


def _reachable(names: tuple[str, ...], packages: dict[str, Locked]) -> set[str]:
    """Packages that these need, and themselves."""
    waiting, found = list(names), set()
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += packages[name].requires
    return found


def _reference(name: str, number: str) -> str:
    """The package URL."""
    return f"pkg:pypi/{name}@{number}"


def _licence(expression: str) -> dict[str, Any]:
    """A licence as CycloneDX has it: by identifier, by name, or an expression."""
    if " " in expression:
        return {"expression": expression}
    kind = "name" if expression.startswith("LicenseRef-") else "id"
    return {"license": {kind: expression}}


def _extras(package: Locked, required: set[str]) -> dict[str, Any]:
    if package.name in required:
        return {}
    return {"properties": [{"name": EXTRAS, "value": ",".join(package.extras)}]}


if __name__ == "__main__":
    sys.exit(main())
