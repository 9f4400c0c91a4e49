"""What upstream says about its own future is no user's business."""

import logging
import warnings

import pytest

from megatron_rl import platform


@pytest.mark.parametrize("module", ["models.gpt.gpt_model", "dist_checkpointing.strategies.torch"])
def test_a_deprecation_of_upstreams_is_not_shown_and_its_warnings_are(module, caplog):
    platform.prepare()
    logger = logging.getLogger(f"megatron.core.{module}")
    logger.warning("MCore's async save is deprecated and will be removed in the future releases.")
    logger.warning("GPTModel IS DEPRECATED")
    logger.warning("a shard is missing")
    assert [record.getMessage() for record in caplog.records] == ["a shard is missing"]


def test_warnings_of_upstreams_imports_are_not_shown():
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        platform.prepare()
        warnings.warn(
            "MimoModelConfig is experimental and still under active development. The API may change.", stacklevel=1
        )
        warnings.warn_explicit(r"invalid escape sequence '\-'", SyntaxWarning, "kv_block_allocator.py", 426)
    assert not shown
