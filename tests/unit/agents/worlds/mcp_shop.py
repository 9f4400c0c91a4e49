"""A shop as an MCP server, over stdin and stdout or, given a port, over HTTP. Some of its tools fail."""

import asyncio
import logging
import os
import sys
import time

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

logging.disable()
server = MCPServer("shop")
basket = []


@server.tool()
def add(item: str) -> str:
    """Put an item into the basket."""
    if item == "nothing":
        raise ToolError("there is no such item")
    basket.append(item)
    return ", ".join(basket)


@server.tool()
async def nap() -> str:
    """Take a nap, while others are served."""
    await asyncio.sleep(3600)
    return "good morning"


@server.tool()
async def hang() -> str:
    """Serve nobody any more."""
    time.sleep(3600)
    return ""


@server.tool()
def leave() -> str:
    """End the shop."""
    os._exit(1)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        server.run()
    else:
        server.run("streamable-http", port=int(sys.argv[1]))
