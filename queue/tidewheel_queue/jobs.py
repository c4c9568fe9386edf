from __future__ import annotations

import difflib
import hashlib
import json
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from tidewheel_client import codec
from tidewheel_client.errors import InvalidRequest, PromptTooLarge, RequestError

CLASSES = ("CRITICAL", "HIGH", "NORMAL", "LOW")
MAX_JOB_BYTES = 1 << 20
MAX_FILE_BYTES = 1 << 30
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_SHOWN = 60  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Queued request with exactly one of `prompt`, `messages` and `input_ids`."""

    id: str = ""  # empty: a new one
    prompt: str | None = None
    messages: Sequence[codec.Message] | None = None
    input_ids: Sequence[int] | None = None
    priority: int = 0  # 1 CRITICAL to 4 LOW; 0: NORMAL
    deadline_ms: float | None = None  # from now, time in the queue included
    tenant: str | None = None
    session_id: str | None = None
    session_ttl_s: float | None = None
    stream: bool = False  # keep chunks as they come
    params: Mapping[str, object] = field(default_factory=dict)  # sampling keys and output flags

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of `AsyncClient.stream`, without the deadline."""
        prompt = {"prompt": self.prompt, "messages": self.messages, "input_ids": self.input_ids}
        serving = {"tenant": self.tenant, "session_id": self.session_id, "session_ttl_s": self.session_ttl_s}
        given = {name: value for name, value in serving.items() if value is not None}
        return {**prompt, **self.params, **given, "priority": self.priority}


class EnqueuedJob(NamedTuple):
    id: str
    is_new: bool  # False: a job with this id stays


class PackedJob(NamedTuple):
    id: str
    class_number: int
    payload: str
    stream: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """State of a job, and its final result."""

    id: str
    state: str  # waiting, running; done, failed, dead, cancelled
    attempts: int = 0
    answer: Mapping[str, Any] | None = None  # fields of a `Completion`, if done
    error: str | None = None  # if failed or dead
    tag: str | None = None  # of the error, such as TW-INPUT

    @property
    def has_ended(self) -> bool:
        return self.state not in ("waiting", "running")

    @property
    def text(self) -> str:
        return str(self.answer["text"]) if self.answer else ""

    def as_dict(self) -> dict[str, Any]:
        known = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "answer"}
        return {name: value for name, value in known.items() if value is not None} | dict(self.answer or {})


class DeadJob(NamedTuple):
    id: str
    reason: str
    attempts: int
    job: Job


class TextChunk(NamedTuple):
    """Part of an answer, begun again by each attempt."""

    text: str
    attempt: int


class JobCounts(NamedTuple):
    """Jobs by class, CRITICAL first."""

    waiting: tuple[int, ...]
    running: tuple[int, ...]
    dead: int


def check_id(job_id: str) -> str:
    """Raise `InvalidRequest`."""
    if not isinstance(job_id, str) or not _ID.fullmatch(job_id):
        raise InvalidRequest(f"id {_shown(job_id)}: 1 to 128 characters of A-Z a-z 0-9 . _ : - are allowed")
    return job_id


def job_of(given: object) -> Job:
    """Raise `InvalidRequest`."""
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"a job is a JSON object, not {_shown(given)}")
    for name in given:
        if name not in _FIELDS:
            raise InvalidRequest(f"unknown field {_shown(name)}{_hint(name)}")
    known = {name: value for name, value in given.items() if value is not None}
    for name, value in known.items():
        if not _CHECKS[name].allows(value):
            raise InvalidRequest(f"{name} is {_shown(value)}: {_CHECKS[name].rule}")
    job = Job(**known)
    codec.prompt_input(job.prompt, job.messages, job.input_ids)
    _check_params(job.params)
    return job


def pack(given: Job | Mapping[str, object], max_bytes: int = MAX_JOB_BYTES) -> PackedJob:
    """Raise `InvalidRequest`."""
    job = job_of(_given(given) if isinstance(given, Job) else given)
    job_id = check_id(job.id) if job.id else uuid.uuid4().hex
    payload = _payload(job)
    if len(payload) > max_bytes:
        raise PromptTooLarge(f"the job has {len(payload)} bytes; at most {max_bytes} are kept")
    return PackedJob(job_id, job.priority or CLASSES.index("NORMAL") + 1, payload, job.stream)


def unpack(payload: str) -> Job:
    """Raise `InvalidRequest` for a job of another version."""
    try:
        return Job(**json.loads(payload))
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"this version cannot read the job ({error})") from None


