"""The `LLM` class: stop strings, streams, chat, errors and interruptions.

Most tests run a tiny checkpoint that spells the alphabet: "c" follows "ab", and EOS follows the last
letter. Prompts contain the alphabet, so that long drafts are accepted. One token is "!" with the first
half of "é", the next one the other half. The last tests run SmolLM2.
"""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from copy import copy
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers

from nanospec import LLM, RequestOutput, SamplingParams, SimpleDrafter, SpecConfig
from nanospec.device.worker import Worker
from nanospec.drafters import Target
from nanospec.drafters.draft_model import ModelDrafter
from nanospec.drafters.medusa import Heads, MedusaDrafter
from nanospec.engine.engine import Engine
from nanospec.engine.locking import SharedEngine
from nanospec.extras.tracing.recorder import find_recorder
from nanospec.models import default_heads
from nanospec.models.weights import fast_in_bfloat16
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


@pytest.fixture(params=[0, 1, 5, "auto"], ids=lambda k: f"K{k}")
def llm(request: pytest.FixtureRequest, folder: Path) -> Iterator[LLM]:
    llm = make(folder, request.param)
    yield llm
    with llm.shared.turn() as engine:
        assert_idle(engine)


def make(folder: Path, k: Any = 5, **options: Any) -> LLM:
    spec = SpecConfig(num_speculative_tokens=k)
    options = {"dtype": "float32", "max_num_seqs": 4, "max_model_len": 128, **options}
    return LLM(folder, spec=spec, **options)


def after(text: str) -> str:
    """Return a prompt that contains the alphabet and ends with `text`."""
    return ALPHABET + EOS + text


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 60, **options})


def streamed(llm: LLM, prompt: str, params: SamplingParams) -> tuple[list[str], RequestOutput]:
    ends: list[RequestOutput] = []
    return list(llm.stream(prompt, params, ends.append)), ends[0]


def test_eos_ends_text_and_is_excluded(llm: LLM) -> None:
    [output] = llm.generate(after("abcd"), greedy())
    assert output.text == ALPHABET[4:]
    assert output.finish_reason == "stop"
    assert output.token_ids == list(range(4, TOKENS.index(EOS) + 1))
    assert output.prompt == after("abcd")
    assert llm.tokenizer.decode(output.token_ids) == output.text
    [on] = llm.generate(after("abcd"), greedy(ignore_eos=True, max_tokens=28))
    assert on.text == ALPHABET[4:] + "!"
    assert on.finish_reason == "length"


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("f", "e"),
        ("e", ""),
        ("hij", "efg"),
        (["lmn", "hijk", "ijk"], "efg"),  # the first one completed
        (["never", "ij"], "efgh"),
        ("z .!é", "efghijklmnopqrstuvwxy"),
        (".!", "efghijklmnopqrstuvwxyz "),  # the token completing it starts another character
        ("é", "efghijklmnopqrstuvwxyz .!"),
        ("never", ALPHABET[4:]),
        ("abcdef", ALPHABET[4:]),  # starts in the prompt, which is not searched
    ],
    ids=str,
)
def test_stop_string_cuts_text_tokens_logprobs_and_pieces(llm: LLM, stop: str | list[str], text: str) -> None:
    params = greedy(stop=stop, logprobs=0)
    [output] = llm.generate(after("abcd"), params)
    assert output.text == text == "".join(piece.text for piece in output.pieces)
    assert output.finish_reason == "stop"
    whole = llm.tokenizer.decode(output.token_ids)
    assert whole.startswith(text)
    assert len(output.logprobs) == len(output.token_ids) == len(output.pieces)
    stops = [stop] if isinstance(stop, str) else stop
    if text != ALPHABET[4:]:  # the last token completes the stop string
        assert any(s in whole for s in stops)
        assert not any(s in llm.tokenizer.decode(output.token_ids[:-1]) for s in stops)
    assert llm.engine.metrics.spec.to_dict() == output.stats.to_dict()
    assert output.stats.num_tokens == len(output.token_ids)


def test_stop_string_before_min_tokens_is_ignored(llm: LLM) -> None:
    [output] = llm.generate(after("abcd"), greedy(stop=["f", "pqrstu", "x"], min_tokens=5))
    assert output.text == "efghijklmno"
    for least, text in ((1, ""), (2, "efghijklm")):  # the first token completes "e"
        [output] = llm.generate(after("abcd"), greedy(stop=["e", "nop"], min_tokens=least))
        assert output.text == text


