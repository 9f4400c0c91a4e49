"""requirements/gpu.txt has GPU packages that go together, and all that installs packages agrees with it."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import gpu_packages
from tests.kit.interpreters import ROOT

RECORDS = json.loads(gpu_packages.RECORDS.read_text(encoding="utf-8"))
ENTRIES = {it.name: it for it in gpu_packages.entries()}
INSTALLED = [name for name, it in ENTRIES.items() if not it.is_left_out]
SGLANG = Path(sys.prefix) / "share" / "sglang-cpu"
WRITE = "python tests/gpu_packages.py --write"


def unmet(demands, versions):
    """Return the demands, by package, that these versions do not meet."""
    wanted = [(who, Requirement(text)) for who, texts in demands.items() for text in texts]
    return [f"{who}: {it}" for who, it in wanted if not it.specifier.contains(versions[it.name], prereleases=True)]


def test_every_version_is_what_the_other_packages_demand():
    assert not unmet(RECORDS["demands"], gpu_packages.versions())


@pytest.mark.parametrize(
    "name,version,who",
    [
        ("torch", "2.13.0", "sglang==0.5.23: torch==2.14.1"),
        ("nvidia-cublas", "13.10.0.20", "cuda-toolkit==13.0.3.0: nvidia-cublas==13.1.1.3.*"),
        ("nvidia-cudnn-cu13", "9.27.0.42", "torch==2.14.1: nvidia-cudnn-cu13==9.24.0.43"),
        ("nvidia-nccl-cu13", "2.32.3", "torch==2.14.1: nvidia-nccl-cu13==2.30.7"),
        ("transformer-engine-cu13", "2.19.0", "transformer-engine-torch==2.20.2: transformer-engine-cu13==2.20.2"),
        ("transformer-engine-torch", "2.19.0", "transformer-engine==2.20.2: transformer-engine-torch==2.20.2"),
        ("sgl-deep-ep", "0.1.2", "sglang==0.5.23: sgl-deep-ep==0.1.2.post1"),
        ("flash-attn-4", "4.0.0b17", "sglang==0.5.23: flash-attn-4>=4.0.0b18"),
        ("transformers", "5.23.0", "sglang==0.5.23: transformers==5.19.0"),
    ],
)
def test_another_version_of_one_package_is_found_by_who_demands_it(name, version, who):
    assert who in unmet(RECORDS["demands"], gpu_packages.versions() | {name: version})


def test_pip_chose_these_versions():
    chosen, versions = RECORDS["chosen"], gpu_packages.versions()
    assert {name: versions[name] for name in chosen} == chosen, WRITE
    assert set(INSTALLED) <= set(chosen)


def installed_demands():
    """Return the demands by package of those that are installed here in the version of the list or of the record."""
    versions = dict(who.split("==") for who in RECORDS["demands"]) | {it.name: it.version for it in ENTRIES.values()}
    found = {}
    for package in metadata.distributions(path=[*sys.path, str(SGLANG)]):
        name = canonicalize_name(package.metadata["Name"])
        if versions.get(name) == package.version:
            found[f"{name}=={package.version}"] = gpu_packages.demands(
                package.requires or [], gpu_packages.extras_of(name)
            )
    return {who: texts for who, texts in found.items() if texts}


@pytest.mark.skipif(sys.version_info[:2] != (3, 12), reason="the list is for Python 3.12, whose torch is another one")
def test_packages_that_are_installed_here_demand_what_is_recorded():
    found = installed_demands()
    assert {"torch==2.14.1", "cuda-toolkit==13.0.3.0", "megatron-core==0.19.2"} <= set(found)
    assert {who: RECORDS["demands"].get(who) for who in found} == found, WRITE


@pytest.mark.thorough
@pytest.mark.skipif(sys.version_info[:2] != (3, 12), reason="the list is for Python 3.12")
def test_packages_of_the_index_demand_what_is_recorded():
    packages = [f"{name}=={ENTRIES[name].version}" for name in INSTALLED]
    options = ["--dry-run", "--ignore-installed", "--no-deps", "--no-build-isolation", "-qq", "--report", "-"]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", *options, *packages]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"pip cannot ask the package index: {done.stderr.strip().splitlines()[-1]}")
    found = gpu_packages.record(json.loads(done.stdout))["demands"]
    # Without its extra, which a record of all packages has.
    found["transformer-engine==2.20.2"] = RECORDS["demands"]["transformer-engine==2.20.2"]
    assert {who: RECORDS["demands"].get(who) for who in found} == found, WRITE
    assert {"sglang==0.5.23", "transformer-engine-torch==2.20.2"} <= set(found)


def test_setup_and_constraints_allow_the_listed_versions():
    versions, constraints = gpu_packages.versions(), gpu_packages.constraints()
    listed = {name for name, it in ENTRIES.items() if not it.requirement.url}
    pinned = constraints.keys() & listed
    assert {name: versions[name] for name in pinned} == {name: constraints[name] for name in pinned}
    assert pinned == {"torch", "transformer-engine"}
    declared = [it for wanted in gpu_packages.setup_requirements().values() for it in wanted if it.name in versions]
    assert {"torch", "megatron-core", "transformer-engine", "sglang"} <= {it.name for it in declared}
    assert [str(it) for it in declared if not it.specifier.contains(versions[it.name])] == []
    (server,) = re.findall(r"^sglang==(\S+);.*>=", (ROOT / "requirements" / "sglang-cpu.txt").read_text(), re.MULTILINE)
    assert server == versions["sglang"]


def test_the_image_and_the_page_install_from_the_list_and_name_no_version_of_their_own():
    image, page = (ROOT / "docker" / "Dockerfile").read_text(), gpu_packages.PAGE.read_text(encoding="utf-8")
    for text in (image, "\n".join(re.findall(r"```bash\n(.*?)```", page, re.DOTALL))):
        assert "-c constraints.txt -r requirements/gpu.txt" in text
        assert not re.search(r"\b(torch|transformer[_-]engine|sglang|flash-attn|apex)\S*[=<>]=", text)
    assert gpu_packages.TABLE.search(page)[0] == gpu_packages.table(), WRITE


def test_the_list_says_why_and_the_table_names_what_is_left_out():
    assert all(it.why for it in ENTRIES.values())
    rows = {line.split("`")[1]: line for line in gpu_packages.table().splitlines()[2:]}
    assert "not installed" in rows["apex"] and "not installed" not in rows["torch"]
    assert ENTRIES["transformer-engine"].version in rows["transformer-engine"]


SETUP = """
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

