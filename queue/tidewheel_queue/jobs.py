import difflib
import hashlib
import json
import re
import typing
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from tidewheel_client import codec
from tidewheel_client.errors import InvalidRequest, PromptTooLarge, RequestError

CLASSES = tuple(name.upper() for name in codec.PRIORITIES)
MAX_JOB_BYTES = 1 << 20
MAX_FILE_BYTES = 1 << 30
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_SHOWN = 60  # characters
_Number = Annotated[float, Meta(gt=0, lt=1e12)]
_TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
_TEXT = Meta(description="it must be text")


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Queued request with exactly one of `prompt`, `messages` and `input_ids`. Errors quote fields' descriptions."""

    id: Annotated[str, _TEXT] = ""  # empty: a new one
    prompt: Annotated[str | None, _TEXT] = None
    messages: Annotated[Sequence[Any] | None, Meta(description="it must be a list of chat messages")] = None
    input_ids: Annotated[Sequence[_TokenId] | None, Meta(description="it must be a list of token ids")] = None
    priority: Annotated[int, Meta(ge=0, le=4, description="it must be 1 to 4, a class by name, or 0 for NORMAL")] = 0
    # From now, time in the queue included:
    deadline_ms: Annotated[_Number | None, Meta(description="it must be a number of milliseconds above 0")] = None
    tenant: Annotated[str | None, _TEXT] = None
    session_id: Annotated[str | None, _TEXT] = None
    session_ttl_s: Annotated[_Number | None, Meta(description="it must be a number of seconds above 0")] = None
    stream: Annotated[bool, Meta(description="it must be true or false")] = False  # keep chunks as they come
    # Sampling keys and output flags:
    params: Annotated[Mapping[str, object], Meta(description="it must be an object of sampling parameters")] = {}

    @classmethod
    def of_payload(cls, payload: str) -> "Job":
        """Return a stored job. Raise `InvalidRequest` if this version cannot read it."""
        try:
            return cls(**json.loads(payload))
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"this version cannot read the job ({error})") from None

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments for `AsyncClient.stream`; the worker adds the deadline."""
        prompt = {"prompt": self.prompt, "messages": self.messages, "input_ids": self.input_ids}
        serving = {"tenant": self.tenant, "session_id": self.session_id, "session_ttl_s": self.session_ttl_s}
        given = {name: value for name, value in serving.items() if value is not None}
        return {**prompt, **self.params, **given, "priority": self.priority}


_FIELDS = {field.name: field.type for field in msgspec.structs.fields(Job)}
_NOT_PARAMS = {*_FIELDS, "request_id", "timeout_s"}


class EnqueuedJob(NamedTuple):
    id: str
    is_new: bool  # False: a job with this id stays


class PackedJob(NamedTuple):
    """Job as stored in Redis."""

    id: str
    class_number: int
    payload: str
    stream: int

    @classmethod
    def of(cls, given: Job | Mapping[str, object]) -> "PackedJob":
        """Raise `InvalidRequest`."""
        job = job_of(msgspec.structs.asdict(given) if isinstance(given, Job) else given)
        job_id = check_id(job.id) if job.id else uuid.uuid4().hex
        payload = _payload(job)
        if len(payload) > MAX_JOB_BYTES:
            raise PromptTooLarge(f"the job has {len(payload)} bytes; at most {MAX_JOB_BYTES} are kept")
        return cls(job_id, job.priority or CLASSES.index("NORMAL") + 1, payload, int(job.stream))


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """State of a job, and its result once ended."""

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
        known = msgspec.structs.asdict(self) | {"answer": None}
        return {name: value for name, value in known.items() if value is not None} | dict(self.answer or {})


class DeadJob(NamedTuple):
    id: str
    reason: str
    attempts: int
    job: Job


class TextChunk(NamedTuple):
    """Part of an answer, which begins anew with each `attempt` at the job."""

    text: str
    attempt: int


class JobCounts(NamedTuple):
    """Numbers of jobs by class, CRITICAL first."""

    waiting: tuple[int, ...]
    running: tuple[int, ...]
    dead: int


def check_id(job_id: str) -> str:
    """Raise `InvalidRequest` for an invalid job id."""
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
    if "priority" in known:
        known["priority"] = codec.to_number(known["priority"])
    for name, value in known.items():
        try:
            # msgspec refuses subclasses of float, such as numpy's float64.
            msgspec.convert(float(value) if isinstance(value, float) else value, _FIELDS[name])
        except (msgspec.ValidationError, UnicodeEncodeError):  # msgspec encodes text where it expects another type
            rule = typing.get_args(_FIELDS[name])[1].description
            raise InvalidRequest(f"{name} is {_shown(value)}: {rule}") from None
    job = Job(**known)
    codec.prompt_input(job.prompt, job.messages, job.input_ids)
    for name in job.params:
        if name in _NOT_PARAMS:
            raise InvalidRequest(f"params has {name!r}, which is no parameter of sampling: set it for the whole job")
    if job.params.get("n", 1) != 1:
        raise InvalidRequest(f"n is {_shown(job.params['n'])}: a job has one answer")
    return job


def read_jobs(lines: Iterable[bytes]) -> list[dict[str, object]]:
    """Parse JSON lines. Raise `InvalidRequest` with the first bad line's number.

    A missing id is made from the file's hash and the line number: the same file gives the same ids.
    """
    seen: dict[object, int] = {}
    jobs: dict[int, dict[str, object]] = {}  # by line number
    digest, size = hashlib.sha256(), 0
    for number, line in enumerate(lines, start=1):
        digest.update(line)
        size += len(line)
        if size > MAX_FILE_BYTES:
            raise InvalidRequest(f"line {number}: a file has at most {MAX_FILE_BYTES} bytes")
        if not line.strip():
            continue
        job = jobs[number] = _job_of_line(number, line)
        job_id = job.get("id")
        if job_id and seen.setdefault(job_id, number) != number:
            raise InvalidRequest(f"line {number}: id {job_id!r} is that of line {seen[job_id]} too")
    for number, job in jobs.items():
        job["id"] = job.get("id") or f"{digest.hexdigest()[:16]}-{number}"
    return list(jobs.values())


def _job_of_line(number: int, line: bytes) -> dict[str, object]:
    try:
        if len(line) > 8 * MAX_JOB_BYTES:  # a character takes up to six
            raise InvalidRequest(f"it has {len(line)} bytes, too many for a job of {MAX_JOB_BYTES}")
        job = json.loads(line, parse_constant=_refuse)
        PackedJob.of(job)
        return dict(job)
    except RequestError as error:
        reason = error.message
    except RecursionError:
        reason = "the JSON is nested too deeply"
    except ValueError as error:
        reason = f"this is no JSON ({error})"
    raise InvalidRequest(f"line {number}: {reason}")


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _payload(job: Job) -> str:
    fields = msgspec.structs.asdict(job) | {"id": None}
    given = {name: value for name, value in fields.items() if value not in (None, {}, False, 0)}
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
    return f": sampling parameters go into 'params', and the fields of a job are {', '.join(_FIELDS)}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