def test_stop_string_may_begin_before_min_tokens(llm: LLM) -> None:
    [output] = llm.generate(after("abcd"), greedy(stop="efgh", min_tokens=3))
    assert output.text == ""
    assert len(output.token_ids) == 4


def test_text_cut_inside_a_character(llm: LLM) -> None:
    [output] = llm.generate(after("yz "), greedy(max_tokens=2))
    assert output.text == ".!\ufffd"
    chunks, output = streamed(llm, after("yz "), greedy(max_tokens=2))
    assert "".join(chunks) == output.text == ".!\ufffd"


@pytest.mark.parametrize("stop", ["hij", "hiX", "é", ["lmnopq", "o"], "never, ever", ()], ids=str)
def test_stream_matches_text_and_never_exceeds_stop_string(llm: LLM, stop: Any) -> None:
    params = greedy(stop=stop)
    [expected] = llm.generate(after("abcd"), params)
    sent = ""
    for chunk in llm.stream(after("abcd"), params):
        assert chunk
        sent += chunk
        assert expected.text.startswith(sent)
    assert sent == expected.text
    pieces = [p for step in llm.stream_pieces(after("abcd"), params) for p in step]
    assert "".join(piece.text for piece in pieces) == expected.text


def test_pieces_have_source(folder: Path) -> None:
    llm = make(folder, 5)
    tokens = llm.tokenizer.encode(after("abcd"))
    pieces = [p for step in llm.stream_pieces(after("abcd"), greedy(max_tokens=12)) for p in step]
    assert "".join(piece.text for piece in pieces) == "efghijklmnop"
    assert [p.source >= 0 for p in pieces] == [True] * 5 + [False] + [True] * 5 + [False]
    for piece in pieces:
        if piece.source >= 0:
            assert llm.tokenizer.decode([tokens[piece.source]]) == piece.text


def test_interleaved_streams(llm: LLM) -> None:
    """Also text a request produced while another stream was read."""
    prompts = [after("ab"), after("abcdefgh"), after("xyz .")]
    streams = [llm.stream(prompt, greedy()) for prompt in prompts]
    texts = ["", "", ""]
    for chunks in zip_longest(*streams, fillvalue=""):
        for i, chunk in enumerate(chunks):
            texts[i] += chunk
    assert texts == [ALPHABET[2:], ALPHABET[8:], ALPHABET[28:]]
    slow, fast = llm.stream(after("ab"), greedy()), llm.stream(after("b"), greedy())
    begin = next(slow)
    assert "".join(fast) == ALPHABET[2:]
    assert begin + "".join(slow) == ALPHABET[2:]


def test_abandoned_stream_frees_everything(llm: LLM) -> None:
    for chunk in llm.stream(after("ab"), greedy()):
        assert chunk
        break
    left = llm.stream(after("ab"), greedy())
    next(left)
    del left
    assert llm.metrics()["num_aborted"] == 2
    with llm.shared.turn() as engine:
        assert_idle(engine)


def test_stream_rejects_several_outputs(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"n=2 is not supported by stream"):
        next(llm.stream("a", SamplingParams(n=2)))


def test_outputs_in_prompt_order_with_callbacks_as_they_finish(llm: LLM) -> None:
    ended: list[tuple[int, str]] = []
    prompts: list[str | list[int]] = [after("a"), llm.tokenizer.encode(after("ab")), after("abc")]
    outputs = llm.generate(
        prompts,
        [greedy(max_tokens=20), greedy(max_tokens=2), greedy(stop="fg", n=2)],
        lambda i, output: ended.append((i, output.text)),
    )
    assert [output.text for output in outputs] == [ALPHABET[1:21], "cd", "de"]
    assert [len(output.outputs) for output in outputs] == [1, 1, 2]
    assert [output.prompt for output in outputs] == [after("a"), None, after("abc")]
    assert sorted(ended) == [(i, output.text) for i, output in enumerate(outputs)]
    assert ended[0][0] == 1
    assert llm.metrics()["num_finished"] == 4


