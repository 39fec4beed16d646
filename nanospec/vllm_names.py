"""What users of vLLM write for `LLM` and `SamplingParams`: in our words, or a sentence about ours.

Most options have the same names and need nothing from here. An option that means nothing here is accepted
where it asks for what is done anyway (`pipeline_parallel_size=1`), and refused otherwise: never dropped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from .config import EngineConfig, SamplingParams, SpecConfig
from .text.checks import shown

NO_LORA = "LoRA is not there"
NO_MEDIA = "models of text only are there"
OWN_REVISION = "fetch the revision that you want, and give its folder"
OLD_SPEC = "give speculative_config={...} or spec=SpecConfig(...)"

# vLLM's option -> (the values that ask for nothing else than what is done anyway, what to say of others)
FOREIGN: dict[str, tuple[tuple[Any, ...], str]] = {
    "pipeline_parallel_size": ((1,), "tensor_parallel_size splits a model"),
    "data_parallel_size": ((1,), "nanospec --replicas and nanospec serve --replicas run several, by Ray"),
    "nnodes": ((1,), "torchrun starts ranks on several machines"),
    "enable_expert_parallel": ((False,), "models with experts are not there"),
    "distributed_executor_backend": ((None, "mp"), "ranks are processes, started here or by torchrun"),
    "gpu_memory_utilization": ((), "kv_cache_memory='4G', say, sizes the KV cache"),
    "kv_cache_memory_bytes": ((None,), "its name here is kv_cache_memory"),
    "num_gpu_blocks_override": ((None,), "kv_cache_memory='4G', say, sizes the KV cache"),
    "kv_cache_dtype": (("auto",), "the KV cache has the dtype of the model"),
    "swap_space": ((0,), "nothing is swapped; a request that loses its cache is computed again"),
    "cpu_offload_gb": ((0,), "weights stay on the device"),
    "trust_remote_code": ((False, None), "code of a model's repository is never run; leave it out"),
    "tokenizer": ((None,), "the tokenizer is that in the model's folder"),
    "tokenizer_mode": (("auto",), "the tokenizer is that in the model's folder"),
    "skip_tokenizer_init": ((False,), "the tokenizer is always loaded; prompts may be token ids"),
    "revision": ((None,), OWN_REVISION),
    "tokenizer_revision": ((None,), OWN_REVISION),
    "hf_token": ((None,), "HF_TOKEN in the environment is what the hub is given"),
    "hf_overrides": ((None, {}), "config.json is read as it is; change it in a copy of the folder"),
    "chat_template": ((None,), "llm.chat(..., chat_template=...) takes one"),
    "generation_config": (("vllm",), "give SamplingParams what requests are to have"),
    "override_generation_config": ((None, {}), "give SamplingParams what requests are to have"),
    "task": (("auto", "generate"), "models generate text"),
    "runner": (("auto", "generate"), "models generate text"),
    "logits_processors": ((None, []), "a SamplingParameter changes logits; docs/extend-sampling.md"),
    "download_dir": ((None,), "NANOSPEC_WEIGHTS in the environment names the folder of models"),
    "load_format": (("auto", "safetensors"), "weights are safetensors; nanospec convert reads GGUF"),
    "quantization": ((None,), "weights are as safetensors hold them; dtype says in what they are computed"),
    "enable_chunked_prefill": ((True, None), "long prompts are always split, by max_num_batched_tokens"),
    "max_seq_len_to_capture": ((), "max_model_len limits the texts; steps of all lengths are captured"),
    "compilation_config": ((None,), "enforce_eager and lazy_capture are what can be chosen"),
    "disable_log_stats": ((True, False), ""),  # nothing is logged; llm.metrics() tells
    "disable_custom_all_reduce": ((True, False), ""),
    "enable_lora": ((False,), NO_LORA),
    "max_loras": ((), NO_LORA),
    "max_lora_rank": ((), NO_LORA),
    "limit_mm_per_prompt": ((None, {}), NO_MEDIA),
    "mm_processor_kwargs": ((None, {}), NO_MEDIA),
    "speculative_model": ((None,), OLD_SPEC),
    "ngram_prompt_lookup_min": ((None,), OLD_SPEC),
    "ngram_prompt_lookup_max": ((None,), OLD_SPEC),
}
# The same for `SamplingParams`.
FOREIGN_SAMPLING: dict[str, tuple[tuple[Any, ...], str]] = {
    "detokenize": ((True,), "texts are always made; token_ids are there too"),
    "skip_special_tokens": ((True,), "special tokens are no part of the text; token_ids has them"),
    "spaces_between_special_tokens": ((True,), "special tokens are no part of the text"),
    "include_stop_str_in_output": ((False,), "a stop string is no part of the text; stop_reason names it"),
    "prompt_logprobs": ((None,), "log-probabilities are those of the output: logprobs"),
    "best_of": ((None, 1), "n=... gives all outputs, of which you can take the best by cumulative_logprob"),
    "bad_words": ((None, []), "logit_bias={token: -1e6} bars a token"),
    "allowed_token_ids": ((None,), "a SamplingParameter can bar tokens; docs/extend-sampling.md"),
    "logits_processors": ((None, []), "a SamplingParameter changes logits; docs/extend-sampling.md"),
    "guided_decoding": ((None,), "its name here is response_format"),
    "structured_outputs": ((None,), "its name here is response_format"),
    "truncate_prompt_tokens": ((None,), "cut the list of token ids yourself"),
}
# The methods of vLLM's speculative_config that are there: ours, and which option its "model" is.
METHODS = {"ngram": ("ngram", ""), "draft_model": ("draft", "draft_model"), "medusa": ("medusa", "heads")}


# What vLLM's structured outputs are constrained by, and the type of our response_format.
CONSTRAINTS = {"json": "json_schema", "json_object": "json_object"}
CONSTRAINTS |= {kind: kind for kind in ("regex", "choice", "grammar")}


def sampling_in_our_words(asked: Mapping[str, Any], settings: Any) -> dict[str, Any]:
    """Arguments of `SamplingParams` for vLLM's."""
    ours = dict(asked)
    for name in ("structured_outputs", "guided_decoding"):
        if ours.get(name) is not None and ours.get("response_format") is None:
            ours["response_format"] = response_format(name, ours.pop(name))
    return known_alone(ours, settings, FOREIGN_SAMPLING)


