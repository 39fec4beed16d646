"""The offline API: text in, text out.

    llm = LLM("smollm2-135m-instruct", spec=SpecConfig(num_speculative_tokens="auto"))
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=128))[0].text

Several threads may call an `LLM` at once; their requests are batched together (`engine/locking.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .config import EngineConfig, SamplingParams, SpecConfig
from .drafters.methods import Drafters, resolve_drafters
from .engine.engine import Engine
from .engine.locking import SharedEngine
from .engine.request import Request, make_output, params_per_prompt
from .extras.loading import load_worker
from .models.folders import resolve_model
from .models.generation_config import default_params
from .outputs import Piece, RequestOutput
from .text.chat import Messages, Prompt, as_list, check_conversation, conversations, text_and_ids
from .text.tokenizer import Tokenizer


class LLM:
    """An LLM for generating text from prompts.

    Args:
        model: a local folder or GGUF file, a name under `weights/`, or a Hugging Face Hub id.
        spec: speculative decoding settings. Defaults to n-gram lookup with an automatic number of drafts.
        drafter: a `Drafter` to use instead of `spec.method`, or a list such as ["ngram", drafter], in which
            each drafter proposes for the rows left without drafts. A drafter serves one `LLM` at a time.
        options: fields of `EngineConfig`, or vLLM's `speculative_config`. Unknown ones raise TypeError.

    Attributes:
        default_params: sampling parameters of requests that set none (`models/generation_config.py`).
    """

    def __init__(
        self,
        model: str | Path,
        *,
        spec: SpecConfig | None = None,
        drafter: Drafters | None = None,
        **options: Any,
    ) -> None:
        self.config = EngineConfig.from_options(spec, options)
        resolve_drafters(self.config.spec, drafter)  # report errors before the model is loaded
        folder = resolve_model(model)
        self.default_params = default_params(folder)
        self.tokenizer = Tokenizer(folder)
        worker = load_worker(self.config, folder, drafter, self.tokenizer)
        try:
            self.engine = Engine(self.config, worker, self.tokenizer)
        except BaseException:
            worker.close()
            raise
        self.shared = SharedEngine(self.engine)
        self._closed = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_finish: Callable[[int, RequestOutput], None] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Generate a completion for each prompt, in the same order. Prompts are batched (continuously) with
        the requests of other threads.

        Args:
            prompts: one prompt or a sequence of them. A prompt is a string, a list, array or tensor of
                token ids, {"prompt": text} or {"prompt_token_ids": ids}.
            sampling_params: parameters for all prompts, or a sequence with one for each prompt. Defaults to
                `default_params`.
            on_finish: called with (index, output) when all outputs of a prompt are complete. It may call
                this `LLM`.
            use_tqdm: show a progress bar on standard error.

        Raises:
            ValueError: a prompt or its parameters are invalid; none of the prompts has been run.
        """
        outputs: dict[int, RequestOutput] = {}
        with self._running(as_list(prompts), sampling_params) as groups:
            pending = {request: i for i, (_, group) in enumerate(groups) for request in group}
            with tqdm(total=len(groups), unit="prompt", disable=not use_tqdm) as bar:
                while pending:
                    for request in self.shared.wait(pending):  # runs a step if none has finished
                        i = pending.pop(request)
                        if pending.keys().isdisjoint(groups[i][1]):
                            outputs[i] = make_output(*groups[i])
                            bar.update()
                            if on_finish is not None:
                                on_finish(i, outputs[i])
        return [outputs[i] for i in range(len(groups))]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, a list of {"role", "content"} messages, or several. `template_options` are
        for the chat template: `chat_template`, `add_generation_prompt`, `tools` and its own variables. The
        output continues a final message of the assistant, or any with `continue_final_message=True`."""
        several = conversations(messages)
        prompts = [self.chat_prompt(conversation, **template_options) for conversation in several]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def chat_prompt(self, messages: Messages, **template_options: Any) -> list[int]:
        """Return the prompt of a conversation as token ids, rendered by the chat template."""
        check_conversation(messages)
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, **template_options)
        return self.tokenizer.encode_prompt(text, self.engine.max_model_len, add_special_tokens=False)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        on_finish: Callable[[RequestOutput], None] | None = None,
    ) -> Iterator[str]:
        """Generate a completion for one prompt and yield its text as it is produced. Closing the iterator
        aborts the request. Streams may run concurrently, in one thread or in several, and are batched. Calls
        `on_finish` with the final output. The first `next()` raises ValueError for an invalid request."""
        for pieces in self.stream_pieces(prompt, sampling_params, on_finish):
            if text := "".join(piece.text for piece in pieces):
                yield text

    def stream_pieces(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        on_finish: Callable[[RequestOutput], None] | None = None,
    ) -> Iterator[list[Piece]]:
        """Like `stream`, but yield lists, some of them empty, with a `Piece` (text, source) per token."""
        check_single(sampling_params)
        with self._running([prompt], sampling_params) as groups:
            [(text, [request])] = groups
            ended = False
            while not ended:
                with self.shared.turn():
                    pieces = request.new_pieces()  # from steps that other threads ran
                    if not pieces and not request.is_finished:
                        self.shared.step()
                        pieces = request.new_pieces()
                    ended = request.is_finished
                yield pieces
        if on_finish is not None:
            on_finish(make_output(text, [request]))

    def close(self) -> None:
        """Abort running requests and shut down the processes of a tensor-parallel model. Later requests raise
        RuntimeError."""
        with self.shared.turn() as engine:
            self._closed = True
            engine.abort_all("The LLM was closed.")
            engine.worker.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def metrics(self) -> dict[str, object]:
        """Return engine-wide counters, seconds per stage, memory use, and the measured step times."""
        return self.shared.report()

    def check_prompts(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[tuple[str | None, list[int], SamplingParams]]:
        """Return the text, token ids and parameters of each prompt. Raises ValueError if one is invalid."""
        several = params_per_prompt(self.default_params if params is None else params, len(prompts))
        distinct = {id(each): each for each in several}
        ready = {key: self.engine.check_params(each) for key, each in distinct.items()}
        checked = []
        for prompt, sampling in zip(prompts, several, strict=True):
            text, ids = text_and_ids(prompt, self.engine.max_model_len, self.tokenizer.encode_prompt)
            self.engine.limits.check_prompt(ids)
            checked.append((text, ids, ready[id(sampling)]))
        return checked

    @contextmanager
    def _running(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> Iterator[list[tuple[str | None, list[Request]]]]:
        """Check all prompts, then queue their requests; yield the text and the n requests of each prompt.
        Abort unfinished requests at the end of the `with` block."""
        checked = self.check_prompts(prompts, params)
        requests: list[Request] = []  # filled inside `abort_on_exit`, since Ctrl-C may arrive at any time
        with self.shared.abort_on_exit(requests):
            with self.shared.turn() as engine:
                if self._closed:
                    raise RuntimeError("This LLM is closed; create a new one.")
                groups = [
                    (text, [engine.new(ids, sampling, i) for i in range(sampling.n)])
                    for text, ids, sampling in checked
                ]
                requests += (request for _, group in groups for request in group)
                for request in requests:
                    engine.scheduler.add(request)
            yield groups


def check_single(params: SamplingParams | None) -> None:
    """Raise ValueError for parameters of several outputs, which cannot be streamed."""
    if isinstance(params, SamplingParams) and params.n != 1:
        raise ValueError(f"n={params.n} is not supported by stream(); use n=1 or generate().")
