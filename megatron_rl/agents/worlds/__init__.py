"""Worlds that others have built, each behind the interfaces of this room: tool servers, environments, tasks, games."""
