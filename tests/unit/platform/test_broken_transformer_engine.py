"""An installed Transformer Engine that does not load counts as absent, and its error is reported.

With model.transformer_impl=local it is not even tried.
"""

import importlib
import sys

import pytest

from megatron_rl import platform
from tests.kit.interpreters import ROOT, run_python

UNDEFINED_SYMBOL = "libtransformer_engine.so: undefined symbol: cublasLtGroupedMatrixLayoutInit_internal"


@pytest.fixture(params=[f"OSError({UNDEFINED_SYMBOL!r})", "RuntimeError('versions differ\\nsecond line')"])
def broken(request, tmp_path, monkeypatch):
    """A package whose `pytorch` raises after `common` has loaded. Returns the error's type."""
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("from transformer_engine import common, pytorch\n")
    (package / "common.py").write_text("")
    (package / "pytorch.py").write_text(f"raise {request.param}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(platform, "_why_set_aside", "")
    monkeypatch.setattr(platform, "has_cuda", lambda: True)
    yield request.param.partition("(")[0]
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        del sys.modules[name]


def test_broken_transformer_engine_is_set_aside_with_a_warning(broken, caplog):
    platform.set_aside_broken_transformer_engine()
    platform.set_aside_broken_transformer_engine()
    (record,) = caplog.records
    assert broken in record.getMessage() and "second line" not in record.getMessage()
    assert "docs/gpu.md" in record.getMessage()
    with pytest.raises(ImportError):
        importlib.import_module("transformer_engine.common")
    assert platform.uses_transformer_engine("auto") is False


def test_the_error_of_a_broken_transformer_engine_is_told_where_it_is_asked_for(broken):
    platform.set_aside_broken_transformer_engine()
    told = rf"the installed transformer_engine does not load \({broken}: .*; see docs/gpu.md\); "
    with pytest.raises(ValueError, match=rf"^model.transformer_impl = 'transformer_engine': {told}install .*=local"):
        platform.uses_transformer_engine("transformer_engine")
    with pytest.raises(ValueError, match=rf"^model.flash_attention = 'TE': {told}install .*=torch"):
        platform.use_flash_attention("TE")


ENDS_THE_PROCESS = 47
IMPORT_A_RUN = """
    import sys

    sys.path.insert(0, sys.argv[1])
    from megatron_rl import train
    from megatron_rl.config import load_config

    train.parts_of(load_config(sys.argv[2], sys.argv[3:]))
    assert "megatron.core.extensions.transformer_engine" in sys.modules
    print([name for name, it in sys.modules.items() if it and name.partition(".")[0] == "transformer_engine"])
"""


@pytest.fixture
def fatal(tmp_path):
    """The folder of a package that ends the process that imports it, as a C library may."""
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text(f"import os\nos._exit({ENDS_THE_PROCESS})\n")
    return tmp_path


def import_a_run(folder, *settings):
    return run_python(IMPORT_A_RUN, folder, ROOT / "configs" / "count_sft.yaml", *settings)


def test_local_layers_import_nothing_of_transformer_engine(fatal):
    done = import_a_run(fatal, "model.transformer_impl=local")
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_a_run_that_may_use_transformer_engine_imports_it(fatal):
    assert (
        import_a_run(fatal, "model.transformer_impl=local", "model.flash_attention=TE").returncode == ENDS_THE_PROCESS
    )


def test_who_asks_for_it_where_local_layers_left_it_out_is_told_so(fatal, monkeypatch):
    monkeypatch.syspath_prepend(fatal)
    monkeypatch.setattr(platform, "_why_set_aside", "")
    monkeypatch.setattr(platform, "has_cuda", lambda: True)
    platform.leave_out_transformer_engine()
    try:
        with pytest.raises(
            ValueError, match="= 'TE': the installed transformer_engine was left out, because this .*=local;"
        ):
            platform.use_flash_attention("TE")
    finally:
        del sys.modules["transformer_engine"]
