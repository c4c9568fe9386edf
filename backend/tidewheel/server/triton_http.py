from __future__ import annotations

import http.client
import json
from typing import Any, NamedTuple
from urllib.parse import quote

_TIMEOUT_S = 2.0


class DeployedModel(NamedTuple):
    name: str
    backend: str
    decoupled: bool
    engine_of: str  # model whose engine it shares, or empty


class TritonHttp:
    """Client with a connection for each call; `authority` is host:port."""

    def __init__(self, authority: str) -> None:
        self._authority = authority

    def is_ready(self) -> bool:
        return self._holds("/v2/health/ready")

    def is_live(self) -> bool:
        return self._holds("/v2/health/live")

    def serves(self, model: str) -> bool:
        return self._holds(f"/v2/models/{quote(model, safe='')}/ready")

    def models(self) -> list[DeployedModel]:
        """Raise OSError without an answer."""
        index = self._json("POST", "/v2/repository/index")
        names = sorted({entry["name"] for entry in index if entry.get("state") == "READY"})
        return [self._model(name) for name in names]

    def _model(self, name: str) -> DeployedModel:
        config = self._json("GET", f"/v2/models/{quote(name, safe='')}/config")
        parameters = config.get("parameters", {})
        return DeployedModel(
            name=name,
            backend=config.get("backend", ""),
            decoupled=bool(config.get("model_transaction_policy", {}).get("decoupled", False)),
            engine_of=parameters.get("engine_of", {}).get("string_value", ""),
        )

    def _holds(self, path: str) -> bool:
        try:
            return self._call("GET", path)[0] == 200
        except OSError:
            return False

    def _json(self, method: str, path: str) -> Any:
        status, body = self._call(method, path)
        if status != 200:
            raise OSError(f"{path} answered {status}")
        return json.loads(body)

    def _call(self, method: str, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self._authority, timeout=_TIMEOUT_S)
        try:
            connection.request(method, path)
            response = connection.getresponse()
            return response.status, response.read()
        except http.client.HTTPException as error:
            raise OSError(str(error)) from error
        finally:
            connection.close()