def read_json(text: str | bytes) -> Any:
    """Raise `InvalidRequest`."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise InvalidRequest("the JSON is nested too deeply") from None
    except ValueError as error:
        raise InvalidRequest(f"this is no JSON ({error})") from None


def read_jobs(lines: Iterable[bytes], max_job_bytes: int = MAX_JOB_BYTES) -> list[dict[str, object]]:
    """Parse JSON lines. Raise `InvalidRequest` with the first bad line's number.

    A missing id is made from the file's hash and the line number: the same file gives the same ids.
    """
    seen: dict[str, int] = {}
    jobs: list[dict[str, object]] = []
    unnamed: list[tuple[int, int]] = []  # line number, and index in `jobs`
    digest, size = hashlib.sha256(), 0
    for number, line in enumerate(lines, start=1):
        digest.update(line)
        size += len(line)
        if size > MAX_FILE_BYTES:
            raise InvalidRequest(f"line {number}: a file has at most {MAX_FILE_BYTES} bytes")
        if not line.strip():
            continue
        job, packed = _job_of_line(number, line, max_job_bytes)
        if not job.get("id"):
            unnamed.append((number, len(jobs)))
        elif packed.id in seen:
            raise InvalidRequest(f"line {number}: id {packed.id!r} is that of line {seen[packed.id]} too")
        else:
            seen[packed.id] = number
        jobs.append(job)
    for number, index in unnamed:
        jobs[index]["id"] = check_id(f"{digest.hexdigest()[:16]}-{number}")
    return jobs


def _job_of_line(number: int, line: bytes, max_job_bytes: int) -> tuple[dict[str, object], PackedJob]:
    """Raise `InvalidRequest`."""
    try:
        if len(line) > 8 * max_job_bytes:  # a character takes up to six
            raise InvalidRequest(f"it has {len(line)} bytes, too many for a job of {max_job_bytes}")
        job = read_json(line)
        packed = pack(job, max_job_bytes)
        return dict(job), packed
    except RequestError as error:
        raise InvalidRequest(f"line {number}: {error.message}") from None


class _Check(NamedTuple):
    allows: Any
    rule: str


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_positive(value: object) -> bool:
    return _is_number(value) and 0 < value < 1e12  # type: ignore[operator]


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _are_ids(value: Any) -> bool:
    return _is_list(value) and all(type(one) is int and 0 <= one < 2**31 for one in value)


_TEXT = _Check(lambda value: isinstance(value, str), "it must be text")
_CHECKS = {
    "id": _TEXT,
    "prompt": _TEXT,
    "messages": _Check(_is_list, "it must be a list of chat messages"),
    "input_ids": _Check(_are_ids, "it must be a list of token ids"),
    "priority": _Check(lambda value: type(value) is int and 0 <= value <= 4, "it must be 1 to 4, or 0 for NORMAL"),
    "deadline_ms": _Check(_is_positive, "it must be a number of milliseconds above 0"),
    "tenant": _TEXT,
    "session_id": _TEXT,
    "session_ttl_s": _Check(_is_positive, "it must be a number of seconds above 0"),
    "stream": _Check(lambda value: isinstance(value, bool), "it must be true or false"),
    "params": _Check(lambda value: isinstance(value, Mapping), "it must be an object of sampling parameters"),
}
_FIELDS = frozenset(_CHECKS)
_NOT_PARAMS = _FIELDS | {"request_id", "timeout_s"}


def _given(job: Job) -> dict[str, object]:
    shown = {item.name: getattr(job, item.name) for item in fields(job)}
    return {name: value for name, value in shown.items() if value is not None}


def _check_params(params: Mapping[str, object]) -> None:
    for name in params:
        if name in _NOT_PARAMS:
            raise InvalidRequest(f"params has {name!r}, which is no parameter of sampling: set it for the whole job")
    if params.get("n", 1) != 1:
        raise InvalidRequest(f"n is {_shown(params['n'])}: a job has one answer")


def _payload(job: Job) -> str:
    given = {name: value for name, value in _given(job).items() if name != "id" and value not in ({}, False, 0)}
    try:
        payload = json.dumps(given, allow_nan=False, separators=(",", ":"))
        json.dumps(given, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidRequest("the job has half a surrogate pair, which is no character") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"the job is no JSON ({error})") from None
    return payload


def _hint(name: object) -> str:
    near = difflib.get_close_matches(str(name), sorted(_FIELDS), n=1)
    if near:
        return f": did you mean {near[0]!r}?"
    return f": sampling parameters go into 'params', and the fields of a job are {', '.join(_CHECKS)}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
