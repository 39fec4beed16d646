"""The `LLM` class: stop strings, streams, chat, errors and interruptions.

Most tests run the checkpoint of `tests/alphabet.py`. Prompts contain the alphabet, so that long drafts are
accepted. The last tests run SmolLM2."""

import json
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from nanospec import LLM, RequestOutput, SamplingParams, SimpleDrafter, SpecConfig
from nanospec.models.weights import fast_in_bfloat16
from nanospec.outputs import SpecStats
from tests.alphabet import ALPHABET, EOS, TOKENS, after, greedy, make
from tests.drive import MODES, assert_idle
from tests.random_weights import write_drafter


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    llm = make(folder)
    yield llm
    check_idle(llm)


def check_idle(llm: LLM) -> None:
    with llm.shared.turn() as engine:
        assert_idle(engine)


ENDS: list[tuple[str, dict[str, Any], str, str | int | None]] = [
    ("abcd", {}, ALPHABET[4:], None),  # EOS is not part of the text
    ("abcd", {"ignore_eos": True, "max_tokens": 28}, ALPHABET[4:] + "!", None),
    ("abcd", {"ignore_eos": True, "max_tokens": 27, "skip_special_tokens": False}, ALPHABET[4:] + EOS, None),
    ("yz ", {"max_tokens": 2}, ".!\ufffd", None),  # inside a character
    ("abcd", {"stop": ["lmn", "ijk", "hijk"]}, "efg", "hijk"),  # the first in the text
    ("abcd", {"stop": ".!"}, "efghijklmnopqrstuvwxyz ", ".!"),  # its token starts another character
    ("abcd", {"stop": "é"}, "efghijklmnopqrstuvwxyz .!", "é"),
    ("abcd", {"stop": "abcdef"}, ALPHABET[4:], None),  # starts in the prompt, which is not searched
    ("abcd", {"stop": ["e", "nop"], "min_tokens": 2}, "efghijklm", "nop"),
    ("abcd", {"stop": "efgh", "min_tokens": 3}, "", "efgh"),  # may begin before
    ("abcd", {"stop": ["nop"], "stop_token_ids": [7]}, "efg", 7),
]


@pytest.mark.slow
@pytest.mark.parametrize("k", [0, 1, 5, "auto"])
def test_ends_of_text(folder: Path, k: Any) -> None:
    """Stop strings cut the text, tokens, log-probabilities, pieces and streams in the same place."""
    llm, params = make(folder, k), [greedy(**options, logprobs=0) for _, options, _, _ in ENDS]
    outputs = llm.generate([after(prompt) for prompt, *_ in ENDS], params)
    for output, asked, (prompt, options, text, stop) in zip(outputs, params, ENDS, strict=True):
        assert output.text == text, (prompt, options)
        assert "".join(piece.text for piece in output.pieces) == text.removesuffix("\ufffd")
        assert (output.prompt, output.stop_reason) == (after(prompt), stop)
        assert output.finish_reason == ("length" if len(output.token_ids) == asked.max_tokens else "stop")
        assert len(output.logprobs) == len(output.token_ids) == len(output.pieces) == output.stats.num_tokens
        if isinstance(stop, str):  # the last token completes it
            assert llm.tokenizer.decode(output.token_ids).startswith(text + stop)
            assert stop not in llm.tokenizer.decode(output.token_ids[:-1])
            assert output.num_text_tokens == sum(piece.text != "" for piece in output.pieces)
        ended = list[RequestOutput]()
        chunks = list(llm.stream(after(prompt), asked, ended.append))
        assert all(chunks)
        assert "".join(chunks) == ended[0].text == text
    assert outputs[0].token_ids == list(range(4, TOKENS.index(EOS) + 1))
    check_idle(llm)


