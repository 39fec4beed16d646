"""Measure how much of each prompt of an agent's loop comes from the prefix cache.

    python bench/agent.py [--model smollm2-135m-instruct] [--loops 4] [--turns 20] [--out bench/results]

A loop is a chat with a long system prompt. Each turn appends the model's answer and a tool's result, a piece
of code, to the messages and sends all of them again. The hit rate of a turn is the number of cached blocks
over the number of full blocks of the previous turn's prompt and answer. `same_ids` counts the answers whose
text has the same token ids in the next prompt; the others are computed again from the first difference on.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import common
from nanospec import LLM, SamplingParams

FIELDS = {"path": "string", "pattern": "string", "content": "string", "first_line": "integer"}
NAMES = ("read_file", "write_file", "search", "list_folder", "run_tests", "show_diff", "commit", "ask_user")
SCHEMA = {"type": "object", "properties": {field: {"type": kind} for field, kind in FIELDS.items()}}
TOOLS = [{"name": name, "parameters": SCHEMA} for name in NAMES]
SYSTEM = "You are a coding assistant. Work in small steps. Tools, as JSON Schema:\n" + json.dumps(TOOLS)


def loop(llm: LLM, texts: Sequence[str], turns: int, params: SamplingParams) -> dict[str, Any]:
    """Run a loop that starts with the first text; the others are the results of tools."""
    size, rates, same = llm.config.block_size, [], 0
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": texts[0]}]
    previous: list[int] = []
    for turn in range(turns):
        [output] = llm.chat(messages, params)
        done, prompt = output.outputs[0], output.prompt_token_ids
        if turn:
            rates.append(round(done.num_cached_tokens / size / (len(previous) // size), 4))
            same += prompt[: len(previous)] == previous
        previous = [*prompt, *done.token_ids]
        result = {"role": "tool", "content": texts[(turn + 1) % len(texts)]}
        messages += [{"role": "assistant", "content": done.text}, result]
    return {"hit_rates": rates, "same_ids": same, "last_prompt": len(prompt)}


def main() -> None:
    parser = common.parser(__doc__, model=common.MODEL, loops=3, turns=20, max_tokens=64)
    args = parser.parse_args()
    texts = common.code_edits(400)[-args.turns * args.loops :]
    llm, result = LLM(args.model, max_num_seqs=8), {}
    for temperature in (0.0, 0.7):
        params = SamplingParams(temperature=temperature, max_tokens=args.max_tokens, seed=1)
        parts = [texts[i :: args.loops] for i in range(args.loops)]
        result[f"temperature {temperature}"] = runs = [loop(llm, p, args.turns, params) for p in parts]
        print(f"temperature {temperature}:", *runs, sep="\n  ", flush=True)
    settings = {name: getattr(args, name) for name in ("model", "loops", "turns", "max_tokens")}
    common.save("agent", {"machine": common.environment(), "settings": settings, "runs": result}, args.out)


if __name__ == "__main__":
    main()
