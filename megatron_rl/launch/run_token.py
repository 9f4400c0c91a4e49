"""The run's token, which authorizes changes to its servers, in a file that only its owner may read.

Processes get only the file's path. The token never appears in a command line, environment variable, config or log.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import secrets
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_rl.config import RolloutConfig, TrainConfig

MAX_BYTES = 4096
FORM = re.compile(r"[!-~]{16,}")


def token_in(path: str | Path, *, key: str = "rollout.token_file") -> str:
    """Return the token in a file. If the file does not exist, create it with a new token.

    Processes that create it at the same time get the same token. Raises ValueError if another user owns or can read the
    file, or if it has no valid token. key: config key that the error message names.
    """
    path = Path(path)
    try:
        if not path.exists():
            _make(path)
        # Do not follow a link: in a folder that others can write to, it could lead to any file of the owner.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW)) as file:
            found, content = os.fstat(file.fileno()), file.read(MAX_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{key} = {str(path)!r}: cannot be read or made ({error}); name a file in a folder of your own."
        ) from error
    if found.st_uid != os.geteuid():
        raise ValueError(
            f"{key} = {str(path)!r}: belongs to user {found.st_uid}, who knows the token, and not to user "
            f"{os.geteuid()}; name another file, which is created if it does not exist."
        )
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        raise ValueError(
            f"{key} = {str(path)!r}: has mode {mode:o}, so other users can read the token; it must be 600: chmod 600 "
            f"{path}, or remove it if others may have read it, and a new one is created."
        )
    token = content.strip()
    # Printable without spaces, because the token goes into an HTTP header.
    if not FORM.fullmatch(token):
        raise ValueError(
            f"{key} = {str(path)!r}: holds no token, which is one word of at least 16 ASCII characters; remove it, and "
            f"one is made."
        )
    return token


def servers_of(config: TrainConfig) -> RolloutConfig:
    """Return the config's rollout section with `token_file` filled in, for the run's servers and clients."""
    options, folder = config.rollout, Path(config.run.folder)
    own = registered_token_file(options.registry, folder.name) if options.registry else folder / "token"
    return dataclasses.replace(options, token_file=options.token_file or str(own))


def registered_token_file(registry: str | Path, run: str) -> Path:
    """Return the path at which a run and its servers find the token file in a registry."""
    return Path(registry) / f"{run}.token"


def _make(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # created with mode 600
    try:
        with os.fdopen(handle, "w") as file:
            file.write(f"{secrets.token_hex(32)}\n")
        # A hard link, not a rename: a rename would replace the token of the process that came first.
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)
    finally:
        os.unlink(aside)
