import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from tidewheel.bench import BenchError
from tidewheel.bench.outcome import OfferedRequest, words

_FLAGS = ("return_num_output_tokens", "return_finish_reason", "exclude_input_in_output")


class DeclaredInputs(NamedTuple):
    inputs: frozenset[str]
    is_batched: bool  # leading batch dimension
    is_decoupled: bool

    @classmethod
    def of(cls, name: str, inputs: Iterable[str], max_batch_size: int, *, is_decoupled: bool) -> "DeclaredInputs":
        """Raise `BenchError` without an input for prompts."""
        declared = cls(frozenset(inputs), max_batch_size > 0, is_decoupled)
        if not declared.inputs & {"input_ids", "text_input"}:
            raise BenchError(f"model {name!r} has neither input_ids nor text_input: it takes no prompt")
        return declared

    def prompt(self, input_ids: Sequence[int]) -> tuple[str, list[int] | str]:
        return ("input_ids", list(input_ids)) if "input_ids" in self.inputs else ("text_input", words(input_ids))

    def tensors(
        self, offered: OfferedRequest, input_ids: Sequence[int], *, with_ids: bool = False
    ) -> Iterator[tuple[str, str, Sequence[Any]]]:
        """Yield (name, type, values) of the declared inputs for a greedy request that ignores end-of-sequence."""
        name, prompt = self.prompt(input_ids)
        yield (name, "BYTES", [prompt]) if isinstance(prompt, str) else (name, "INT32", prompt)
        flags = dict.fromkeys(_FLAGS, True)
        if "sampling_parameters" in self.inputs:
            yield "sampling_parameters", "BYTES", [json.dumps(offered.sampling)]
        else:
            yield "max_tokens", "INT32", [offered.num_output_tokens]
            flags["ignore_eos"] = True
        flags |= (
            {"stream": self.is_decoupled, "return_token_ids": True} if with_ids else {"stream": self.is_decoupled}
        )
        yield from ((flag, "BOOL", [value]) for flag, value in flags.items() if flag in self.inputs)

    def sizes(self, values: Sequence[Any]) -> list[int]:
        return [1, len(values)] if self.is_batched else [len(values)]