extension = CppExtension("extension", ["csrc/right.cpp", "csrc/wrong.cpp"])
setup(name="extension", ext_modules=[extension], cmdclass={"build_ext": BuildExtension})
"""


@pytest.mark.skipif(shutil.which("ninja") is None, reason="ninja, with which torch compiles extensions, is not on PATH")
def test_each_source_of_an_extension_is_compiled_with_the_headers_that_torch_brought(tmp_path):
    source = tmp_path / f"transformer_engine_torch-{ENTRIES['transformer-engine-torch'].version}"
    (source / "csrc").mkdir(parents=True)
    (source / "setup.py").write_text(SETUP)
    headers = [f"#if !__has_include(<{name}.h>)\n#error {name}\n#endif\n" for name in ("cublasLt", "cudnn", "nccl")]
    (source / "csrc" / "right.cpp").write_text("".join(headers))
    (source / "csrc" / "wrong.cpp").write_text('#include "absent.h"\n')
    command = [sys.executable, ROOT / "scripts" / "compile_te_extension.py", tmp_path]
    environment = os.environ | {"CUDA_HOME": str(tmp_path)}
    done, again = (subprocess.run(command, env=environment, capture_output=True, text=True) for _ in range(2))
    assert done.returncode == again.returncode == 1, done.stderr
    lines = {line.split(": ")[0].split()[-1]: line for line in done.stdout.splitlines()}
    assert lines["csrc/right.cpp"].endswith(": ok")
    assert "absent.h" in lines["csrc/wrong.cpp"]
    assert "1 of 2 files compile" in done.stdout and "csrc/right.cpp: compiled before" in again.stdout
