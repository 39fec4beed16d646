"""Lookup in the texts of earlier requests against lookup alone, in turn in one process: greedy, one request
at a time. "edits": three rounds of different edits of the same files; "chat": unrelated questions. No prompt
occurs twice. The gains: tokens per step, and CPU time after the first token and of the whole request.

    python -m bench.history        # writes history.json
"""

import random
import time

from bench import common
from nanospec import LLM, SamplingParams, SpecConfig

INSTRUCTIONS = (
    "Add a docstring.", "Add type hints.", "Rename variables so that they say what they hold.", "Log calls.",
    "Print the result first.", "Raise a ValueError if an argument is invalid.", "Return early if possible.",
)  # fmt: skip


def edits(files: int) -> list[str]:
    """Return three rounds of edits of the same files."""
    prompts, rest = common.code_edits(files), "\nReturn the whole code."
    for shift in (5, 10):
        heads = (INSTRUCTIONS[(i + shift) % len(INSTRUCTIONS)] for i in range(files))
        again = [f"{h}{rest}{p.partition(rest)[2]}" for h, p in zip(heads, prompts[:files], strict=True)]
        prompts = prompts + random.Random(shift).sample(again, files)
    return prompts


def run(llm: LLM, text: str, max_tokens: int) -> tuple[list[int], list[float]]:
    """Return the output, and the number of steps and CPU seconds after the first token and in all."""
    start, first, params = time.process_time(), 0.0, SamplingParams(temperature=0, max_tokens=max_tokens)
    request = llm.engine.add(common.chat_prompt(llm.tokenizer, text), params)
    while not request.is_finished:
        llm.engine.step()
        first = first or (time.process_time() if request.output_ids else 0.0)
    end = time.process_time()
    return request.output_ids, [request.stats.num_steps, end - first, end - start]


def main() -> None:
    args, result = common.parser(__doc__, model=common.MODEL, files=34, max_tokens=96).parse_args(), {}
    specs = [SpecConfig(prompt_lookup_history=on) for on in (False, True)]
    llms = [LLM(args.model, spec=spec, max_num_seqs=1, kv_cache_memory="512M") for spec in specs]
    for name, texts in {"chat": common.spec_bench(60, "chat"), "edits": edits(args.files)}.items():
        pairs = [[run(llm, text, args.max_tokens) for llm in llms] for text in texts]
        sums = [[sum(column) for column in zip(*(pair[on][1] for pair in pairs))] for on in (0, 1)]
        gains = {key: round(off / on, 3) for key, off, on in zip(("steps", "decoding", "whole"), *sums)}
        result[name] = {**gains, "equal": sum(off[0] == on[0] for off, on in pairs), "of": len(texts)}
        print(name, result[name], flush=True)
    common.save("history", {"machine": common.environment(), "gains": result}, args.out)


if __name__ == "__main__":
    main()
