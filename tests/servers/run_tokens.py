"""The token that the servers of these tests ask for, and how a request says it."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path

from megatron_rl.launch.run_token import token_in

_FOLDER = tempfile.mkdtemp()
atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)
TOKEN_FILE = str(Path(_FOLDER) / "token")
TOKEN = token_in(TOKEN_FILE)
AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}
