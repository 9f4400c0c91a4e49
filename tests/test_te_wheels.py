"""Real Transformer Engine, as requirements/gpu.txt names it, loads beside torch, and Megatron-Core takes it.

Only its PyTorch extension is a stand-in (tests/te_wheels.py), because compiling that takes half an hour.
"""

import json
import os

import pytest
from packaging.version import Version

from tests import gpu_packages, te_wheels
from tests.kit.interpreters import ROOT, run_python

LISTED = {it.name: it.version for it in gpu_packages.entries()}
MISSING_SYMBOL = "undefined symbol: cublasLtGroupedMatrixLayoutInit_internal"
LOAD = """
    import json

    from megatron_rl import platform

    platform.prepare()
    from megatron.core import utils
    from megatron.core.extensions import transformer_engine as extension
    from megatron.core.optimizer import Adam

    said = {"HAVE_TE": extension.HAVE_TE, "why": platform._why_set_aside, "Adam": Adam.__module__}
    if extension.HAVE_TE:
        import transformer_engine as te
        from transformer_engine.common import MIN_CUDNN_VERSION
        from transformer_engine.pytorch.attention.dot_product_attention.utils import FlashAttentionUtils

        said["cudnn"], said["nccl"] = list(MIN_CUDNN_VERSION), list(te._NCCL_EP_MIN_VERSION)
        said["flash-attn"] = str(FlashAttentionUtils.max_version)
        said["version"], said["ep"] = str(utils.get_te_version()), te.is_nccl_ep_available()
    print(json.dumps(said))
"""


def load(version, **variables):
    """Return what a fresh process says that has this version on its path."""
    try:
        folder = te_wheels.unpacked(version)
    except te_wheels.NotHereError as error:
        pytest.skip(f"Transformer Engine {version} is not to be had: {error}")
    path = os.pathsep.join(map(str, (folder, te_wheels.FOLDER / "needed", ROOT)))
    done = run_python(LOAD, env=os.environ | {"PYTHONPATH": path} | variables)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.thorough
def test_the_listed_transformer_engine_loads_and_megatron_takes_it():
    said = load(LISTED["transformer-engine"])
    assert said["HAVE_TE"], said["why"]
    assert said["Adam"].startswith("transformer_engine.") and said["version"] == LISTED["transformer-engine"]
    assert said["ep"], "expert parallelism by NCCL finds its library, and NCCL is new enough"
    assert Version(LISTED["nvidia-cudnn-cu13"]).release >= tuple(said["cudnn"])
    assert Version(LISTED["nvidia-nccl-cu13"]).release >= tuple(said["nccl"])
    assert Version(LISTED["flash-attn"]) < Version(said["flash-attn"])


@pytest.mark.thorough
@pytest.mark.parametrize("version,variables", [("2.16.0", {}), (LISTED["transformer-engine"], {"LD_BIND_NOW": "1"})])
def test_one_whose_functions_must_all_be_there_at_once_does_not_load(version, variables):
    """The cuBLAS that torch brings lacks a function that both name."""
    said = load(version, **variables)
    assert not said["HAVE_TE"] and MISSING_SYMBOL in said["why"]
    assert not said["Adam"].startswith("transformer_engine.")


def test_the_stand_in_has_what_the_sources_declare(tmp_path):
    source = """
      pybind11::enum_<Kind>(m, "Kind", pybind11::module_local()) \\
          .value("kFirst", Kind::kFirst)                          \\
          .value("kSecond", Kind::kSecond);
      m.def("product", &product, "of matrices", py::arg("A"));
      m.def("get_cudnn_version", &cudnn_version);
      py::class_<Helper, std::shared_ptr<Helper>>(m, "Helper").def(py::init<int>());
    """
    (tmp_path / "names.py").write_text(te_wheels.names_of(source))
    done = run_python(
        """
        import names

        print(names.Kind.kSecond.value, names.get_cudnn_version.__code__.co_names)
        for call in (names.product, names.Helper):
            try:
                call(1)
            except NotImplementedError as error:
                print(error)
        """,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    first, *errors = done.stdout.splitlines()
    assert first == "1 ('ctypes', 'CDLL', 'cudnnGetVersion')"
    assert [error.partition(" ")[0] for error in errors] == ["product", "Helper"]
