"""Measure predicted outputs on code edits: one greedy request at a time, the whole file as its prediction.

    python bench/predicted.py [--model PATH] [--prompts 8] [--skip 8] [--rounds 3] [--max-tokens 160]
                              [--fragment 0.5] [--out bench/results]

The prompt has the instruction and a `--fragment` of the file, its first lines. The first `--skip` code
edits, with which lookup was tuned, are left out. In each round, systems take turns for each prompt: K = 0,
lookup in the request's own text, lookup with the file as prediction, with another file, and with the model's
own output, an upper bound. Each has an engine of its own, whose estimates of acceptance do not depend on the
others. The times are those after the first token.
"""

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import common
from nanospec import LLM, SamplingParams, SpecConfig
from nanospec.outputs import Completion

ASK = "{instruction}\nReply only with the code, in a Python code block. It begins:\n```python\n{head}\n```"


def run(
    llms: dict[str, LLM], row: dict[str, str], other: str, most: int, part: float
) -> dict[str, Completion]:
    """Return the output of each system for a code edit; `other` is a wrong prediction."""
    lines = row["input"].splitlines()
    text = ASK.format(**row, head="\n".join(lines[: max(round(part * len(lines)), 1)]))
    done, predictions = dict[str, Completion](), {"prediction": row["input"], "wrong prediction": other}
    for system, llm in llms.items():
        prediction: Any = done["plain"].token_ids if system == "own output" else predictions.get(system)
        params = SamplingParams(temperature=0, max_tokens=most, prediction=prediction)
        done[system] = llm.generate([common.chat_prompt(llm.tokenizer, text)], params)[0].outputs[0]
        assert done[system].token_ids == done["plain"].token_ids, (system, text)
    return done


def main() -> None:
    parser = common.parser(
        __doc__, model=common.MODEL, prompts=8, skip=8, rounds=3, max_tokens=160, fragment=0.5
    )
    args = parser.parse_args()
    rows, llms = common.code_edit_rows(args.skip + args.prompts + 1)[args.skip :], dict[str, LLM]()
    for system in ("plain", "lookup", "prediction", "wrong prediction", "own output"):
        spec = SpecConfig(method="none" if system == "plain" else "ngram")
        llms[system] = LLM(args.model, spec=spec, max_num_seqs=1, max_model_len=1024, kv_cache_memory="256M")
    rounds, table = list[dict[str, list[Completion]]](), dict[str, Any]()
    for i in range(args.rounds + 1):  # the estimates of acceptance are learned in the first one, not counted
        found = [run(llms, a, b["input"], args.max_tokens, args.fragment) for a, b in pairwise(rows)]
        rounds += [{system: [done[system] for done in found] for system in llms}] if i else []
    for system in llms:
        seconds = [{s: sum(d.seconds - d.first_token_seconds for d in r[s]) for s in llms} for r in rounds]
        done = [each for r in rounds for each in r[system]]
        tokens, steps = (sum(getattr(d.stats, name) for d in done) for name in ("num_tokens", "num_steps"))
        copied = sum(d.num_accepted_prediction_tokens for d in done)
        speed = {base: common.spread([s[base] / s[system] for s in seconds]) for base in ("plain", "lookup")}
        table[system] = {
            "speed_over": speed,
            "tokens_per_step": tokens / steps,
            "copied_share": copied / tokens,
        }
        print(f"{system:18} {table[system]}", flush=True)
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    common.save(
        "predicted", {"machine": common.environment(), "settings": settings, "systems": table}, args.out
    )


if __name__ == "__main__":
    main()