def response_format(name: str, asked: Any) -> dict[str, Any]:
    """Our `response_format` for an object or a dict with one of `CONSTRAINTS`. TypeError for all else."""
    given = dict(asked) if isinstance(asked, Mapping) else dict(getattr(asked, "__dict__", {}))
    given = {what: value for what, value in given.items() if value is not None and value is not False}
    what, value = next(iter(given.items()), ("", None))
    if len(given) != 1 or what not in CONSTRAINTS:
        known = ", ".join(CONSTRAINTS)
        raise TypeError(f"{name}={shown(asked)} must hold one of {known}; its name here is response_format.")
    if what == "json" and isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise TypeError(f"{name}: json={shown(value)} is no JSON: {error}.") from None
    if what == "json":
        value = {"schema": value}
    kind = CONSTRAINTS[what]
    return {"type": kind} if what == "json_object" else {"type": kind, kind: value}


def in_our_words(spec: SpecConfig | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `EngineConfig` for those of `LLM`. Raises TypeError for an option that is not there, with
    the closest name that is, or with what is there instead."""
    ours = dict(options)
    asked = ours.pop("speculative_config", None)
    if spec is not None and asked is not None:
        raise TypeError("spec and speculative_config are the same in two words; give one of them.")
    ours = known_alone(ours, EngineConfig, FOREIGN)
    return {"spec": (spec or SpecConfig()) if asked is None else spec_config(asked), **ours}


def known_alone(
    options: Mapping[str, Any], settings: Any, foreign: Mapping[str, tuple[tuple[Any, ...], str]]
) -> dict[str, Any]:
    """The options that are fields of the settings. TypeError for others unless they ask for what is done
    anyway (`foreign`)."""
    names = {field.name for field in fields(settings)}
    for name in [name for name in options if name not in names]:
        harmless, instead = foreign.get(name, ((), ""))
        if not is_one_of(options[name], harmless):
            said = instead or _closest(name, names)
            raise TypeError(f"{name[:100]}={shown(options[name])} is no option here: {said}.")
    return {name: value for name, value in options.items() if name in names}


def is_one_of(value: object, harmless: tuple[Any, ...]) -> bool:
    """Whether a value is among these. Arrays, of which comparisons make arrays, are not."""
    return isinstance(value, str | int | float | list | dict | None) and value in harmless


def spec_config(asked: Mapping[str, Any]) -> SpecConfig:
    """vLLM's `speculative_config`, such as {"method": "ngram", "num_speculative_tokens": 4}; any field of
    `SpecConfig` may stand in it. Raises TypeError or ValueError for what is not there."""
    if not isinstance(asked, Mapping):
        raise TypeError(f"speculative_config={shown(asked)} must be a dict, as in {{'method': 'ngram'}}.")
    ours = {name: value for name, value in asked.items() if value is not None}
    for name in ("method", "model"):
        if not isinstance(ours.get(name, ""), str):
            raise TypeError(f"speculative_config: {name}={shown(ours[name])} must be a text.")
    model = ours.pop("model", None)
    if model in ("ngram", "[ngram]"):  # as older versions have it
        model, ours["method"] = None, "ngram"
    method = ours.pop("method", None) or ("ngram" if model is None else "draft_model")
    method, named = METHODS.get(method, (method, "draft_model"))
    if model is not None and named:
        ours[named] = model
    elif model is not None:
        raise TypeError(f"speculative_config: model={shown(model)} is of no use to method={shown(method)}.")
    size, options = ours.pop("draft_tensor_parallel_size", None), ours.get("options", {})
    if not is_one_of(size, (None, 1)) and isinstance(options, Mapping):
        ours["options"] = {**options, "draft_tensor_parallel_size": size}
    if "prompt_lookup_min" in ours:  # alone it is the longest, too
        ours.setdefault("prompt_lookup_max", ours["prompt_lookup_min"])
    names = {field.name for field in fields(SpecConfig)}
    if unknown := [name for name in ours if name not in names]:
        what = f"{shown(unknown[0])} is no option here: {_closest(unknown[0], names)}"
        raise TypeError(f"speculative_config: {what}.")
    return SpecConfig(method=method, **ours)


def _closest(name: str, names: set[str]) -> str:
    """What to write instead of an unknown name."""
    name = str(name)[:100]
    for settings, said in ((SpecConfig, "spec=SpecConfig"), (SamplingParams, "SamplingParams")):
        if name in {field.name for field in fields(settings)}:
            return f"it belongs to {said}({name}=...)"
    if close := get_close_matches(name, names, 1):
        return f"the closest is {close[0]}"
    return f"known are {', '.join(sorted(names))}"
