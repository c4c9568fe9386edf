from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from tidewheel.batch import Int32Array
from tidewheel.errors import ConfigError, InvalidRequest
from tidewheel.frontend.output import Generation
from tidewheel.regular_files import read_object
from tidewheel.sampling import SamplingParams


class SpeechRules(msgspec.Struct, frozen=True, kw_only=True):
    """Beginning of a Whisper model's answers, and tokens that never follow, by the names of the model's files."""

    decoder_start_token_id: int
    lang_to_id: Mapping[str, int] = {}  # by "<|en|>"; empty: the model knows English alone
    task_to_id: Mapping[str, int] = {}
    no_timestamps_token_id: int | None = None
    suppress_tokens: tuple[int, ...] | None = ()
    begin_suppress_tokens: tuple[int, ...] | None = ()

    @classmethod
    def load(cls, folder: Path) -> SpeechRules:
        """Read `config.json` and `generation_config.json`. Raise `ConfigError`."""
        names = [folder / "config.json", folder / "generation_config.json"]
        fields = {key: value for path in names for key, value in read_object(path).items() if value is not None}
        try:
            return msgspec.convert(fields, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{names[1]}: {error}; a speech model needs its rules") from None

    def question(self, given: Generation) -> Generation:
        """Return the request for a window's likeliest language after `decoder_start_token_id`, as in transformers."""
        prompt_ids = np.array([self.decoder_start_token_id], np.int32)
        sampling = SamplingParams(temperature=0.0, max_tokens=1, allowed_token_ids=tuple(self.lang_to_id.values()))
        options = msgspec.structs.replace(given.options, n=1)
        return given._replace(prompt_ids=prompt_ids, sampling=sampling, options=options, is_scoring=False)

    def in_language(self, given: Generation, token_id: int) -> Generation:
        language = next(name for name, known in self.lang_to_id.items() if known == token_id)
        prompt_ids = np.array([given.prompt_ids[0], token_id, *given.prompt_ids[2:]], np.int32)
        return given._replace(prompt_ids=prompt_ids, language=language.strip("<|>"))

    def prompt(self, language: str, *, translate: bool) -> Int32Array:
        """Return the tokens before the text. Raise `InvalidRequest`."""
        ids, known = [self.decoder_start_token_id], sorted(name.strip("<|>") for name in self.lang_to_id)
        if known:
            task = "translate" if translate else "transcribe"
            if language not in known or task not in self.task_to_id:
                raise InvalidRequest(
                    f"language is {language[:40]!r} and the task {task}: give one of the model's languages in "
                    f"language, such as {', '.join(known[:5])}; without translate, if it has no such task"
                )
            ids += [self.lang_to_id[f"<|{language}|>"], self.task_to_id[task]]
        elif language not in ("", "en") or translate:
            raise InvalidRequest("language or translate is set: this model writes English alone; leave them out")
        return np.array([*ids, *filter(None, [self.no_timestamps_token_id])], np.int32)

    def forbidden(self, prompt_ids: Int32Array) -> tuple[tuple[int, ...], ...]:
        """Return forbidden token sequences: of one token, or of the prompt's last and a first one of the text."""
        if self.lang_to_id and len(prompt_ids) == 1:  # of `question`
            return ()
        after = int(prompt_ids[-1])
        first = [(after, token_id) for token_id in self.begin_suppress_tokens or ()]
        return (*((token_id,) for token_id in self.suppress_tokens or ()), *first)
