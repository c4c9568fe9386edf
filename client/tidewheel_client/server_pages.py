import re
from collections.abc import Awaitable, Callable, Iterable, Mapping

import httpx2
import msgspec
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample as Sample

from tidewheel_client.answers import Health
from tidewheel_client.errors import InvalidRequest, RequestError, RequestTimeout, ServerUnavailable, WrongKey
from tidewheel_client.facade import run

METRICS_PORT = 8002
HEALTH_PORT = 8003
TIMEOUT_S = 5.0
_HOST = re.compile(r"(https?://)?(?P<host>\[[0-9a-fA-F:.]+\]|[^][:/]+)(:\d+)?/?")
Get = Callable[[str], Awaitable[httpx2.Response]]


class Figures:
    def __init__(self, samples: Iterable[Sample]) -> None:
        self._by_name: dict[str, list[Sample]] = {}
        for sample in samples:
            self._by_name.setdefault(sample.name, []).append(sample)

    @classmethod
    def parse(cls, text: str) -> "Figures":
        """Parse Prometheus's text format. Raise `ValueError`."""
        # With types, the parser renames counters without `_total`, such as Triton's.
        lines = "".join(f"{line}\n" for line in text.split("\n") if not line.startswith("#"))
        families = text_string_to_metric_families(lines)
        return cls(sample for family in families for sample in family.samples)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._by_name))

    def samples(self, name: str, **labels: str) -> list[Sample]:
        """Return a metric's samples with all these labels."""
        wanted = labels.items()
        return [sample for sample in self._by_name.get(name, ()) if wanted <= sample.labels.items()]

    def value(self, name: str, **labels: str) -> float:
        """Sum a metric's samples. Raise `KeyError` for an unknown name."""
        if name not in self._by_name:
            raise KeyError(f"the server shows no metric {name}")
        return sum(sample.value for sample in self.samples(name, **labels))


class ServerPages:
    """HTTP pages of a server, by default at Triton's ports on the host of `url`."""

    def __init__(
        self, url: str, metrics_url: str | None = None, health_url: str | None = None, get: Get | None = None
    ) -> None:
        self._url = url
        self._metrics_url = metrics_url
        self._health_url = health_url
        self._get = get or blocking_get

    @property
    def metrics_url(self) -> str:
        return self._metrics_url or f"http://{self._host('metrics_url')}:{METRICS_PORT}/metrics"

    @property
    def health_url(self) -> str:
        return self._health_url or f"http://{self._host('health_url')}:{HEALTH_PORT}/ready"

    async def metrics(self) -> Figures:
        url = self.metrics_url
        return _figures(url, await self._get(url))

    async def health(self) -> Health:
        url = self.health_url
        response = await self._get(url)
        if response.status_code not in (200, 503):
            raise _unexpected(url, response)
        try:
            return msgspec.json.decode(response.content, type=Health)
        except ValueError:
            raise ServerUnavailable(f"{url} is no health page of tidewheel serve") from None

    def _host(self, option: str) -> str:
        match = _HOST.fullmatch(self._url)
        if match is None:
            raise InvalidRequest(f"{self._url!r} names no host and port: give {option}")
        return match["host"]


def read_figures(url: str, api_key: str = "") -> Figures:
    """Return the metrics of a server or gateway. Raise `RequestError`."""
    return _figures(url, run(blocking_get(url, {"Authorization": f"Bearer {api_key}"} if api_key else None)))


async def blocking_get(url: str, headers: Mapping[str, str] | None = None) -> httpx2.Response:
    try:
        return httpx2.get(url, headers=headers, trust_env=False, timeout=TIMEOUT_S, verify=verifies(url))
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise from_connection(error, url) from None


async def async_get(url: str) -> httpx2.Response:
    try:
        async with httpx2.AsyncClient(trust_env=False, timeout=TIMEOUT_S, verify=verifies(url)) as http:
            return await http.get(url)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise from_connection(error, url) from None


def verifies(url: str) -> bool:
    """Return False for plain HTTP, to save loading certificates (80 ms)."""
    return not url.startswith("http:")


def from_connection(error: Exception, url: str) -> RequestError:
    if isinstance(error, httpx2.ConnectError):
        return ServerUnavailable(f"no server answers at {url}")
    if isinstance(error, httpx2.TimeoutException):
        return RequestTimeout(f"{url} did not answer in time")
    if isinstance(error, httpx2.InvalidURL | httpx2.UnsupportedProtocol):
        return InvalidRequest(f"{url!r} is no address of a server: {error}")
    return ServerUnavailable(f"the connection to {url} was lost ({error or type(error).__name__})")


def _figures(url: str, response: httpx2.Response) -> Figures:
    if not response.is_success:
        raise _unexpected(url, response)
    try:
        return Figures.parse(response.text)
    except ValueError as error:
        raise ServerUnavailable(f"{url} shows no metrics: {error}") from None


def _unexpected(url: str, response: httpx2.Response) -> RequestError:
    if response.status_code == 401:
        return WrongKey(f"{url} wants an API key, and got none or an unknown one")
    return ServerUnavailable(f"{url} answered with HTTP status {response.status_code}")
