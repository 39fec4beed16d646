"""The offline API: text in, text out.

    llm = LLM("smollm2-135m-instruct", spec=SpecConfig(num_speculative_tokens="auto"))
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=128))[0].text
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .config import EngineConfig, SamplingParams, SpecConfig
from .drafters.base import Target
from .drafters.loading import load_drafter
from .engine import Engine
from .metrics import SpecStats
from .models.config import ModelConfig
from .models.hub import resolve_model
from .models.weights import load_model, resolve_dtype
from .request import Logprob, Piece, Request, Status
from .text.tokenizer import Tokenizer
from .worker import Worker

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


@dataclass
class Completion:
    """One output of a prompt.

    Attributes:
        text, token_ids: the output. A stop string is not part of the text; the token that completed
            it, or a stop token, is part of token_ids.
        finish_reason: "stop", "length" or "abort".
        error: why it was aborted, if the engine did it.
        logprobs: per output token, {id: Logprob(logprob, rank)} of it and the likeliest, if asked for.
        pieces: the output token by token, showing which were drafted and from where they were copied.
        stats: what speculation did for it.
        seconds, first_token_seconds: from its arrival to its end, and to its first token.
        num_cached_tokens, num_preemptions: what the cache and the scheduler did with it.
        simulated: what made the output up, in a benchmark; None for output of the model.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    error: str | None
    logprobs: list[dict[int, Logprob]] | None
    pieces: list[Piece]
    stats: SpecStats
    seconds: float
    first_token_seconds: float
    num_cached_tokens: int
    num_preemptions: int
    simulated: str | None = None

    @classmethod
    def of(cls, request: Request) -> Completion:
        """The result of a finished request."""
        end = request.finish_time or time.perf_counter()
        texts = request.token_texts or [""] * len(request.output_ids)
        return cls(
            text=request.text,
            token_ids=request.output_ids,
            finish_reason=request.finish_reason or "abort",
            error=request.error,
            logprobs=request.logprobs if request.params.logprobs is not None else None,
            pieces=[Piece(*pair) for pair in zip(texts, request.draft_sources, strict=True)],
            stats=request.stats,
            seconds=end - request.arrival_time,
            first_token_seconds=(request.first_token_time or end) - request.arrival_time,
            num_cached_tokens=request.num_cached_tokens,
            num_preemptions=request.num_preemptions,
            simulated=request.simulated,
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything but the pieces, ready for JSON."""
        logprobs = None
        if self.logprobs is not None:
            logprobs = [{str(t): list(value) for t, value in at.items()} for at in self.logprobs]
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            **({"error": self.error} if self.error else {}),
            **({"simulated": self.simulated} if self.simulated else {}),
            **({"logprobs": logprobs} if logprobs is not None else {}),
            "stats": {
                **self.stats.to_dict(),
                "seconds": round(self.seconds, 6),
                "first_token_seconds": round(self.first_token_seconds, 6),
                "num_cached_tokens": self.num_cached_tokens,
                "num_preemptions": self.num_preemptions,
            },
        }


@dataclass
class RequestOutput:
    """The `n` outputs of one prompt; `text`, `token_ids` and so on are the first one's."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in Completion.__dataclass_fields__:
            raise AttributeError(f"RequestOutput has no attribute {name!r}")
        return getattr(self.outputs[0], name)


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
        tokenizer = Tokenizer(folder)
        dtype = resolve_dtype(self.config.dtype, ModelConfig.from_path(folder), device)
        target = load_model(folder, dtype, device)
        drafter = load_drafter(self.config.spec, Target(target, folder, tokenizer))
        self.engine = Engine(self.config, Worker(self.config, target, drafter), tokenizer)
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
        """Complete prompts, each a text or a list of token ids, all at once.

        Args:
            prompts: one or several.
            params: for all prompts, or one for each.
            on_finish: called with (index, output) as soon as a prompt's outputs are complete.

        Raises:
            ValueError: a prompt or its parameters cannot run. Nothing is run then.
        """
        groups = self._submit(_as_list(prompts), params)
        outputs: list[RequestOutput | None] = [None] * len(groups)
        pending = {r: i for i, (_, group) in enumerate(groups) for r in group}
        missing = [len(group) for _, group in groups]
        try:
            while pending:
                self._step()
                # By status, since `on_finish` may have run steps of its own.
                for request in [r for r in pending if r.status is Status.FINISHED]:
                    i = pending.pop(request)
                    missing[i] -= 1
                    if missing[i] == 0:
                        text, group = groups[i]
                        outputs[i] = RequestOutput(
                            text, group[0].prompt_ids, [Completion.of(r) for r in group]
                        )
                        if on_finish is not None:
                            on_finish(i, outputs[i])  # type: ignore[arg-type]
        finally:
            for _, group in groups:
                for request in group:
                    self.engine.abort(request)  # nothing if it is finished
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

        Several streams may be read in turn; their requests run as one batch.
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
        try:
            while request.status is not Status.FINISHED:
                self._step()
                yield request.new_pieces()
            if pieces := request.new_pieces():  # of steps that another stream ran
                yield pieces
        finally:
            self.engine.abort(request)  # nothing if it is finished
        if on_finish is not None:
            on_finish(RequestOutput(text, request.prompt_ids, [Completion.of(request)]))

    def metrics(self) -> dict[str, object]:
        """Engine-wide counters, seconds per stage, and the measured times of steps by their size."""
        return self.engine.report()

    def _step(self) -> list[Request]:
        """One engine step. What interrupts it, Ctrl-C included, ends all requests: a step that was cut
        short leaves the device in an unknown state."""
        try:
            return self.engine.step()
        except BaseException:
            self.engine.abort_all()
            raise

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
            ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
            self.engine.check(ids, asked)
            ready.append((prompt if isinstance(prompt, str) else None, ids, asked))
        groups = []
        for text, ids, asked in ready:
            # Without prefix caching the outputs of one prompt still share its blocks.
            salt = b"" if self.config.enable_prefix_caching else f"group-{next(self._groups)}".encode()
            groups.append((text, [self.engine.add(ids, asked, i, salt) for i in range(asked.n)]))
        return groups


def resolve_device(name: str) -> torch.device:
    """"auto" is the first GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(str(name))  # to a build for GPUs the number 3 would mean cuda:3
    except RuntimeError:
        raise ValueError(f"device={name!r} is no device; use 'auto', 'cpu' or 'cuda'.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={name!r} needs a GPU that this machine does not have; use 'cpu'.")
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"device={name!r} is not supported; use 'auto', 'cpu' or 'cuda'.")
    return device


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt, text or ids, as a list of one."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
