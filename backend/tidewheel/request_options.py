from collections.abc import Mapping
from functools import partial
from typing import Annotated

import msgspec

from tidewheel.errors import InvalidRequest
from tidewheel.lora import MAX_LORA_NAME_CHARS
from tidewheel.parameters import Parameter, check_fields
from tidewheel.request import Priority, RequestObjective
from tidewheel.tenants import MAX_TENANT_CHARS

_option = partial(Parameter, is_tensor=False)
MAX_CALLED_TOOLS = 64
# Options that make a request an order, without a prompt, each with those that go with it.
ORDERS: Mapping[str, tuple[str, ...]] = {
    "close_session": ("session_id", "tenant"),
    "pause_session": ("session_id", "tenant"),
    "lora_order": ("lora_name", "lora_path", "tenant"),
}
_LORA_ORDERS = {"load": ("lora_name", "lora_path"), "unload": ("lora_name",), "list": ()}
MAX_DEADLINE_MS = 30 * 86_400_000.0  # later ones count as this


def to_priority(name: str, value: object) -> Priority:
    """Return the class of a number or name. Raise `InvalidRequest`."""
    try:
        return Priority.from_wire(value)
    except KeyError:
        wanted = f"it must be 0 (default) to {max(Priority)} (lowest), or critical, high, normal or low"
        raise InvalidRequest(f"{name} is {str(value)[:80]}: {wanted}") from None


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Serving options of a request. Raise `InvalidRequest`. Deadlines count from the arrival."""

    n: Annotated[
        int, Parameter("sequences, with seeds from `seed` on", (), ("num_return_sequences",), low=1, high=16)
    ] = 1
    priority: Annotated[
        Priority, _option("class: critical, high, normal, low, or 1 to 4; 0: the default", aliases=("qos_class",))
    ] = Priority.NORMAL
    tenant: Annotated[
        str, _option("tenant whose rates and quotas count", max_chars=MAX_TENANT_CHARS, is_printable=True)
    ] = ""
    cache_salt: Annotated[str, _option("salt of the cache: requests of one salt share prompts", max_bytes=256)] = ""
    deadline_ms: Annotated[
        float | None, _option("milliseconds until a waiting request is refused, a running one cut", above=0)
    ] = None
    soft_deadline_ms: Annotated[float | None, _option("milliseconds until the class is one lower", above=0)] = None
    ttft_ms: Annotated[
        float | None, _option("objective: milliseconds from arrival to the first token", above=0, high=600_000.0)
    ] = None
    tpot_ms: Annotated[
        float | None, _option("objective: mean milliseconds of each later token", above=0, high=60_000.0)
    ] = None
    objective_action: Annotated[
        str, _option("what follows a predicted miss: a lower class, or a refusal", choices=("demote", "refuse"))
    ] = "demote"
    session_id: Annotated[
        str, _option("session whose KV blocks stay; unique by tenant", max_bytes=256, is_printable=True)
    ] = ""
    session_ttl_s: Annotated[
        float | None, _option("seconds that the session stays; not given: the setting's", above=0)
    ] = None
    close_session: Annotated[bool, _option("end the session, without a prompt")] = False
    pause_session: Annotated[
        tuple[str, ...],
        _option(
            "tools that run until the session's next turn, without a prompt",
            max_entries=MAX_CALLED_TOOLS, max_bytes=256, is_printable=True,
        ),
    ] = ()  # fmt: skip
    lora_name: Annotated[
        str, _option("LoRA adapter; not given: the base model", max_chars=MAX_LORA_NAME_CHARS, is_printable=True)
    ] = ""
    lora_order: Annotated[str, _option("`load`, `unload` or `list`; no prompt", choices=tuple(_LORA_ORDERS))] = ""
    lora_path: Annotated[str, _option("folder of the adapter to load", max_bytes=4096, is_printable=True)] = ""

    def __post_init__(self) -> None:
        check_fields(self)
        if not isinstance(self.priority, Priority):
            msgspec.structs.force_setattr(self, "priority", to_priority("priority", self.priority))
        soft, hard = self.soft_deadline_ms, self.deadline_ms
        if soft is not None and hard is not None and soft >= hard:
            raise InvalidRequest(
                f"soft_deadline_ms is {soft:g} and deadline_ms {hard:g}: the soft one must come first"
            )
        if self.objective_action == "refuse" and self.objective is None:
            raise InvalidRequest("objective_action is refuse, and ttft_ms and tpot_ms are not set: set one")
        if not self.session_id and self.session_ttl_s is not None:
            ttl = f"session_ttl_s is {self.session_ttl_s:.12g}"
            raise InvalidRequest(f"{ttl}, and session_id is not set: set both or none")
        if not self.session_id and "session_id" in ORDERS.get(self.order, ()):
            raise InvalidRequest(f"{self.order} is set, and session_id is not: name the session")
        given = tuple(name for name in ("lora_name", "lora_path") if getattr(self, name))
        if (self.lora_order or self.lora_path) and given != _LORA_ORDERS.get(self.lora_order):
            raise InvalidRequest(
                f"lora_order is {self.lora_order!r}, with {' and '.join(given) or 'no adapter'}: load goes with "
                "lora_name and lora_path, unload with lora_name, and list with none of them"
            )
        if self.session_id and self.n > 1:
            raise InvalidRequest(f"n is {self.n} with a session_id: a session goes on from one sequence")

    @property
    def order(self) -> str:
        """Return the option that makes this an order about a session or adapters; empty for a prompt."""
        return next((name for name in ORDERS if getattr(self, name)), "")

    def deadline_ns(self, arrival_ns: int, timeout_us: int = 0) -> int:
        """Return the earlier of `deadline_ms` and `timeout_us` as a time on the clock of `arrival_ns`; 0: none."""
        limits = [limit for limit in (self.deadline_ms, timeout_us * 1e-3) if limit]
        return _moment_ns(arrival_ns, min(limits, default=None))

    @property
    def objective(self) -> RequestObjective | None:
        ttft_s, tpot_s = (None if limit is None else 1e-3 * limit for limit in (self.ttft_ms, self.tpot_ms))
        return RequestObjective.of(ttft_s, tpot_s, self.objective_action == "refuse")

    def soft_deadline_ns(self, arrival_ns: int) -> int:
        return _moment_ns(arrival_ns, self.soft_deadline_ms)


class PromptOptions(msgspec.Struct, frozen=True, kw_only=True):
    add_special_tokens: Annotated[
        bool | None, Parameter("add the tokenizer's special tokens; not given: to a text, not to messages")
    ] = None
    add_generation_prompt: Annotated[
        bool | None, Parameter("end messages with the beginning of an answer; not given: true")
    ] = None
    return_token_strs: Annotated[bool, Parameter("return the tokens' texts too, for the task `tokenize`")] = False
    echo: Annotated[bool, Parameter("return the prompt before the text")] = False
    language: Annotated[str, _option("language of `audio`, as `en`", max_chars=40, is_printable=True)] = ""
    translate: Annotated[bool, _option("write English of `audio` in another language")] = False

    def check_for(self, name: str) -> None:
        """Raise `InvalidRequest` for an option that the prompt's field does not support."""
        if name == "input_ids" and self.add_special_tokens is not None:
            raise InvalidRequest("add_special_tokens is set, and the prompt is token ids: leave it out")
        if name == "input_ids" and self.return_token_strs:
            raise InvalidRequest("return_token_strs is true: it goes with the task tokenize")
        if name != "messages" and self.add_generation_prompt is False:
            raise InvalidRequest("add_generation_prompt is false: it goes with messages")
        if name not in ("audio", "audio_file") and (self.language or self.translate):
            raise InvalidRequest("language or translate is set: they go with audio")


def _moment_ns(arrival_ns: int, milliseconds: float | None) -> int:
    return 0 if milliseconds is None else arrival_ns + int(min(milliseconds, MAX_DEADLINE_MS) * 1e6)
