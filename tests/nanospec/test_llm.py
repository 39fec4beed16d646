"""The `LLM` class: stop strings, streams, chat, errors and interruptions.

Most tests run a tiny checkpoint that spells the alphabet: "c" follows "ab", and EOS follows the last
letter. Prompts contain the alphabet, so that long drafts are accepted. One token is "!" with the first
half of "é", the next one the other half. The last tests run SmolLM2.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from itertools import product, zip_longest
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers

from nanospec import LLM, RequestOutput, SamplingParams, SimpleDrafter, SpecConfig
from nanospec.device.worker import Worker
from nanospec.drafters import Drafter, Target
from nanospec.drafters.draft_model import ModelDrafter
from nanospec.drafters.medusa import Heads, MedusaDrafter
from nanospec.engine.engine import Engine
from nanospec.engine.locking import SharedEngine
from nanospec.extras.tracing.recorder import find_recorder
from nanospec.models import default_heads
from nanospec.models.weights import fast_in_bfloat16
from nanospec.outputs import SpecStats
from tests.drive import MODES, assert_idle, cycle_weights, drafters_of

EOS = "<e>"
TOKENS = [*"abcdefghijklmnopqrstuvwxyz", "Ġ", ".", "!Ã", "©", EOS, "!", "Ã"]  # é is the bytes Ã ©
ALPHABET = "abcdefghijklmnopqrstuvwxyz .!é"  # the text of all tokens before EOS
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of `cycle_model` with a byte-level tokenizer that has one merge."""
    folder = tmp_path_factory.mktemp("alphabet")
    config, weights = cycle_weights(len(TOKENS))
    described = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": False,
        "eos_token_id": TOKENS.index(EOS),
    }
    (folder / "config.json").write_text(json.dumps(described))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    save_file(weights, folder / "model.safetensors")
    backend = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(TOKENS)}, [("!", "Ã")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([EOS])
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def llms(folder: Path) -> dict[Any, LLM]:
    return {k: make(folder, k) for k in (0, 1, 5, "auto")}


@pytest.fixture
def llm(llms: dict[Any, LLM]) -> Iterator[LLM]:
    """An `LLM` with 5 drafts per step, which the test must leave idle."""
    yield llms[5]
    check_idle(llms[5])


@pytest.fixture(params=[0, 1, 5, "auto"], ids=lambda k: f"K{k}")
def any_llm(request: pytest.FixtureRequest, llms: dict[Any, LLM]) -> Iterator[LLM]:
    yield llms[request.param]
    check_idle(llms[request.param])


def make(folder: Path, k: Any = 5, **options: Any) -> LLM:
    spec = SpecConfig(num_speculative_tokens=k)
    options = {"dtype": "float32", "max_num_seqs": 4, "max_model_len": 128, **options}
    return LLM(folder, spec=spec, **options)


def check_idle(llm: LLM) -> None:
    with llm.shared.turn() as engine:
        assert_idle(engine)


def after(text: str) -> str:
    """Return a prompt that contains the alphabet and ends with `text`."""
    return ALPHABET + EOS + text


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 60, **options})


ENDS: list[tuple[str, dict[str, Any], str, str | int | None]] = [
    ("abcd", {}, ALPHABET[4:], None),  # EOS is not part of the text
    ("abcd", {"ignore_eos": True, "max_tokens": 28}, ALPHABET[4:] + "!", None),
    ("yz ", {"max_tokens": 2}, ".!\ufffd", None),  # inside a character
    ("abcd", {"stop": "f"}, "e", "f"),
    ("abcd", {"stop": "e"}, "", "e"),
    ("abcd", {"stop": ["never", "hij"]}, "efg", "hij"),
    ("abcd", {"stop": ["lmn", "hijk", "ijk"]}, "efg", "hijk"),  # the first one completed
    ("abcd", {"stop": ["lmnopq", "o"]}, "efghijklmn", "o"),
    ("abcd", {"stop": "z .!é"}, "efghijklmnopqrstuvwxy", "z .!é"),
    ("abcd", {"stop": ".!"}, "efghijklmnopqrstuvwxyz ", ".!"),  # its token starts another character
    ("abcd", {"stop": "é"}, "efghijklmnopqrstuvwxyz .!", "é"),
    ("abcd", {"stop": "hiX"}, ALPHABET[4:], None),
    ("abcd", {"stop": "abcdef"}, ALPHABET[4:], None),  # starts in the prompt, which is not searched
    ("abcd", {"stop": ["f", "pqrstu", "x"], "min_tokens": 5}, "efghijklmno", "pqrstu"),
    ("abcd", {"stop": ["e", "nop"], "min_tokens": 1}, "", "e"),
    ("abcd", {"stop": ["e", "nop"], "min_tokens": 2}, "efghijklm", "nop"),
    ("abcd", {"stop": "efgh", "min_tokens": 3}, "", "efgh"),  # may begin before
    ("abcd", {"stop": ["nop"], "stop_token_ids": [7]}, "efg", 7),
]