def test_generate_inside_a_callback(llm: LLM) -> None:
    inner: list[str] = []

    def report(index: int, output: RequestOutput) -> None:
        if index == 0:
            inner.append(llm.generate(after("ab"), greedy())[0].text)

    outputs = llm.generate([after("a"), after("abc")], [greedy(max_tokens=2), greedy()], report)
    assert [output.text for output in outputs] == ["bc", ALPHABET[3:]]
    assert inner == [ALPHABET[2:]]


def test_failing_callback_ends_batch(llm: LLM) -> None:
    def report(index: int, output: RequestOutput) -> None:
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        llm.generate([after("a"), after("b")], [greedy(max_tokens=1), greedy()], report)
    with llm.shared.turn() as engine:
        assert_idle(engine)


def test_prompt_of_token_ids_and_empty_list(llm: LLM) -> None:
    [output] = llm.generate([0, 1, 2], greedy(max_tokens=3))
    assert output.text == "def"
    assert llm.generate([]) == []


def test_samples_differ_and_are_reproducible(folder: Path) -> None:
    params = SamplingParams(n=3, temperature=20, seed=1, max_tokens=20)
    for caching in (True, False):
        outputs = [
            make(folder, k, enable_prefix_caching=caching).generate(after("ab"), params)[0].outputs
            for k in (0, 5)
        ]
        plain, spec = ([completion.token_ids for completion in group] for group in outputs)
        assert plain == spec
        assert len({tuple(ids) for ids in plain}) == 3


