"""What vLLM's users write is understood, or answered with what to write here; nothing is dropped."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nanospec import EngineConfig, SamplingParams, SpecConfig
from nanospec.vllm_names import FOREIGN, in_our_words


def test_what_asks_for_nothing_else_is_accepted() -> None:
    asked = {"pipeline_parallel_size": 1, "trust_remote_code": False, "quantization": None, "max_num_seqs": 3}
    assert in_our_words(None, asked) == {"spec": SpecConfig(), "max_num_seqs": 3}
    assert EngineConfig(**in_our_words(None, {"kv_cache_memory": "4G"})).kv_cache_memory == 4 << 30


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"pipeline_parallel_size": 2}, "=2 is no option here: tensor_parallel_size splits a model"),
        ({"gpu_memory_utilization": 0.9}, "kv_cache_memory='4G', say, sizes the KV cache"),
        ({"max_seqs": 3}, "max_seqs=3 is no option here: the closest is max_num_seqs."),
        ({"num_speculative_tokens": 3}, "it belongs to spec=SpecConfig(num_speculative_tokens=...)"),
        ({"temperature": 0}, "it belongs to SamplingParams(temperature=...)"),
        ({"xyzzy": 1}, "known are async_scheduling, block_size"),
        ({"speculative_config": "ngram"}, "must be a dict"),
        ({"speculative_config": {"method": "ngram", "model": "x"}}, "model='x' is of no use to method="),
        ({"speculative_config": {"method": "ngram", "prompt_lookup": 3}}, "the closest is prompt_lookup_m"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_is_not_there_is_a_type_error_that_says_what_is(asked: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TypeError) as caught:
        in_our_words(None, asked)
    assert sentence in str(caught.value)


def test_no_option_of_ours_is_refused_as_foreign() -> None:
    assert not FOREIGN.keys() & set(EngineConfig.__dataclass_fields__)


@pytest.mark.parametrize(
    ("asked", "ours"),
    [
        (
            {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
            SpecConfig(num_speculative_tokens=4, prompt_lookup_min=2, prompt_lookup_max=4),
        ),
        ({"model": "[ngram]", "num_speculative_tokens": 4}, SpecConfig(num_speculative_tokens=4)),
        ({"method": "ngram", "prompt_lookup_min": 9}, SpecConfig(prompt_lookup_min=9, prompt_lookup_max=9)),
        (
            {"method": "ngram", "prompt_lookup_min": 9, "prompt_lookup_max": None},
            SpecConfig(prompt_lookup_min=9, prompt_lookup_max=9),
        ),
        ({"method": "ngram", "prompt_lookup_max": 3}, SpecConfig(prompt_lookup_max=3)),
        (
            {"method": "draft_model", "model": "small", "draft_tensor_parallel_size": 1},
            SpecConfig(method="draft", draft_model="small"),
        ),
        (
            {"method": "draft_model", "model": "small", "draft_tensor_parallel_size": 2},
            SpecConfig(method="draft", draft_model="small", options={"draft_tensor_parallel_size": 2}),
        ),
        ({"model": "small"}, SpecConfig(method="draft", draft_model="small")),
        ({"method": "medusa", "model": "file"}, SpecConfig(method="medusa", heads="file")),
        (
            {"method": "ngram+draft", "draft_model": "small", "tree_width": 2},
            SpecConfig(method="ngram+draft", draft_model="small", tree_width=2),
        ),
    ],
    ids=["ngram", "old-ngram", "shortest", "null", "longest", "draft", "split", "model", "medusa", "ours"],
)
def test_speculative_config_is_read(asked: dict[str, Any], ours: SpecConfig) -> None:
    assert in_our_words(None, {"speculative_config": asked})["spec"] == ours
    with pytest.raises(TypeError, match="the same in two words"):
        in_our_words(SpecConfig(), {"speculative_config": asked})


@pytest.mark.parametrize(
    ("option", "harmless", "refused", "instead"),
    [
        ("skip_special_tokens", True, False, "token_ids has them"),
        ("prompt_logprobs", None, 1, "those of the output"),
        ("truncate_prompt_tokens", None, 5, "cut the list"),
    ],
)
def test_sampling_of_vllm_is_taken_where_it_asks_for_nothing_else(
    option: str, harmless: Any, refused: Any, instead: str
) -> None:
    assert SamplingParams(**{option: harmless}, max_tokens=3) == SamplingParams(max_tokens=3)
    with pytest.raises(TypeError, match=f"{option}=.* is no option here: .*{instead}"):
        SamplingParams(**{option: refused})
    with pytest.raises(TypeError, match="the closest is max_tokens"):
        SamplingParams(max_token=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("asked", "ours"),
    [
        ({"json": {"a": 1}}, {"type": "json_schema", "json_schema": {"schema": {"a": 1}}}),
        ({"json": "{}", "regex": None}, {"type": "json_schema", "json_schema": {"schema": {}}}),
        ({"json_object": True}, {"type": "json_object"}),
        ({"regex": "a+", "disable_any_whitespace": False}, {"type": "regex", "regex": "a+"}),
        ({"choice": ["a", "b"]}, {"type": "choice", "choice": ["a", "b"]}),
        ({"grammar": 'root ::= "a"'}, {"type": "grammar", "grammar": 'root ::= "a"'}),
    ],
    ids=lambda value: next(iter(value)),
)
def test_structured_outputs_are_a_response_format(asked: dict[str, Any], ours: dict[str, Any]) -> None:
    wanted = SamplingParams(response_format=ours, max_tokens=3)
    for name in ("structured_outputs", "guided_decoding"):
        for given in (asked, SimpleNamespace(**asked)):
            theirs: dict[str, Any] = {name: given}
            assert SamplingParams(**theirs, max_tokens=3) == wanted


@pytest.mark.parametrize("bad", [{"json": {}, "regex": "a"}, {"structural_tag": "x"}, {"json": "{"}, 5, {}])
def test_other_structured_outputs_are_refused(bad: Any) -> None:
    with pytest.raises(TypeError, match="^structured_outputs"):
        SamplingParams(structured_outputs=bad)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="its name here is response_format"):
        SamplingParams(structured_outputs=5, response_format={"type": "json_object"})  # type: ignore[call-arg]
