"""Grammar of a request, in the parameters of vLLM (old and new names), TensorRT-LLM and OpenAI."""

from collections.abc import Iterable, Iterator, Mapping

from tidewheel.errors import InvalidRequest, Unsupported
from tidewheel.frontend.coercion import ParameterSource, expect, parse_json, show, to_bool, to_text
from tidewheel.grammar import Grammar, check_options

_FLAT = "guided_"
_NEVER_EMPTY = ("json", "regex", "choice", "grammar")
_KINDS = (*_NEVER_EMPTY, "json_object")
_ANY_JSON = '{"type": ["object", "array"]}'  # of TensorRT-LLM
_OBJECTS = ("structured_outputs", "guided_decoding")
_FORMAT = "response_format"
_WRAPPER = ("name", "description", "schema", "strict")  # members of OpenAI's json_schema
_GUIDE_TYPE, _GUIDE = "guided_decoding_guide_type", "guided_decoding_guide"
_GUIDES = {"json_schema": "json", "regex": "regex", "ebnf_grammar": "grammar"}
# Members of vLLM's objects that have no effect here: there is one library.
_WITHOUT_EFFECT = ("backend", "_backend", "disable_fallback", "_backend_was_auto")
_FLAT_MEMBERS = (*_KINDS, "whitespace_pattern")

GRAMMAR_PARAMETERS = dict.fromkeys(
    [*(_FLAT + name for name in _FLAT_MEMBERS), "guided_decoding_backend", *_OBJECTS, _FORMAT, _GUIDE_TYPE, _GUIDE]
).keys()


def find_grammar(sources: Iterable[ParameterSource]) -> Grammar | None:
    """Return the grammar that the parameters ask for, or None. Raise `InvalidRequest` or `Unsupported`."""
    given = [
        (grammar, source.origin)
        for source in sources
        if not GRAMMAR_PARAMETERS.isdisjoint(source.values)
        for grammar in _grammars(source.values)
    ]
    for grammar, origin in given[1:]:
        first, first_origin = given[0]
        if grammar != first:
            places = (f" in {first_origin}", f" in {origin}") if grammar.name == first.name else ("", "")
            raise InvalidRequest(f"{first.name}{places[0]} and {grammar.name}{places[1]} are set: give one")
    return given[0][0] if given else None


def names_grammar(sources: Iterable[ParameterSource]) -> bool:
    return not all(GRAMMAR_PARAMETERS.isdisjoint(source.values) for source in sources)


def _grammars(values: Mapping[str, object]) -> Iterator[Grammar]:
    given = [
        _of_members({name: values.get(_FLAT + name) for name in _FLAT_MEMBERS}, _FLAT),
        _of_guide(values.get(_GUIDE_TYPE), values.get(_GUIDE)),
        *(_of_members(_object(name, values.get(name)), f"{name}.") for name in _OBJECTS),
        _of_response_format(_object(_FORMAT, values.get(_FORMAT))),
    ]
    return (grammar for grammar in given if grammar is not None)


def _of_members(members: Mapping[str, object], prefix: str) -> Grammar | None:
    given = {prefix + name: value for name, value in members.items() if _is_given(name, value)}
    for name, value in given.items():
        if name.removeprefix(prefix) not in _KINDS:
            raise Unsupported(f"{name} is {show(value)}: it is not offered")
    if len(given) > 1:
        raise InvalidRequest(f"{' and '.join(given)} are set: give one")
    return next((_make(name.removeprefix(prefix), name, value) for name, value in given.items()), None)


def _is_given(name: str, value: object) -> bool:
    """Return whether a value asks for a grammar. For `_NEVER_EMPTY`, an empty value does, and is refused."""
    return value is not None if name in _NEVER_EMPTY else not _is_off(value) and name not in _WITHOUT_EFFECT


def _is_off(value: object) -> bool:
    return value is None or value is False or value in ("", [])


def _object(name: str, value: object) -> Mapping[str, object]:
    if isinstance(value, str) and value:
        value = parse_json(value, name)
    return {} if _is_off(value) else expect(name, value, dict, "an object")


def _make(kind: str, name: str, value: object) -> Grammar | None:
    if kind == "json":
        return _schema(name, value)
    if kind == "json_object":
        return Grammar.json_object(name) if to_bool(name, value) else None
    if kind == "choice":
        choices = parse_json(value, name) if isinstance(value, str) else value
        if not isinstance(choices, list | tuple):
            raise InvalidRequest(f"{name} is {show(value)}: it must be a list of texts")
        return Grammar.choice([to_text(name, choice) for choice in choices], name)
    return (Grammar.regex if kind == "regex" else Grammar.ebnf)(to_text(name, value), name)


def _schema(name: str, value: object) -> Grammar:
    # A text is bounded before it is parsed.
    text = Grammar.json_schema(value, name) if isinstance(value, str) else None
    schema = parse_json(value, name) if isinstance(value, str) else value
    if not isinstance(schema, Mapping):
        raise InvalidRequest(f"{name} is {show(value)}: it must be a JSON schema, an object")
    check_options(name, schema)
    return text or Grammar.json_schema(schema, name)


def _of_guide(kind: object, guide: object) -> Grammar | None:
    if _is_off(kind):
        if not _is_off(guide):
            raise InvalidRequest(f"{_GUIDE} is set, and {_GUIDE_TYPE} is not: set both")
        return None
    if kind == "json":
        return Grammar.json_schema(_ANY_JSON, _GUIDE_TYPE)
    if not isinstance(kind, str) or kind not in _GUIDES:
        raise Unsupported(f"{_GUIDE_TYPE} is {show(kind)}: it must be json, json_schema, regex or ebnf_grammar")
    if _is_off(guide):
        raise InvalidRequest(f"{_GUIDE_TYPE} is {kind}, and {_GUIDE} is not set: set both")
    return _make(_GUIDES[kind], _GUIDE, guide)


def _of_response_format(value: Mapping[str, object]) -> Grammar | None:
    given = {name: member for name, member in value.items() if member is not None}
    if not given:
        return None
    kind = given.pop("type", None)
    if kind not in ("text", "json_object", "json_schema"):
        raise Unsupported(f"{_FORMAT} has the type {show(kind)}: it must be text, json_object or json_schema")
    wrapper = given.pop("json_schema", None) if kind == "json_schema" else None
    if given:
        name = next(iter(given))
        advice = "send the type json_schema" if "schema" in name else "leave it out"
        raise InvalidRequest(f"{_FORMAT}.{name} is set beside the type {kind}: {advice}")
    if kind == "json_schema":
        return _of_wrapper(f"{_FORMAT}.json_schema", wrapper)
    return Grammar.json_object(_FORMAT) if kind == "json_object" else None


def _of_wrapper(place: str, wrapper: object) -> Grammar:
    if not isinstance(wrapper, Mapping) or wrapper.get("schema") is None:
        raise InvalidRequest(f"{_FORMAT} needs json_schema, an object with name and schema")
    for name in ("name", "description"):
        if wrapper.get(name) is not None:
            to_text(f"{place}.{name}", wrapper[name])
    if wrapper.get("strict") is not None:
        to_bool(f"{place}.strict", wrapper["strict"])
    if unknown := sorted(wrapper.keys() - _WRAPPER):
        raise InvalidRequest(f"{place}.{unknown[0]} is unknown: known are {', '.join(_WRAPPER)}")
    return _schema(f"{place}.schema", wrapper["schema"])