def test_chat_with_one_or_several_conversations(llm: LLM) -> None:
    def user(text: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": text}]

    [output] = llm.chat(user(after("ab")), greedy(max_tokens=3))
    assert output.text == "cde"
    both = llm.chat([user("a"), [*user("x"), *user("yz")]], greedy(max_tokens=1))
    assert [output.text for output in both] == ["b", " "]


def test_output_forwards_first_completion(llm: LLM) -> None:
    [output] = llm.generate("ab", greedy(max_tokens=3, logprobs=1))
    assert output.token_ids == output.outputs[0].token_ids
    assert output.seconds >= output.first_token_seconds > 0
    assert json.loads(json.dumps(output.outputs[0].to_dict()))["text"] == output.text
    with pytest.raises(AttributeError, match="RequestOutput has no attribute 'txt'"):
        _ = output.txt


def test_vllm_compatible_calls(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llm = make(folder, 3)
    params = greedy(max_tokens=3, logprobs=0, n=2)
    ids = [0, 1]
    prompts: list[dict[str, Any]] = [{"prompt": "ab"}, {"prompt_token_ids": ids}]
    prompts += [{"prompt": "x", "prompt_token_ids": ids}]
    outputs = llm.generate(prompts, sampling_params=params, use_tqdm=True)
    assert "3/3" in capsys.readouterr().err
    assert [output.prompt for output in outputs] == ["ab", None, "x"]
    assert [output.text for output in outputs] == ["cde"] * 3
    assert llm.generate({"prompt": "ab"}, sampling_params=params)[0].text == "cde"
    assert len({output.request_id for output in outputs}) == 3
    assert [completion.index for completion in outputs[0].outputs] == [0, 1]
    own = [at[token].logprob for token, at in zip(outputs[0].token_ids, outputs[0].logprobs)]
    assert outputs[0].outputs[0].cumulative_logprob == sum(own)
    texts = [at[token].decoded_token for token, at in zip(outputs[0].token_ids, outputs[0].logprobs)]
    assert texts == ["c", "d", "e"]
    assert llm.tokenizer.decode(llm.tokenizer.encode("ab")) == "ab"
    conversation = [{"role": "user", "content": "ab"}]
    kwargs = {"add_generation_prompt": False, "chat_template": "{{ messages[0].content }}c"}
    assert llm.chat(conversation, sampling_params=params, use_tqdm=False, **kwargs)[0].text == "def"


def test_token_ids_may_be_tensors(llm: LLM) -> None:
    params, wanted = greedy(max_tokens=2), llm.generate([[0, 1], [2, 3]], greedy(max_tokens=2))
    ids: Any
    for ids in (torch.tensor([[0, 1], [2, 3]]), [torch.tensor([0, 1]), np.array([2, 3])]):
        assert [o.token_ids for o in llm.generate(ids, params)] == [o.token_ids for o in wanted]
    ids = torch.tensor([0, 1])
    assert llm.generate(ids, params)[0].token_ids == wanted[0].token_ids
    texts: Any = np.array(["ab", "cd"])  # its elements are 0-dimensional too
    assert [output.prompt_token_ids for output in llm.generate(texts, params)] == [[0, 1], [2, 3]]
    ids = [torch.tensor([0]), torch.tensor([1])]
    several = llm.generate(ids, params)
    assert [output.prompt_token_ids for output in several] == [[0], [1]]


def test_stop_reason(llm: LLM) -> None:
    stops = greedy(stop=["nop", "xyz"], stop_token_ids=[7])
    assert llm.generate(after("abcd"), stops)[0].stop_reason == 7
    assert llm.generate(after("klm"), stops)[0].stop_reason == "nop"
    for params in (stops, greedy(max_tokens=2)):  # EOS; the length limit
        assert llm.generate(after("z"), params)[0].stop_reason is None


BAD_CALLS: dict[str, tuple[Any, Any, str]] = {
    "empty-prompt": (["ab", ""], None, "The prompt is empty"),
    "long-prompt": (["ab", "ab" * 100], None, "The prompt has 200 tokens, but max_model_len=128"),
    "bad-id": ([[1], [2, 99]], None, "The prompt contains token id 99"),
    "fewer-params": (["ab", "cd"], [greedy()], "sampling_params has 1 entries for 2 prompts"),
    "not-params": ("ab", [{"temperature": 0}], "must be of type SamplingParams, got {'temperature': 0}"),
    "no-text": ({"prompt": None}, None, "prompt={'prompt': None} must be a string, token ids, or"),
    "media": ({"prompt": "a", "multi_modal_data": 1}, None, "unknown key 'multi_modal_data' in a"),
    "bytes": (b"ab", None, "prompt=b'ab' must be a string, token ids, or"),
    "bytes-too": (["ab", b"ab"], None, "prompt=b'ab' must be a string, token ids, or"),
    "text-as-ids": ({"prompt_token_ids": "ab"}, None, "must be a string, token ids, or a dict with"),
    "one-number": (5, None, "prompt=5 must be a string, token ids, or"),
    "one-number-of-several": (["ab", 5], None, "prompt=5 must be a string, token ids, or"),
    "no-dimension": (torch.tensor(5), None, "must be a string, token ids, or a dict with"),
    "one-number-as-float": ([1.5], None, "The prompt contains token id 1.5"),
    "bad-stop-id": (["ab"], greedy(stop_token_ids=[77]), "stop_token_ids contains token id 77"),
}


@pytest.mark.parametrize(("prompts", "params", "sentence"), BAD_CALLS.values(), ids=list(BAD_CALLS))
def test_invalid_call_has_no_side_effects(folder: Path, prompts: Any, params: Any, sentence: str) -> None:
    llm = make(folder)
    before = llm.metrics()
    with pytest.raises(ValueError) as caught:
        llm.generate(prompts, params)
    assert sentence in str(caught.value)
    assert llm.metrics() == before
    with llm.shared.turn() as engine:
        assert_idle(engine)
    assert llm.generate("ab", greedy(max_tokens=2))[0].text == "cd"


def test_unknown_options_raise_type_error(folder: Path) -> None:
    with pytest.raises(TypeError, match="max_seqs"):
        LLM(folder, max_seqs=3)


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
    with llm.shared.turn() as engine:
        assert_idle(engine)
    assert llm.generate(after("abcd"), greedy())[0].text == ALPHABET[4:]


def test_metrics_sum_over_requests(folder: Path) -> None:
    llm = make(folder, 5)
    outputs = llm.generate([after("a"), "ab", after("abc")], greedy(max_tokens=9))
    metrics = llm.metrics()
    assert metrics["num_tokens"] == 27
    for name in ("num_steps", "num_drafted", "num_accepted"):
        assert metrics[name] == sum(getattr(output.stats, name) for output in outputs)
    assert json.loads(json.dumps(metrics)) == metrics


def test_draft_model_by_name_with_same_vocabulary(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 2, "max_model_len": 128}
    spec = SpecConfig(method="draft", draft_model=str(folder), num_speculative_tokens=3)
    [output] = LLM(folder, spec=spec, **options).generate(after("abcd"), greedy(max_tokens=16))
    assert output.text == ALPHABET[4:20]
    assert output.stats.num_accepted == output.stats.num_drafted == 12
    assert {piece.source for piece in output.pieces} == {-1, -2}
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    tokenizer = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(tokenizer.replace('"q":16', '"q":99').replace('"q": 16', '"q": 99'))
    with pytest.raises(ValueError, match="'q' is 16 in the target's and 99 in the draft"):
        LLM(folder, spec=SpecConfig(method="draft", draft_model=str(other)), **options)
    with pytest.raises(ValueError, match="needs a draft model; set draft_model"):
        LLM(folder, spec=SpecConfig(method="draft"), **options)
    with pytest.raises(FileNotFoundError, match="unknown model 'nowhere'"):
        LLM(folder, spec=SpecConfig(method="draft", draft_model="nowhere"), **options)


def test_custom_drafter(folder: Path) -> None:
    class Alphabet(SimpleDrafter):
        def draft(self, tokens: list[int], k: int) -> range:
            return range(tokens[-1] + 1, TOKENS.index(EOS))

    with pytest.raises(ValueError, match="drafter=Alphabet is a class"):
        LLM("nowhere", drafter=Alphabet)  # type: ignore[arg-type]
    [output] = make(folder, drafter=Alphabet()).generate("abcd", greedy(max_tokens=16))
    assert output.text == ALPHABET[4:20]
    assert output.stats.by_drafter == {"Alphabet": [3, 13, 13]}
    [output] = make(folder, drafter=["ngram", Alphabet()]).generate(after("abcd"), greedy(max_tokens=16))
    assert [*output.stats.by_drafter] == ["ngram"]


def test_heads_are_found_by_model_name(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOSPEC_WEIGHTS", str(tmp_path))
    options: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 2, "max_model_len": 128}
    with pytest.raises(FileNotFoundError, match="train them with: .* train --model"):
        LLM(folder, spec=SpecConfig(method="medusa"), **options)
    size, heads = len(TOKENS), {}
    for i in range(2):
        heads[f"{i}.0.linear.weight"] = torch.zeros(size, size)
        heads[f"{i}.0.linear.bias"] = torch.zeros(size)
        heads[f"{i}.1.weight"] = torch.eye(size).roll(2 + i, 0)  # predicts the following letters
    (tmp_path / "heads").mkdir()
    save_file(heads, tmp_path / "heads" / f"{folder.name}.safetensors")
    llm = LLM(folder, spec=SpecConfig(method="medusa", num_speculative_tokens=5), **options)
    [output] = llm.generate(after("abcd"), greedy(max_tokens=16))
    assert output.text == ALPHABET[4:20]
    assert output.stats.num_steps == 6  # the first without drafts
    assert output.stats.by_drafter == {"medusa": [5, 10, 10]}


# SmolLM2: a real model, with its real tokenizer.

PROMPTS = [
    "The quick brown fox jumps over the lazy dog. " * 3 + "The quick",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n",
    "Once upon a time",
    "1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2,",
    "Roses are red, violets are blue, and all that the sky sees is sky. " * 9 + "Roses",
]
MIXED = [
    SamplingParams(temperature=0, max_tokens=20),
    SamplingParams(temperature=0, max_tokens=20, repetition_penalty=1.1, logprobs=1),
    SamplingParams(temperature=0.8, top_p=0.9, seed=4, max_tokens=20),
    SamplingParams(temperature=1.0, top_k=50, min_p=0.02, seed=5, max_tokens=20, presence_penalty=0.3),
    SamplingParams(temperature=0, max_tokens=20),
]


def test_trace_ends_at_stop_string(folder: Path) -> None:
    llm = make(folder, 8, trace=True)
    prompt = ALPHABET + "abc"
    [output] = llm.generate(prompt, greedy(stop="hi", n=2, max_tokens=20))
    trace = output.trace()
    assert [lane.token_ids for lane in trace.lanes] == [completion.token_ids for completion in output.outputs]
    for lane in trace.lanes:
        assert "".join(lane.prompt) == prompt
        assert "".join(lane.output) == "defg"
        [step] = lane.steps
        assert step.tokens == lane.token_ids
        assert len(step.accepted) == len(step.tokens) < len(step.drafts)
        assert "".join(trace.texts[i] for i in step.tokens) == "defghi"
    recorder = find_recorder(llm.engine.extensions)
    assert recorder.trace().to_dict()["lanes"][0]["token_ids"] == output.token_ids
    for _ in llm.stream("abcd", greedy()):
        break
    assert recorder.trace().lanes[-1].token_ids  # the part before the interruption
    with pytest.raises(ValueError, match=r"No trace was recorded"):
        find_recorder(make(folder).engine.extensions)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def real(request: pytest.FixtureRequest, smollm2: Path) -> LLM:
    if request.param == "bfloat16" and not fast_in_bfloat16():
        pytest.skip("this CPU is slow in bfloat16")
    return LLM(smollm2, dtype=request.param, max_model_len=256, max_num_seqs=4, spec=SpecConfig("none"))


def with_k(
    llm: LLM,
    k: int,
    speculation: dict[str, Any] | None = None,
    parts: dict[str, Any] | None = None,
    **options: Any,
) -> LLM:
    """Return an LLM with the same model and another engine; `parts` create drafters by method."""
    other = copy(llm)
    spec = SpecConfig(num_speculative_tokens=k, **(speculation or {}))
    other.config = type(llm.config)(**{**vars(llm.config), "spec": spec, **options})
    target = Target(llm.engine.worker.model, tokenizer=llm.tokenizer)
    made = {name: make(spec) for name, make in (parts or {}).items()}
    worker = Worker(other.config, target.model, drafters_of(spec, target, made))
    other.engine = Engine(other.config, worker, llm.tokenizer)
    other.shared = SharedEngine(other.engine)
    return other


@pytest.fixture(scope="module")
def wanted(real: LLM) -> list[RequestOutput]:
    """The output of each prompt alone, without speculation."""
    return [real.generate(prompt, params)[0] for prompt, params in zip(PROMPTS, MIXED, strict=True)]


@pytest.mark.parametrize(
    "setup",
    [
        "ngram-tree",
        "ngram+medusa",
        *(pytest.param(setup, marks=pytest.mark.long) for setup in ("draft", "medusa", "medusa-tree")),
    ],
)
def test_smollm2_output_is_unchanged_with_every_drafter(
    real: LLM, wanted: list[RequestOutput], setup: str
) -> None:
    model = real.engine.worker.model
    speculation = {"method": setup.replace("-tree", ""), "tree_width": 3 if "tree" in setup else 1}
    parts: dict[str, Any] = {}
    if "draft" in setup:
        parts["draft"] = lambda spec: ModelDrafter(spec, model, model.config.vocab_size)
    if "medusa" in setup:
        heads = Heads.load(default_heads(Path("smollm2-135m-instruct")), model)
        parts["medusa"] = lambda spec: MedusaDrafter(spec, heads, model)
    llm = with_k(real, 5, speculation, parts)
    outputs = llm.generate(PROMPTS, MIXED)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in wanted]
    stats = llm.engine.metrics.spec
    assert stats.num_accepted > 10
    if setup == "draft":  # the target itself, but without penalties
        for output, params in zip(outputs, MIXED, strict=True):
            drafted, accepted = output.stats.num_drafted, output.stats.num_accepted
            assert params.changes_logits or drafted == accepted


def test_smollm2_output_is_unchanged_in_a_batch(real: LLM, wanted: list[RequestOutput]) -> None:
    """Bitwise identical in bfloat16 too: on a CPU, a row's result depends neither on other rows nor on the
    chunks of its prompt."""
    together = with_k(real, 6, max_num_batched_tokens=50)
    accepted = 0
    for alone, got in zip(wanted, together.generate(PROMPTS, MIXED), strict=True):
        assert got.token_ids == alone.token_ids
        assert got.text == alone.text
        assert got.finish_reason == alone.finish_reason
        accepted += got.stats.num_accepted
    assert accepted > 15
    assert wanted[0].text.startswith(" brown fox jumps over the lazy dog.")


def test_smollm2_text_matches_tokens_and_streams(real: LLM) -> None:
    llm = with_k(real, 4)
    prompt = "naïve café 東京 🙂 ne, " * 4 + "naïve"
    [output] = llm.generate([prompt], greedy(max_tokens=24))
    assert output.text == llm.tokenizer.decode(output.token_ids)
    assert output.text.startswith(" café 東京 🙂 ne, naïve café")
    assert "".join(llm.stream(prompt, greedy(max_tokens=24))) == output.text
    [cut] = llm.generate([prompt], greedy(max_tokens=24, stop=["京 🙂 n", "naïve"]))  # across tokens
    assert cut.text == " café 東"
