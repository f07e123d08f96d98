"""Server-sent events of one HTTP/1.1 request: as little as a load client needs that shares the cores it measures."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any


async def events(port: int, path: str, body: Mapping[str, object]) -> AsyncIterator[dict[str, Any]]:
    """Each `data:` of the answer as an object, as soon as it is here. Raises RuntimeError if the answer is not 200."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
        writer.write(head.encode() + b"\r\n\r\n" + data)
        status = (await reader.readline()).decode().strip()
        while (await reader.readline()).strip():
            pass  # headers: every peer answers in chunks
        if " 200 " not in status + " ":
            raise RuntimeError(f"{path}: {status}: {(await reader.read(2000)).decode(errors='replace')}")
        pending = b""
        while size := int((await reader.readline()).split(b";")[0], 16):
            pending += (await reader.readexactly(size + 2))[:-2]
            *lines, pending = pending.split(b"\n")
            for line in lines:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])
    finally:
        writer.close()
