from __future__ import annotations

from tidewheel.frontend.prompt_workers import Answer, Job, JobRunner, PromptWorkers, TokenizerFolder


class LocalEncoder(PromptWorkers):
    """Encoder in this process."""

    def __init__(self, folder: TokenizerFolder) -> None:
        self._runner = JobRunner(folder)

    def run(self, job: Job) -> Answer:
        return self._runner.run(job)

    def close(self) -> None: ...