def test_outputs_in_prompt_order_with_callbacks_as_they_finish(folder: Path) -> None:
    llm, ended, inner = make(folder), list[tuple[int, str]](), list[RequestOutput]()

    def report(index: int, output: RequestOutput) -> None:
        ended.append((index, output.text))
        if index == 1:  # the first one to finish
            inner.extend(llm.generate(after("ab"), greedy()))

    prompts: list[str | list[int]] = [after("a"), llm.tokenizer.encode(after("ab")), after("abc")]
    params = [greedy(max_tokens=20), greedy(max_tokens=2), greedy(stop="fg", n=2)]
    outputs = llm.generate(prompts, params, report)
    assert [output.text for output in outputs] == [ALPHABET[1:21], "cd", "de"]
    assert [len(output.outputs) for output in outputs] == [1, 1, 2]
    assert [output.prompt for output in outputs] == [after("a"), None, after("abc")]
    assert sorted(ended) == [(i, output.text) for i, output in enumerate(outputs)]
    assert (ended[0][0], inner[0].text) == (1, ALPHABET[2:])
    metrics = llm.metrics()
    assert json.loads(json.dumps(metrics)) == metrics
    every = [completion.stats for output in outputs + inner for completion in output.outputs]
    assert metrics["num_finished"] == len(every) == 5
    for name in ("num_tokens", "num_steps", "num_drafted", "num_accepted"):
        assert metrics[name] == sum(getattr(stats, name) for stats in every)
    check_idle(llm)


