"""The token that the servers of these tests ask for, and how a request says it."""

from __future__ import annotations

import atexit
import secrets
import shutil
import tempfile
from pathlib import Path

_FOLDER = tempfile.mkdtemp()
atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)
TOKEN_FILE = str(Path(_FOLDER) / "token")
TOKEN = f"-{secrets.token_hex(16)}"
"""Begins with a dash, as a user's own may: on a command line it is a value and no option."""
Path(TOKEN_FILE).touch(mode=0o600)
Path(TOKEN_FILE).write_text(TOKEN, encoding="utf-8")
AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}