def test_ends_of_text(any_llm: LLM) -> None:
    """Stop strings cut the text, tokens, log-probabilities, pieces and streams in the same place."""
    params = [greedy(**options, logprobs=0) for _, options, _, _ in ENDS]
    outputs = any_llm.generate([after(prompt) for prompt, *_ in ENDS], params)
    for output, asked, (prompt, options, text, stop) in zip(outputs, params, ENDS, strict=True):
        assert output.text == text, (prompt, options)
        assert "".join(piece.text for piece in output.pieces) == text.removesuffix("\ufffd")
        assert (output.prompt, output.stop_reason) == (after(prompt), stop)
        assert output.finish_reason == ("length" if len(output.token_ids) == asked.max_tokens else "stop")
        assert len(output.logprobs) == len(output.token_ids) == len(output.pieces) == output.stats.num_tokens
        whole = any_llm.tokenizer.decode(output.token_ids)
        assert whole.startswith(text)
        if isinstance(stop, str):  # the last token completes it
            assert stop in whole
            assert stop not in any_llm.tokenizer.decode(output.token_ids[:-1])
        sent, ended = "", list[RequestOutput]()
        for chunk in any_llm.stream(after(prompt), asked, ended.append):
            assert chunk
            sent += chunk
            assert text.startswith(sent), (prompt, options)
        assert sent == ended[0].text == text
    assert outputs[0].token_ids == list(range(4, TOKENS.index(EOS) + 1))


def test_pieces_have_source(llm: LLM) -> None:
    tokens = llm.tokenizer.encode(after("abcd"))
    pieces = [p for step in llm.stream_pieces(after("abcd"), greedy(max_tokens=12)) for p in step]
    assert "".join(piece.text for piece in pieces) == "efghijklmnop"
    assert [p.source >= 0 for p in pieces] == [True] * 5 + [False] + [True] * 5 + [False]
    for piece in pieces:
        if piece.source >= 0:
            assert llm.tokenizer.decode([tokens[piece.source]]) == piece.text


def test_interleaved_streams(any_llm: LLM) -> None:
    """Also text a request produced while another stream was read."""
    prompts = [after("ab"), after("abcdefgh"), after("xyz .")]
    streams = [any_llm.stream(prompt, greedy()) for prompt in prompts]
    texts = ["", "", ""]
    for chunks in zip_longest(*streams, fillvalue=""):
        for i, chunk in enumerate(chunks):
            texts[i] += chunk
    assert texts == [ALPHABET[2:], ALPHABET[8:], ALPHABET[28:]]
    slow, fast = any_llm.stream(after("ab"), greedy()), any_llm.stream(after("b"), greedy())
    begin = next(slow)
    assert "".join(fast) == ALPHABET[2:]
    assert begin + "".join(slow) == ALPHABET[2:]


def test_abandoned_and_invalid_streams_leave_nothing(folder: Path) -> None:
    llm = make(folder)
    for chunk in llm.stream(after("ab"), greedy()):
        assert chunk
        break
    left = llm.stream(after("ab"), greedy())
    next(left)
    del left
    assert llm.metrics()["num_aborted"] == 2
    with pytest.raises(ValueError, match=r"n=2 is not supported by stream"):
        next(llm.stream("a", SamplingParams(n=2)))
    check_idle(llm)


