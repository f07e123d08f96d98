"""Numbers for Prometheus over HTTP, where configured. Loads prometheus_client only then."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from common.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client import Metric

log = logging.getLogger(__name__)

# A loop that is stuck for longer fails the scrape, which then tells just that.
SCRAPE_S: Final = 5.0


class MetricsServer:
    """Answers GET /metrics on a thread of its own; the numbers are taken on the event loop, between two steps.

    Made and closed on that loop.
    """

    def __init__(self, listen: str, families: Callable[[], Iterable["Metric"]]) -> None:
        """Raises ConfigError when the address can not be had."""
        from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, start_http_server

        self._loop = asyncio.get_running_loop()
        self._families = families
        registry = CollectorRegistry()
        registry.register(self)
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        host, _, port = listen.rpartition(":")
        try:
            self._server, self._thread = start_http_server(int(port), host.strip("[]"), registry)
        except OSError as error:
            raise ConfigError(
                f"can not serve metrics on {listen}: {error.strerror or error}", field="metrics_listen"
            ) from None
        self.port = self._server.server_port
        log.info("metrics on http://%s:%d/metrics", host, self.port)

    def describe(self) -> Iterable["Metric"]:
        """Nothing, so that registering does not ask for numbers."""
        return ()

    def collect(self) -> Iterable["Metric"]:
        """Called by the server's thread."""
        return asyncio.run_coroutine_threadsafe(self._take(), self._loop).result(SCRAPE_S)

    async def _take(self) -> list["Metric"]:
        return list(self._families())

    async def close(self) -> None:
        """A scrape under way still gets its numbers: the loop goes on meanwhile."""
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()
