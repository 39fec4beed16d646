"""Measure predicted outputs on code edits: one greedy request at a time, the whole file as its prediction.

    python bench/predicted.py [--model PATH] [--prompts 8] [--skip 8] [--rounds 3] [--max-tokens 160]
                              [--fragment 0.5] [--numbered 0] [--out bench/results]

The prompt has the instruction and a `--fragment` of the file, its first lines, or, with `--numbered 1`, the
whole file with line numbers, as agents show files (writes predicted_numbered.json). The first `--skip` code
edits, with which lookup was tuned, are left out. In each round, systems take turns for each prompt: K = 0,
lookup in the request's own text, with the file as prediction, with another file, and with the own output, an
upper bound. Each has an engine, and thus estimates of acceptance, of its own. Prefill is not timed.
"""

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import common
from nanospec import LLM, SamplingParams, SpecConfig

SYSTEMS = ("plain", "lookup", "prediction", "wrong prediction", "own output")
ASK = "{instruction}\nReply only with the code, in a Python code block. {what}:\n```python\n{head}\n```"


def main() -> None:
    parser = common.parser(
        __doc__, model=common.MODEL, prompts=8, skip=8, rounds=3, max_tokens=160, fragment=0.5, numbered=0
    )
    args, table, llms = parser.parse_args(), dict[str, Any](), dict[str, LLM]()
    for system in SYSTEMS:
        method = "none" if system == "plain" else "ngram"
        spec = SpecConfig(method=method, prompt_lookup_history=False)  # prompts repeat
        llms[system] = LLM(args.model, spec=spec, max_num_seqs=1, max_model_len=1024, kv_cache_memory="256M")
    rounds = []
    for _ in range(args.rounds + 1):
        rounds.append({system: [0.0, 0, 0, 0] for system in SYSTEMS})  # s, tokens, steps, copied tokens
        for row, other in pairwise(common.code_edit_rows(args.skip + args.prompts + 1)[args.skip :]):
            lines, expected = row["input"].splitlines(), list[int]()
            what, head = "It begins", lines[: max(round(args.fragment * len(lines)), 1)]
            if args.numbered:
                what = "The file, with line numbers"
                head = [f"{number:6}\t{line}" for number, line in enumerate(lines, 1)]
            text = ASK.format(**row, what=what, head="\n".join(head))
            for system, llm in llms.items():
                texts = {
                    "prediction": row["input"],
                    "wrong prediction": other["input"],
                    "own output": expected,
                }
                params = SamplingParams(
                    temperature=0, max_tokens=args.max_tokens, prediction=texts.get(system)
                )
                done = llm.generate([common.chat_prompt(llm.tokenizer, text)], params)[0].outputs[0]
                expected = expected or done.token_ids
                assert done.token_ids == expected, (system, text)
                seconds, copied = done.seconds - done.first_token_seconds, done.num_accepted_prediction_tokens
                new = seconds, done.stats.num_tokens, done.stats.num_steps, copied
                rounds[-1][system] = [a + b for a, b in zip(rounds[-1][system], new)]
    for system in SYSTEMS:
        counted = rounds[1:]  # in the first round, the estimates are learned
        ratios = {b: [r[b][0] / r[system][0] for r in counted] for b in ("plain", "lookup")}
        _, tokens, steps, copied = map(sum, zip(*(r[system] for r in counted)))
        table[system] = {f"speed over {base}": common.spread(ratios[base]) for base in ratios}
        table[system] |= {"tokens_per_step": round(tokens / steps, 2), "copied": round(copied / tokens, 3)}
        print(f"{system:18} {table[system]}", flush=True)
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    settings["model"] = Path(args.model).name
    name = "predicted_numbered" if args.numbered else "predicted"
    common.save(name, {"machine": common.environment(), "settings": settings, "systems": table}, args.out)


if __name__ == "__main__":
    main()
