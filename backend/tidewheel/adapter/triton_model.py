import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import triton_python_backend_utils as pb_utils

import tidewheel
from tidewheel.adapter.follower import Follower
from tidewheel.adapter.model_calls import CalledModel, ModelCall
from tidewheel.adapter.one_shot import complete_entry, read_tensors
from tidewheel.adapter.repository_entry import load_settings
from tidewheel.adapter.responder import TritonSink
from tidewheel.adapter.stub_process import Presence, close_inherited_connections, is_stub
from tidewheel.adapter.tensors import complete, read_request
from tidewheel.confidential import TracebackFormatter, protect_texts
from tidewheel.engine.folder import engine_dir
from tidewheel.engine.launcher import choose_engine
from tidewheel.errors import ConfigError, InternalError, TidewheelError
from tidewheel.frontend.request_parameters import GenerateRequest
from tidewheel.one_shot.shared_tensors import kept_files
from tidewheel.private_dir import close_shared_memory

log = logging.getLogger(__name__)

_NOT_SUBMITTED = "the request could not be submitted; the server's log says why"


class TritonHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        triton = pb_utils.Logger
        severe = triton.log_error if record.levelno >= logging.ERROR else triton.log_warn
        (severe if record.levelno >= logging.WARNING else triton.log_info)(self.format(record))


def route_logging() -> None:
    """Pass the package's log on to Triton's."""
    logger, handler = logging.getLogger("tidewheel"), TritonHandler()
    logger.setLevel(logging.INFO)
    logger.propagate = False
    handler.setFormatter(TracebackFormatter())
    logger.handlers = [handler]


class TritonPythonModel:
    """Triton model whose process holds a front end. Triton calls it from one thread."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        config = auto_complete_model_config
        try:
            return complete_entry(config, os.getppid()) or complete(config)
        except ConfigError as error:
            raise pb_utils.TritonModelException(str(error)) from None

    def initialize(self, args: Mapping[str, str]) -> None:
        """Start or join the engine. Raise `TritonModelException` if the model cannot be served."""
        route_logging()
        if is_stub():
            protect_texts()
            close_inherited_connections()
        close_shared_memory()
        name, owner = args["model_instance_name"], ""
        log.info("%s: engine package %s", name, tidewheel.__file__)
        try:
            self._settings = settings = load_settings(args)
            if settings.owner is not settings.entry:  # whichever of the two fails first is reported
                owner = f"the engine of {settings.owner.name!r}: "
            self._called = CalledModel(settings.engine) if settings.engine.is_remote else None
            model_dir = engine_dir(settings.owner.folder.parent, settings.owner.name)
            self._follower = Follower(model_dir, settings, choose_engine(model_dir, settings.engine), name)
            self._presence = Presence(args["model_name"])  # last: it says that the front end has begun
        except (ConfigError, TidewheelError) as error:
            raise pb_utils.TritonModelException(f"{owner}{error}") from None
        except OSError as error:
            raise pb_utils.TritonModelException(f"{owner}a file of the model or the run directory: {error}") from None

    def is_ready(self) -> bool:
        """Return whether requests are accepted. Triton calls this hook."""
        return self._follower.serving.client.readiness.is_ready

    def execute(self, requests: Sequence[Any]) -> None:
        """Submit requests. Wait after each until the front end has room."""
        for request in requests:
            self._submit(request)
            self._follower.serving.frontend.gate.wait()

    def finalize(self) -> None:
        self._presence.remove()
        self._follower.close()
        kept_files.close()

    def _submit(self, request: Any) -> None:
        arrival_ns = time.monotonic_ns()
        request_id = request.request_id()  # Triton may free the request with its answer
        self._presence.count(1)
        sink = TritonSink(request.get_response_sender(), lambda: self._presence.count(-1))
        try:
            asked = self._read(request, sink, arrival_ns)
            with self._follower.lock:
                self._follower.serving.frontend.submit(asked, sink)
        except Exception as error:
            refusal = error if isinstance(error, TidewheelError) else InternalError(_NOT_SUBMITTED)
            if refusal is not error:
                log.exception("a request could not be submitted")
            self._follower.serving.frontend.refuse(request_id, sink, arrival_ns, refusal)

    def _read(self, request: Any, sink: TritonSink, arrival_ns: int) -> GenerateRequest:
        frontend, config = self._settings.frontend, self._follower.serving.target.config
        if config.kind != "text":
            call = None if self._called is None else ModelCall(self._called, request)
            stream = config.kind == "iterative" and self._settings.entry.decoupled
            return read_tensors(request, frontend, config.max_input_mb, arrival_ns, call, stream=stream)
        generate, sink.format = read_request(
            request,
            frontend,
            decoupled=self._settings.entry.decoupled,
            max_prompt_bytes=config.max_prompt_bytes,
            arrival_ns=arrival_ns,
        )
        return generate