def test_chat_with_one_or_several_conversations(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chats get no special tokens besides the template's."""
    encode = Mock(wraps=llm.tokenizer.encode)
    monkeypatch.setattr(llm.tokenizer, "encode", encode)
    one, other = ([{"role": "user", "content": text}] for text in (after("ab"), "yz"))
    assert llm.chat(one, greedy(max_tokens=3))[0].text == "cde"
    kwargs = {"add_generation_prompt": False, "chat_template": "{{ messages[-1].content }}c"}
    both = llm.chat([one, one + other], greedy(max_tokens=1), use_tqdm=False, **kwargs)
    assert [output.text for output in both] == ["d", "d"]
    template = "{{ messages[-1].content }}z"
    [output] = llm.chat(one, greedy(max_tokens=3), continue_final_message=True, chat_template=template)
    assert output.text == "cde"
    llm.generate("a", greedy(max_tokens=1))
    assert [call.args[1] for call in encode.call_args_list] == [False] * 4 + [True]
    template = "{{ tools[0].name if tools }}"
    assert llm.chat(one, greedy(max_tokens=1), tools=[{"name": "ab"}], chat_template=template)[0].text == "c"
    with pytest.raises(ValueError, match="the chat template does not use 'tools'"):
        llm.chat(one, tools=[{"name": "ab"}])


def test_vllm_compatible_calls_and_outputs(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    params = greedy(max_tokens=3, logprobs=0, n=2)
    prompts: list[dict[str, Any]] = [{"prompt": "ab"}, {"prompt_token_ids": [0, 1]}]
    prompts += [{"prompt": "x", "prompt_token_ids": [0, 1]}]
    outputs = llm.generate(prompts, sampling_params=params, use_tqdm=True)
    assert "3/3" in capsys.readouterr().err
    assert [output.prompt for output in outputs] == ["ab", None, "x"]
    assert [output.text for output in outputs] == ["cde"] * 3
    output = outputs[0]
    first = output.outputs[0]
    assert [completion.index for completion in output.outputs] == [0, 1]
    assert output.token_ids == first.token_ids == [2, 3, 4]
    assert output.seconds >= output.first_token_seconds > 0
    own = [at[token] for token, at in zip(output.token_ids, output.logprobs)]
    assert output.cumulative_logprob == first.cumulative_logprob == sum(each.logprob for each in own)
    assert [each.decoded_token for each in own] == ["c", "d", "e"]
    logprobs = [{str(token): [each.logprob, 1]} for token, each in zip(output.token_ids, own)]
    expected = {"text": "cde", "token_ids": [2, 3, 4], "finish_reason": "length", "logprobs": logprobs}
    assert json.loads(json.dumps(first.to_dict())).items() >= expected.items()
    with pytest.raises(AttributeError, match="RequestOutput has no attribute 'txt'"):
        _ = output.txt
    assert llm.generate("ab", greedy(max_tokens=1))[0].cumulative_logprob is None


BAD_CALLS: list[tuple[Any, Any, str]] = [
    (["ab", ""], None, "The prompt is empty"),
    (["ab", "ab" * 64], None, "The prompt has 128 tokens, but max_model_len=128 must hold it"),
    (range(10**9), None, "The prompt has 1000000000 tokens, but max_model_len=128 must hold it"),
    ("a" * 10**6, None, "The prompt has 1000000 characters, too many for max_model_len=128."),
    ([[1], [2, 99]], None, "The prompt contains token id 99; ids are integers from 0 to 32."),
    (["ab", "cd"], [greedy()], "one for each of the 2 prompts"),
    ("ab", [{"temperature": 0}], "sampling_params=[{'temperature': 0}] must be SamplingParams"),
    (None, None, "prompt=None must be a string, token ids, or a dict with only a string 'prompt' or"),
    ({"prompt": "a", "multi_modal_data": 1}, None, "or a dict with only a string 'prompt' or"),
]


def test_invalid_call_has_no_side_effects(llm: LLM) -> None:
    before = llm.metrics()
    for prompts, params, sentence in BAD_CALLS:
        with pytest.raises(ValueError, match=re.escape(sentence)):
            llm.generate(prompts, params)
    with pytest.raises(ValueError, match=r"n=2 is not supported by stream"):
        next(llm.stream("a", SamplingParams(n=2)))
    assert llm.metrics() == before
    assert llm.generate([]) == []


def test_prediction_is_encoded_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.tokenizer, "encode_start", encode := Mock(wraps=llm.tokenizer.encode_start))
    outputs = llm.generate(["ab", "bc"], greedy(n=2, prediction="abcdefgh"))
    assert {done.num_prediction_tokens for output in outputs for done in output.outputs} == {8}
    assert encode.call_count == 1


@pytest.mark.parametrize("mode", MODES.values(), ids=list(MODES))
@pytest.mark.parametrize("failure", [None, RuntimeError, KeyboardInterrupt], ids=["ctrl-c", "error", "exit"])
def test_llm_is_usable_after_ctrl_c_and_failed_step(
    folder: Path, mode: dict[str, Any], failure: type[BaseException] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C takes effect after the step and ends the call's requests; a failed step ends all requests."""
    llm, ends = make(folder, **mode), list[RequestOutput]()
    forward, calls = llm.engine.worker.model.forward, [0]

    def interrupted(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            if failure:
                raise failure
            signal.raise_signal(signal.SIGINT)
        return forward(*args)

    other = llm.stream(after("abc"), greedy(), ends.append)
    begin = next(other)
    monkeypatch.setattr(llm.engine.worker.model, "forward", interrupted)
    with pytest.raises(failure or KeyboardInterrupt):
        llm.generate([after("a"), after("ab")], greedy())
    assert ends == []
    text = begin + "".join(other)
    assert text == ends[0].text
    assert ALPHABET[3:].startswith(text) if failure else text == ALPHABET[3:]
    error = f"A step failed with {failure and failure()!r}, and all requests were aborted; retry them."
    assert ends[0].error == (error if failure else None)
    assert llm.metrics()["num_aborted"] == (3 if failure else 2)
    assert "host" in str(llm.metrics()["stage_seconds"])
    check_idle(llm)
    assert llm.generate(after("abcd"), greedy())[0].text == ALPHABET[4:]


def test_closing_aborts_requests_and_rejects_later_ones(folder: Path) -> None:
    with make(folder) as llm:
        stream = llm.stream(after("abcd"), greedy(), (ends := list[RequestOutput]()).append)
        next(stream)
    list(stream)
    assert (ends[0].finish_reason, ends[0].error) == ("abort", "The LLM was closed.")
    for call in (llm.generate, lambda text: next(llm.stream(text))):
        with pytest.raises(RuntimeError, match=r"^This LLM is closed; create a new one\.$"):
            call("ab")
    llm.close()
    check_idle(llm)


def test_threads_and_context_length_are_set(folder: Path) -> None:
    before = torch.get_num_threads()
    llm = make(folder, threads=before + 1, max_model_len=64)
    assert torch.get_num_threads() == before + 1
    assert llm.engine.worker.model.config.max_position_embeddings == 64
    torch.set_num_threads(before)


class Alphabet(SimpleDrafter):
    def draft(self, tokens: list[int], k: int) -> range:
        return range(tokens[-1] + 1, TOKENS.index(EOS))


def test_drafters_are_loaded(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load drafters by method, by model name, and from objects; check the draft vocabulary."""
    monkeypatch.setenv("NANOSPEC_WEIGHTS", str(tmp_path))

    def stats_of(k: int = 5, drafter: Any = None, **fields: Any) -> SpecStats:
        spec = SpecConfig(num_speculative_tokens=k, **fields)
        llm = LLM(folder, spec=spec, drafter=drafter, dtype="float32", max_num_seqs=2, max_model_len=128)
        [output] = llm.generate(after("abcd"), greedy(max_tokens=16))
        assert output.text == ALPHABET[4:20]
        return output.stats

    tokenizer = shutil.copytree(folder, tmp_path / "other") / "tokenizer.json"
    tokenizer.write_text(re.sub('"q": *16', '"q":99', tokenizer.read_text()))
    for fields, error, words in (
        ({"method": "draft", "draft_model": "other"}, ValueError, "'q' is 16 in the target's and 99 in the"),
        ({"method": "dflash"}, ValueError, "no drafter found for .*; set draft_model to"),
        ({"drafter": Alphabet}, ValueError, "drafter=Alphabet is a class"),
    ):
        with pytest.raises(error, match=words):
            stats_of(**fields)
    assert stats_of(3, method="draft", draft_model=str(folder)).by_drafter == {"draft": [4, 12, 12]}
    assert stats_of(drafter=Alphabet()).by_drafter == {"Alphabet": [3, 13, 13]}
    assert [*stats_of(drafter=["ngram", Alphabet()]).by_drafter] == ["ngram"]


# SmolLM2: a real model, with its real tokenizer.

NAIVE = "naïve café 東京 🙂 ne, " * 3 + "naïve"
JOBS: list[tuple[str, dict[str, Any]]] = [
    ("The quick brown fox jumps over the lazy dog. " * 3 + "The quick", {"temperature": 0}),
    (NAIVE, {"temperature": 0, "logprobs": 1}),
    ("1, 2, 3, 1, 2, 3, 1,", {"top_p": 0.9, "top_k": 50, "seed": 5, "repetition_penalty": 1.1}),
]
CASES = [  # the dtype, or the quantization with bfloat16; a method, with "-tree" for trees
    ("float32", "ngram-tree"),
    ("bfloat16", "ngram+dflash"),
    ("int8", "ngram-tree"),
    ("int4", "ngram+eagle3"),
    pytest.param("bfloat16", "draft", marks=pytest.mark.long),
    pytest.param("bfloat16", "ngram+eagle3-tree", marks=pytest.mark.long),
]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "setup"), CASES)
def test_smollm2_output_is_unchanged(smollm2: Path, dtype: str, setup: str, tmp_path: Path) -> None:
    """Compare a batch with chunked prompts to each prompt alone, without speculation.

    On a CPU, a row's result is independent of other rows and of its chunks in bfloat16, too."""
    if dtype != "float32" and not fast_in_bfloat16():
        pytest.skip("this CPU is slow in bfloat16")
    options: dict[str, Any] = {"dtype": dtype, "max_model_len": 256, "max_num_seqs": 4}
    if dtype.startswith("int"):
        options |= {"dtype": "bfloat16", "quantization": dtype}
    prompts = [prompt for prompt, _ in JOBS]
    params = [SamplingParams(max_tokens=8, **fields) for _, fields in JOBS]
    plain = LLM(smollm2, spec=SpecConfig("none"), **options)
    wanted = [plain.generate(*job)[0] for job in zip(prompts, params, strict=True)]
    method, _, tree = setup.partition("-")
    draft_model = str(smollm2) if method == "draft" else None
    if "+" in method:
        target = plain.engine.worker.model.config
        draft_model = str(write_drafter(tmp_path, method.split("+")[1], target, vocab=4000, reads=(2, 15)))
    spec = SpecConfig(method, draft_model, tree_width=3 if tree else 1, num_speculative_tokens=5)
    llm = LLM(smollm2, spec=spec, max_num_batched_tokens=32, **options)
    outputs = llm.generate(prompts, params)
    for output, alone in zip(outputs, wanted, strict=True):
        assert (output.token_ids, output.text) == (alone.token_ids, alone.text)
        assert output.finish_reason == alone.finish_reason
    assert llm.engine.metrics.spec.num_accepted > 2
    assert outputs[0].text.startswith(" brown fox jumps over the lazy dog.")
    assert outputs[1].text == llm.tokenizer.decode(outputs[1].token_ids)
    stops = greedy(max_tokens=16, stop=["京 🙂 n", "naïve"])  # across tokens
    assert "".join(llm.stream(NAIVE, stops)) == " café 東"
