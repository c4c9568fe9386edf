"""API keys from a TOML file, with the tenant, best class, limits and use of each key."""

import contextlib
import fcntl
import hashlib
import hmac
import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from tidewheel.errors import ConfigError
from tidewheel.gateway.bodies import UpstreamRequest
from tidewheel.gateway.errors import PermissionDenied
from tidewheel.parameters import control_character
from tidewheel.regular_files import read_at_most
from tidewheel.request import Priority
from tidewheel.request_options import to_priority
from tidewheel_client.errors import Busy, InvalidRequest, WrongKey

MAX_FILE_BYTES = 1 << 22
MAX_WORKERS = 64
MAX_KEYS = 1 << 16
_RETRY_MS = 1000  # over max_concurrent
_OFFSET = 4096  # of a ledger's rows
_ROW = np.dtype(
    [
        ("sha256", "S64"),
        ("spent", "f8"),  # requests, in a leaky bucket of a minute
        ("spent_at", "f8"),  # monotonic seconds
        ("num_open", "i4", (MAX_WORKERS,)),  # by worker
    ]
)
_Count = Annotated[int, msgspec.Meta(ge=1)]
_Class = Annotated[int, msgspec.Meta(ge=1, le=4)] | Literal["critical", "high", "normal", "low"]

logger = logging.getLogger(__name__)


class ApiKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    tenant: Annotated[str, msgspec.Meta(max_length=128)] = ""  # empty: the name
    max_priority: _Class = Priority.CRITICAL.value  # best class
    requests_per_minute: _Count | None = None
    max_concurrent: _Count | None = None
    admin: bool = False  # may load and unload adapters


class _KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: Annotated[list[ApiKey], msgspec.Meta(min_length=1)]


class Ledger:
    """Records of each API key's use, in memory or in a file that all workers share. None is ever removed."""

    def __init__(self, path: Path | None = None, worker: int = 0) -> None:
        """Open the file. Zero this worker's open requests, which an earlier process may have left."""
        self.worker = worker
        descriptor = os.memfd_create("ledger") if path is None else os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(descriptor, _OFFSET + MAX_KEYS * _ROW.itemsize)
        self._file = os.fdopen(descriptor, "r+b")
        self._count = np.memmap(self._file, np.int64, "r+", shape=(1,))
        self._rows = np.memmap(self._file, _ROW, "r+", _OFFSET, (MAX_KEYS,))
        with self.locked():
            self._rows["num_open"][: int(self._count[0]), worker] = 0

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock out other workers; the kernel releases a dead worker's lock."""
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def rows(self, hashes: Sequence[str]) -> Iterable[Any]:
        """Return the record of each hash, a new one if unknown. Raise `ConfigError` beyond `MAX_KEYS`."""
        with self.locked():
            count = int(self._count[0])
            known = {text: index for index, text in enumerate(self._rows["sha256"][:count].tolist())}
            indices = [known.setdefault(text.encode(), len(known)) for text in hashes]
            if len(known) > MAX_KEYS:
                raise ConfigError(f"there have been more than {MAX_KEYS} keys: start the gateway again")
            self._rows["sha256"][count : len(known)] = list(known)[count:]
            self._count[0] = len(known)
        return [self._rows[index] for index in indices]


