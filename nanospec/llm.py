"""The offline API: text in, text out.

    llm = LLM("smollm2-135m-instruct", spec=SpecConfig(num_speculative_tokens="auto"))
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=128))[0].text

Calls may come from several threads at once: all requests run as one batch (`sharing.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .config import EngineConfig, SamplingParams, SpecConfig, as_token_id
from .device import current, resolve_device
from .drafters.base import Target
from .drafters.loading import load_drafter
from .engine import Engine
from .models.config import ModelConfig
from .models.hub import resolve_model
from .models.weights import load_model, resolve_dtype
from .outputs import Completion, RequestOutput
from .request import Piece, Request
from .sharing import SharedEngine
from .text.tokenizer import Tokenizer
from .threads import use_threads
from .worker import Worker

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model ready to generate.

    Args:
        model: a folder, a name under `weights/`, or a Hugging Face hub id.
        spec: speculation; the default is n-gram lookup with an automatic number of drafts.
        options: the fields of `EngineConfig`; an unknown one is a TypeError.
    """

    def __init__(self, model: str | Path, *, spec: SpecConfig | None = None, **options: Any) -> None:
        self.config = EngineConfig(spec=spec or SpecConfig(), **options)
        folder = resolve_model(model)
        device = resolve_device(self.config.device)
        if device.type == "cpu":
            use_threads(self.config.threads)
        tokenizer = Tokenizer(folder)
        dtype = resolve_dtype(self.config.dtype, ModelConfig.from_path(folder), device)
        with current(device):
            target = load_model(folder, dtype, device, self.config.max_model_len)
            drafter = load_drafter(self.config.spec, Target(target, folder, tokenizer))
        self.engine = Engine(self.config, Worker(self.config, target, drafter), tokenizer)
        self._shared = SharedEngine(self.engine)
        self._groups = itertools.count()

    @property
    def tokenizer(self) -> Tokenizer:
        assert self.engine.tokenizer is not None
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_finish: Callable[[int, RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, each a text or a list of token ids, all at once, with those of other threads.

        Args:
            prompts: one or several.
            params: for all prompts, or one for each.
            on_finish: called with (index, output) as soon as a prompt's outputs are complete; it may
                call the model.

        Raises:
            ValueError: a prompt or its parameters cannot run. Nothing is run then.
        """
        groups = self._submit(_as_list(prompts), params)
        outputs: list[RequestOutput | None] = [None] * len(groups)
        pending = {r: i for i, (_, group) in enumerate(groups) for r in group}
        missing = [len(group) for _, group in groups]
        try:
            while pending:
                for request in self._shared.wait(pending):
                    i = pending.pop(request)
                    missing[i] -= 1
                    if missing[i] == 0:
                        text, group = groups[i]
                        done = [Completion.of(r) for r in group]
                        outputs[i] = output = RequestOutput(text, group[0].prompt_ids, done)
                        if on_finish is not None:
                            on_finish(i, output)
        finally:
            self._shared.abort(pending)
        return [output for output in outputs if output is not None]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, a list of {"role", "content"}, or several."""
        several = [messages] if messages and isinstance(messages[0], Mapping) else messages
        return self.generate([self.chat_prompt(m, **template_options) for m in several], params)  # type: ignore[arg-type]

    def chat_prompt(self, messages: Messages, **template_options: Any) -> list[int]:
        """The token ids of a conversation, up to where the answer begins."""
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, **template_options)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        on_finish: Callable[[RequestOutput], None] | None = None,
    ) -> Iterator[str]:
        """Complete one prompt, yielding its text as it appears. Ending the iteration early aborts it.

        Several streams may be read, in turn or by several threads; their requests run as one batch.
        """
        for pieces in self.stream_pieces(prompt, params, on_finish):
            if text := "".join(piece.text for piece in pieces):
                yield text

    def stream_pieces(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        on_finish: Callable[[RequestOutput], None] | None = None,
    ) -> Iterator[list[Piece]]:
        """As `stream`, but yields the tokens of each step with where they were copied from."""
        if params is not None and params.n != 1:
            raise ValueError(f"n={params.n} outputs cannot be streamed as one; use n=1 or generate().")
        [(text, [request])] = self._submit([prompt], params)
        ended = False
        try:
            while not ended:
                with self._shared.turn():
                    pieces = request.new_pieces()  # of steps that others ran
                    if not pieces and not request.is_finished:
                        self._shared.step()
                        pieces = request.new_pieces()
                    ended = request.is_finished
                yield pieces
        finally:
            self._shared.abort([request])
        if on_finish is not None:
            on_finish(RequestOutput(text, request.prompt_ids, [Completion.of(request)]))

    def metrics(self) -> dict[str, object]:
        """Engine-wide counters, seconds per stage, and the measured times of steps by their size."""
        with self._shared.turn():
            return self.engine.report()

    def _submit(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[tuple[str | None, list[Request]]]:
        """Check everything, then queue everything: (text, its n requests) per prompt."""
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts need as many SamplingParams, not {len(params)}.")
        if wrong := [asked for asked in params if not isinstance(asked, SamplingParams)]:
            raise ValueError(f"{wrong[0]!r} must be SamplingParams, as in SamplingParams(temperature=0).")
        ready = []
        for prompt, asked in zip(prompts, params, strict=True):
            text = prompt if isinstance(prompt, str) else None
            ids: Any = list(map(as_token_id, prompt)) if text is None else self.tokenizer.encode(text)
            self.engine.check(ids, asked)
            ready.append((text, ids, asked))
        groups = []
        with self._shared.turn():
            for text, ids, asked in ready:
                # Without prefix caching the outputs of one prompt still share its blocks.
                salt = b"" if self.config.enable_prefix_caching else f"group-{next(self._groups)}".encode()
                groups.append((text, [self.engine.add(ids, asked, i, salt) for i in range(asked.n)]))
        return groups


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt, text or ids, as a list of one."""
    if isinstance(prompts, str) or (len(prompts) and not isinstance(prompts[0], Iterable)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