def test_outputs_in_prompt_order_with_callbacks_as_they_finish(any_llm: LLM) -> None:
    ended: list[tuple[int, str]] = []
    inner: list[str] = []

    def report(index: int, output: RequestOutput) -> None:
        ended.append((index, output.text))
        if index == 1:  # the first one to finish
            inner.append(any_llm.generate(after("ab"), greedy())[0].text)

    prompts: list[str | list[int]] = [after("a"), any_llm.tokenizer.encode(after("ab")), after("abc")]
    params = [greedy(max_tokens=20), greedy(max_tokens=2), greedy(stop="fg", n=2)]
    before: Any = any_llm.metrics()["num_finished"]
    outputs = any_llm.generate(prompts, params, report)
    assert [output.text for output in outputs] == [ALPHABET[1:21], "cd", "de"]
    assert [len(output.outputs) for output in outputs] == [1, 1, 2]
    assert [output.prompt for output in outputs] == [after("a"), None, after("abc")]
    assert sorted(ended) == [(i, output.text) for i, output in enumerate(outputs)]
    assert (ended[0][0], inner) == (1, [ALPHABET[2:]])
    assert any_llm.metrics()["num_finished"] == before + 5


def test_failing_callback_ends_batch(llm: LLM) -> None:
    def report(index: int, output: RequestOutput) -> None:
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        llm.generate([after("a"), after("b")], [greedy(max_tokens=1), greedy()], report)


def test_samples_differ_and_are_reproducible(folder: Path) -> None:
    params = SamplingParams(n=3, temperature=20, seed=1, max_tokens=20)
    for caching in (True, False):
        plain, spec = (
            [
                output.token_ids
                for output in make(folder, k, enable_prefix_caching=caching)
                .generate(after("ab"), params)[0]
                .outputs
            ]
            for k in (0, 5)
        )
        assert plain == spec
        assert len({tuple(ids) for ids in plain}) == 3