class Account:
    """API key and its use. Without a key there are no limits."""

    def __init__(self, key: ApiKey | None, ledger: Ledger, record: Any = None) -> None:
        self.key = key
        self._ledger = ledger
        self._record = record

    @property
    def tenant(self) -> str:
        """Tenant that the key decides; empty without a key."""
        return "" if self.key is None else self.key.tenant or self.key.name

    def label(self, request: UpstreamRequest) -> UpstreamRequest:
        """Set the request's tenant and limit its class by the key. Raise `InvalidRequest`."""
        if self.key is None:
            return request
        if "tenant" in request.params:
            raise InvalidRequest("tenant is set, and the API key decides it: leave it out")
        asked = to_priority("priority", request.params.get("priority") or 0)
        request.params |= {
            "tenant": self.tenant,
            "priority": max(asked, Priority.from_wire(self.key.max_priority)).value,
        }
        return request

    def check_admin(self) -> None:
        """Raise `PermissionDenied` unless the key is an administrator's; without keys, all clients are local."""
        if self.key is not None and not self.key.admin:
            raise PermissionDenied(
                f"the key {self.key.name!r} may not do this: set admin = true for it in --api-keys"
            )

    @contextlib.contextmanager
    def admit(self) -> Iterator[None]:
        """Count a request as open within the block. Raise `Busy` beyond the key's limits."""
        if self.key is None:
            yield
            return
        num_open, worker = self._record["num_open"], self._ledger.worker
        with self._ledger.locked():
            self._check(self.key, int(num_open.sum()))
            num_open[worker] += 1
        try:
            yield
        finally:
            num_open[worker] -= 1  # only this worker writes it

    def _check(self, key: ApiKey, num_open: int) -> None:
        if key.max_concurrent is not None and num_open >= key.max_concurrent:
            raise Busy(
                f"the key {key.name!r} has {num_open} of {key.max_concurrent} requests open: let one end first",
                retry_after_ms=_RETRY_MS,
            )
        if key.requests_per_minute is None:
            return
        row, now, rate = self._record, time.monotonic(), key.requests_per_minute / 60
        spent = max(0.0, float(row["spent"]) - (now - float(row["spent_at"])) * rate) + 1
        if spent > key.requests_per_minute:
            raise Busy(
                f"the key {key.name!r} has used up its {key.requests_per_minute} requests a minute",
                retry_after_ms=int((spent - key.requests_per_minute) / rate * 1000) + 1,
            )
        row["spent"], row["spent_at"] = spent, now


class ApiKeys:
    def __init__(self, path: Path | str | None, ledger: Ledger | None = None) -> None:
        """Read the keys; without a file, no key is needed. Raise `ConfigError`."""
        self._path = Path(path) if path else None
        self._ledger = ledger or Ledger()
        self._accounts: dict[bytes, Account] = {}  # by hash
        self._anonymous = Account(None, self._ledger)
        self._version: tuple[int, int, int] | None = None
        if self._path is not None:
            self._read_changed(self._path)

    def refresh(self) -> None:
        """Read the file again if it changed; on an error, keep the keys."""
        try:
            if self._path is not None and self._read_changed(self._path):
                logger.warning("API keys: %d were read", len(self._accounts))
        except ConfigError as error:
            logger.warning("API keys stay as they were: %s", error)

    def account(self, authorization: str) -> Account:
        """Return the account for an `Authorization` header. Raise `WrongKey`."""
        if self._path is None:
            return self._anonymous
        scheme, _, secret = authorization.partition(" ")
        given = hashlib.sha256(secret.strip().encode("utf-8", "surrogateescape")).digest()
        # Compare every hash, so that the time says nothing.
        found = [account for known, account in self._accounts.items() if hmac.compare_digest(known, given)]
        if scheme.lower() != "bearer" or not found:
            raise WrongKey("the API key is missing or wrong: send Authorization: Bearer KEY")
        return found[0]

    def _read_changed(self, path: Path) -> bool:
        try:
            stat = path.stat()
            version = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if version == self._version:
                return False
            self._version = version
            keys = msgspec.toml.decode(read_at_most(path, MAX_FILE_BYTES), type=_KeyFile).keys
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: {error}") from None
        for key in keys:
            if control := control_character(key.tenant or key.name):
                raise ConfigError(f"{path}: the tenant of a key holds {control}: remove it")
        rows = zip(keys, self._ledger.rows([key.sha256 for key in keys]), strict=True)
        accounts = {bytes.fromhex(key.sha256): Account(key, self._ledger, row) for key, row in rows}
        if len(accounts) < len(keys):
            raise ConfigError(f"{path}: two keys have the same sha256")
        self._accounts = accounts
        return True
