"""An installed Transformer Engine that does not load counts as absent, and its error is reported."""

import importlib
import sys

import pytest

from megatron_rl import platform

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
    monkeypatch.setattr(platform, "_transformer_engine_fault", "")
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
