"""Rules for the Dockerfile: base images, account, and the files of its build."""

from __future__ import annotations

import re
import tomllib

from support.container import FOLDER, values
from support.models import ROOT


def test_base_images_are_pinned_and_the_container_is_not_root() -> None:
    bases = values("FROM")
    assert any(re.match(r"python:\$\{PYTHON\}-slim-bookworm AS runtime$", each) for each in bases)
    (version,) = values("ARG", "")
    assert re.fullmatch(r"PYTHON=3\.\d+\.\d+", version)
    assert values("USER") == ["10001:10001"]
    assert bases[-1] == "runtime AS cpu", "the last stage is the default target"
    assert values("ENTRYPOINT") == ['["tini", "--", "iskander-gateway"]']


def test_image_with_cuda_has_its_libraries_nvml_and_the_capabilities_of_both() -> None:
    (installed,) = (each for each in values("RUN", "build-cuda") if "pip" in each)
    assert "--constraint scripts/constraints.txt" in installed and "[gpu]" in installed
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split("[>=]", each)[0] for each in extra["optional-dependencies"]["gpu"]}
    assert names == {"nvidia-ml-py", "onnxruntime-gpu[cuda,cudnn]"}
    (variables,) = values("ENV", "cuda")
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in variables


def test_copied_files_exist_and_are_in_the_build_context() -> None:
    """Every source is a file of the repository that the ignore file does not exclude."""
    kept = {
        line.removeprefix("!")
        for line in (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied = [each for each in values("COPY") if not each.startswith("--from=")]
    sources = [source for each in copied for source in each.split()[:-1]]
    assert {"iskander", "workers", "pyproject.toml"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(source == each or source.startswith(f"{each}/") for each in kept), source


def test_build_context_has_every_input_of_the_wheel() -> None:
    """The packages, the shared data and the hook of pyproject.toml are copied before the build."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    inputs = [*wheel["packages"], *wheel["shared-data"], wheel["hooks"]["custom"]["path"]]
    inputs += [project["project"]["readme"], "scripts/constraints.txt"]
    sources = [source for each in values("COPY", "build") for source in each.split()[:-1]]
    for path in inputs:
        assert any(path == each or path.startswith(f"{each}/") for each in sources), path
    (extras,) = values("ARG", "build")
    known = project["project"]["optional-dependencies"].keys()
    assert set(extras.partition("=")[2].split(",")) <= known