def test_chat_with_one_or_several_conversations(llm: LLM) -> None:
    def user(text: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": text}]

    assert llm.chat(user(after("ab")), greedy(max_tokens=3))[0].text == "cde"
    both = llm.chat([user("a"), [*user("x"), *user("yz")]], greedy(max_tokens=1))
    assert [output.text for output in both] == ["b", " "]
    kwargs = {"add_generation_prompt": False, "chat_template": "{{ messages[0].content }}c"}
    assert llm.chat(user("ab"), greedy(max_tokens=3), use_tqdm=False, **kwargs)[0].text == "def"


def test_vllm_compatible_calls_and_outputs(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    params = greedy(max_tokens=3, logprobs=0, n=2)
    prompts: list[dict[str, Any]] = [{"prompt": "ab"}, {"prompt_token_ids": [0, 1]}]
    prompts += [{"prompt": "x", "prompt_token_ids": [0, 1]}]
    outputs = llm.generate(prompts, sampling_params=params, use_tqdm=True)
    assert "3/3" in capsys.readouterr().err
    assert [output.prompt for output in outputs] == ["ab", None, "x"]
    assert [output.text for output in outputs] == ["cde"] * 3
    assert len({output.request_id for output in outputs}) == 3
    [output] = llm.generate({"prompt": "ab"}, sampling_params=params)
    first = output.outputs[0]
    assert [completion.index for completion in output.outputs] == [0, 1]
    assert output.token_ids == first.token_ids == [2, 3, 4]
    assert output.seconds >= output.first_token_seconds > 0
    own = [at[token] for token, at in zip(output.token_ids, output.logprobs)]
    assert output.cumulative_logprob == first.cumulative_logprob == sum(each.logprob for each in own)
    assert [each.decoded_token for each in own] == ["c", "d", "e"]
    result = json.loads(json.dumps(first.to_dict()))
    assert result.pop("stats").keys() > {
        "seconds",
        "first_token_seconds",
        "num_cached_tokens",
        "num_preemptions",
    }
    logprobs = [{str(token): [each.logprob, 1]} for token, each in zip(output.token_ids, own)]
    expected = {"text": "cde", "token_ids": [2, 3, 4], "finish_reason": "length", "logprobs": logprobs}
    assert result == expected
    with pytest.raises(AttributeError, match="RequestOutput has no attribute 'txt'"):
        _ = output.txt
    assert llm.generate("ab", greedy(max_tokens=1))[0].cumulative_logprob is None


BAD_CALLS: list[tuple[Any, Any, str]] = [
    (["ab", ""], None, "The prompt is empty"),
    (["ab", "ab" * 64], None, "The prompt has 128 tokens, but max_model_len=128 must hold it"),
    (range(10**9), None, "The prompt has 1000000000 tokens, but max_model_len=128 must hold it"),
    ("a" * 10**6, None, "The prompt has 1000000 characters, too many for max_model_len=128."),
    ([[1], [2, 99]], None, "The prompt contains token id 99; ids are integers from 0 to 32."),
    ([1.5], None, "The prompt contains token id 1.5"),
    (np.array([0.5]), None, "The prompt contains token id np.float64(0.5)"),
    (["ab", "cd"], [greedy()], "sampling_params has 1 entries for 2 prompts"),
    ("ab", [{"temperature": 0}], "must be of type SamplingParams, got {'temperature': 0}"),
    (["ab"], greedy(stop_token_ids=[77]), "stop_token_ids contains token id 77"),
    (None, None, "prompt=None must be a string, token ids, or a dict with a string 'prompt' or"),
    ({"prompt": None}, None, "prompt={'prompt': None} must be a string, token ids, or"),
    ({"prompt": "a", "multi_modal_data": 1}, None, "unknown key 'multi_modal_data' in a"),
    ({1, 2}, None, "prompts={1, 2} must be a string, token ids, or a list of these."),
    (b"ab", None, "prompt=b'ab' must be a string, token ids, or"),
    (["ab", b"ab"], None, "prompt=b'ab' must be a string, token ids, or"),
    ({"prompt_token_ids": "ab"}, None, "must be a string, token ids, or a dict with"),
    (["ab", 5], None, "prompt=5 must be a string, token ids, or"),
    (torch.tensor(5), None, "must be a string, token ids, or a dict with"),
]


def test_invalid_call_has_no_side_effects(llm: LLM) -> None:
    before = llm.metrics()
    for prompts, params, sentence in BAD_CALLS:
        with pytest.raises(ValueError) as caught:
            llm.generate(prompts, params)
        assert sentence in str(caught.value)
    assert llm.metrics() == before
    check_idle(llm)
    assert llm.generate([]) == []
    assert llm.generate("ab", greedy(max_tokens=2))[0].text == "cd"


@pytest.mark.parametrize("mode", MODES.values(), ids=list(MODES))
@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("fails", [False, True], ids=["ctrl-c", "failure"])
def test_llm_is_usable_after_ctrl_c_and_failed_step(
    folder: Path, step: int, mode: dict[str, Any], fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C takes effect after the step and ends the call's requests; a failed step ends all requests."""
    llm = make(folder, **mode)
    forward, calls = llm.engine.worker.model.forward, 0

    def interrupted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == step and fails:
            raise RuntimeError
        if calls == step:
            signal.raise_signal(signal.SIGINT)
        return forward(*args)

    other = llm.stream(after("abc"), greedy())
    begin = next(other)
    monkeypatch.setattr(llm.engine.worker.model, "forward", interrupted)
    with pytest.raises(RuntimeError if fails else KeyboardInterrupt):
        llm.generate([after("a"), after("ab")], greedy())
    text = begin + "".join(other)
    assert ALPHABET[3:].startswith(text) if fails else text == ALPHABET[3:]
    check_idle(llm)
    assert llm.generate(after("abcd"), greedy())[0].text == ALPHABET[4:]


def test_metrics_sum_over_requests(folder: Path) -> None:
    llm = make(folder, 5)
    outputs = llm.generate([after("a"), "ab", after("abc")], greedy(max_tokens=9, stop="lmn"))
    metrics = llm.metrics()
    for name in ("num_tokens", "num_steps", "num_drafted", "num_accepted"):
        assert metrics[name] == sum(getattr(output.stats, name) for output in outputs)
    assert metrics["num_tokens"] == sum(len(output.token_ids) for output in outputs) == 27
    assert json.loads(json.dumps(metrics)) == metrics


class Alphabet(SimpleDrafter):
    def draft(self, tokens: list[int], k: int) -> range:
        return range(tokens[-1] + 1, TOKENS.index(EOS))


def test_drafters_are_loaded(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, checking the vocabulary; by the model's name; and objects."""
    monkeypatch.setenv("NANOSPEC_WEIGHTS", str(tmp_path))

    def stats_of(k: int = 5, drafter: Any = None, **fields: Any) -> SpecStats:
        spec = SpecConfig(num_speculative_tokens=k, **fields)
        llm = LLM(folder, spec=spec, drafter=drafter, dtype="float32", max_num_seqs=2, max_model_len=128)
        [output] = llm.generate(after("abcd"), greedy(max_tokens=16))
        assert output.text == ALPHABET[4:20]
        return output.stats

    other = tmp_path / "other"
    shutil.copytree(folder, other)
    tokenizer = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(re.sub('"q": *16', '"q":99', tokenizer))
    for fields, error, words in (
        ({"method": "draft", "draft_model": "other"}, ValueError, "'q' is 16 in the target's and 99 in the"),
        ({"method": "draft"}, ValueError, "needs a draft model; set draft_model"),
        ({"method": "draft", "draft_model": "nowhere"}, FileNotFoundError, "unknown model 'nowhere'"),
        ({"method": "medusa"}, FileNotFoundError, "train them with: .* train --model"),
        ({"drafter": Alphabet}, ValueError, "drafter=Alphabet is a class"),
    ):
        with pytest.raises(error, match=words):
            stats_of(**fields)
    size, heads = len(TOKENS), {}
    for i in range(2):
        heads[f"{i}.0.linear.weight"] = torch.zeros(size, size)
        heads[f"{i}.0.linear.bias"] = torch.zeros(size)
        heads[f"{i}.1.weight"] = torch.eye(size).roll(2 + i, 0)  # predicts the following letters
    (tmp_path / "heads").mkdir()
    save_file(heads, tmp_path / "heads" / f"{folder.name}.safetensors")
    assert stats_of(3, method="draft", draft_model=str(folder)).by_drafter == {"draft": [4, 12, 12]}
    assert stats_of(method="medusa").by_drafter == {"medusa": [5, 10, 10]}  # not in the first step
    assert stats_of(drafter=Alphabet()).by_drafter == {"Alphabet": [3, 13, 13]}
    assert [*stats_of(drafter=["ngram", Alphabet()]).by_drafter] == ["ngram"]


def test_worker_is_closed_at_exit_and_if_the_engine_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Worker] = []
    monkeypatch.setattr(Worker, "close", lambda worker: closed.append(worker))
    with make(folder) as llm:
        assert closed == []
    assert closed == [llm.engine.worker]
    monkeypatch.setattr("nanospec.llm.Engine", Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        make(folder)
    assert len(closed) == 2


def test_trace_ends_at_stop_string(folder: Path) -> None:
    llm, prompt = make(folder, 8, trace=True), ALPHABET + "abc"
    [output] = llm.generate(prompt, greedy(stop="hi", n=2, max_tokens=20))
    trace = output.trace()
    assert [lane.token_ids for lane in trace.lanes] == [completion.token_ids for completion in output.outputs]
    for lane in trace.lanes:
        assert ("".join(lane.prompt), "".join(lane.output)) == (prompt, "defg")
        [step] = lane.steps
        assert step.tokens == lane.token_ids
        assert len(step.accepted) == len(step.tokens) < len(step.drafts)
        assert "".join(trace.texts[i] for i in step.tokens) == "defghi"
    next(llm.stream("abcd", greedy()))
    assert find_recorder(llm.engine.extensions).trace().lanes[-1].token_ids  # before the interruption


# SmolLM2: a real model, with its real tokenizer.

NAIVE = "naïve café 東京 🙂 ne, " * 3 + "naïve"
JOBS: list[tuple[str, dict[str, Any]]] = [
    ("The quick brown fox jumps over the lazy dog. " * 3 + "The quick", {"temperature": 0}),
    (NAIVE, {"temperature": 0, "logprobs": 1}),
    ("1, 2, 3, 1, 2, 3, 1,", {"top_p": 0.9, "top_k": 50, "seed": 5, "repetition_penalty": 1.1}),
]
PROMPTS = [prompt for prompt, _ in JOBS]
PARAMS = [SamplingParams(max_tokens=8, **options) for _, options in JOBS]


@pytest.fixture(scope="module")
def real(request: pytest.FixtureRequest, smollm2: Path) -> LLM:
    if request.param == "bfloat16" and not fast_in_bfloat16():
        pytest.skip("this CPU is slow in bfloat16")
    return LLM(smollm2, dtype=request.param, max_model_len=256, max_num_seqs=4, spec=SpecConfig("none"))


@pytest.fixture(scope="module")
def wanted(real: LLM) -> list[RequestOutput]:
    """The output of each prompt alone, without speculation."""
    return [real.generate(prompt, params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


def with_drafters(llm: LLM, setup: str) -> LLM:
    """Return an LLM with the same model and another engine, which splits prompts into chunks."""
    model, other = llm.engine.worker.model, copy(llm)
    spec = SpecConfig(
        method=setup.replace("-tree", ""),
        num_speculative_tokens=5,
        tree_width=3 if "tree" in setup else 1,
    )
    other.config = replace(llm.config, spec=spec, max_num_batched_tokens=32)
    ready: dict[str, Drafter] = {}
    if "draft" in setup:
        ready["draft"] = ModelDrafter(spec, model, model.config.vocab_size)
    if "medusa" in setup:
        heads = Heads.load(default_heads(Path("smollm2-135m-instruct")), model)
        ready["medusa"] = MedusaDrafter(spec, heads, model)
    drafters = drafters_of(spec, Target(model, tokenizer=llm.tokenizer), ready)
    other.engine = Engine(other.config, Worker(other.config, model, drafters), llm.tokenizer)
    other.shared = SharedEngine(other.engine)
    return other


SETUPS = ("ngram-tree", "ngram+medusa", "draft", "medusa", "medusa-tree")
FAST = {("float32", "ngram-tree"), ("bfloat16", "ngram+medusa")}


@pytest.mark.parametrize(
    ("real", "setup"),
    [
        pytest.param(*case, marks=() if case in FAST else pytest.mark.long)
        for case in product(("float32", "bfloat16"), SETUPS)
    ],
    indirect=["real"],
)
def test_smollm2_output_is_unchanged(real: LLM, wanted: list[RequestOutput], setup: str) -> None:
    """Bitwise identical in bfloat16 too: on a CPU, a row's result depends neither on other rows nor on the
    chunks of its prompt."""
    llm = with_drafters(real, setup)
    outputs = llm.generate(PROMPTS, PARAMS)
    for output, alone in zip(outputs, wanted, strict=True):
        assert (output.token_ids, output.text) == (alone.token_ids, alone.text)
        assert output.finish_reason == alone.finish_reason
    assert llm.engine.metrics.spec.num_accepted > 2
    if setup == "draft":  # the target itself, but without penalties
        for output, params in zip(outputs, PARAMS, strict=True):
            drafted, accepted = output.stats.num_drafted, output.stats.num_accepted
            assert params.changes_logits or drafted == accepted
    assert outputs[0].text.startswith(" brown fox jumps over the lazy dog.")
    assert outputs[1].text == llm.tokenizer.decode(outputs[1].token_ids)
    assert outputs[1].text.startswith(" café ")
    stops = greedy(max_tokens=16, stop=["京 🙂 n", "naïve"])  # across tokens
    assert "".join(llm.stream(NAIVE, stops)) == " café 東"
