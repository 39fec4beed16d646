#!/usr/bin/env python3
"""nanospec on the command line: one prompt, a chat, a batch of requests, or a demo.

    python run.py --model smollm2-135m-instruct --prompt "Why is the sky blue?"
    python run.py --model smollm2-135m-instruct --chat --show-drafts
    python run.py --model smollm2-135m-instruct --input requests.jsonl --output results.jsonl
    python run.py --demo
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from nanospec import LLM, RequestOutput, SamplingParams, SpecConfig
from nanospec.cli import roofline
from nanospec.cli.console import DIM, Console
from nanospec.cli.demo import run_demo
from nanospec.cli.jsonl import run_batch
from nanospec.config import METHODS
from nanospec.kernels.codes import RULES
from nanospec.metrics import LOSSY

EXIT_BAD_INPUT, EXIT_INTERRUPTED = 2, 130


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if sum(map(bool, (args.prompt is not None, args.chat, args.input, args.demo, args.explain))) != 1:
        parser.error("give one of --prompt TEXT, --chat, --input FILE, --demo or --explain")
    if bool(args.input) != bool(args.output):
        parser.error("--input and --output go together")
    console = Console(sys.stderr if args.json else sys.stdout, args.show_drafts)
    try:
        params = sampling_params(args)
        if args.demo:
            run_demo(args.model, spec_config(args), console, engine_options(args))
            return 0
        llm = LLM(args.model, spec=spec_config(args), **engine_options(args))
        if args.explain:
            console.line(explain_costs(llm))
            report(llm, args, console)
        elif args.input:
            run_batch(llm, args.input, args.output, params)
            report(llm, args, console)
        elif args.chat:
            run_chat(llm, params, console, args)
        else:
            run_prompt(llm, params, console, args)
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (ValueError, TypeError, OSError) as error:  # bad input, missing files, full disk
        print(f"run.py: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    return 0


def run_prompt(llm: LLM, params: SamplingParams, console: Console, args: argparse.Namespace) -> None:
    """Complete one prompt, streaming it."""
    prompt = args.prompt if args.raw else llm.chat_prompt(messages_for(args.prompt, args.system))
    outputs: list[RequestOutput] = []
    if params.n > 1:
        outputs = llm.generate(prompt, params)
        for number, completion in enumerate(outputs[0].outputs, 1):
            console.line(f"[{number}] {completion.text}")
    else:
        for pieces in llm.stream_pieces(prompt, params, outputs.append):
            console.pieces(pieces)
        console.line()
    report(llm, args, console, outputs[0])


def run_chat(llm: LLM, params: SamplingParams, console: Console, args: argparse.Namespace) -> None:
    """Talk until end of input; Ctrl-C ends an answer, and at the prompt the program."""
    messages = [{"role": "system", "content": args.system}] if args.system else []
    console.line("Type a message; /reset forgets the conversation; Ctrl-D ends it.", DIM)
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            console.line()
            break
        if text == "/reset":
            messages = messages[:1] if args.system else []
        if not text or text == "/reset":
            continue
        turn = [*messages, {"role": "user", "content": text}]
        outputs: list[RequestOutput] = []
        answer = []
        try:
            for pieces in llm.stream_pieces(llm.chat_prompt(turn), params, outputs.append):
                console.pieces(pieces)
                answer += [piece.text for piece in pieces]
        except KeyboardInterrupt:
            console.line(" [stopped]", DIM)
        except ValueError as error:  # the conversation has outgrown the window
            console.line(f"{error} /reset starts anew.")
            continue
        console.line()
        messages = [*turn, {"role": "assistant", "content": "".join(answer)}]
        if outputs and not args.json:
            console.line(summary(outputs[0]), DIM)
    report(llm, args, console)


def explain_costs(llm: LLM) -> str:
    """Why guessing pays here: what a step must move and compute, and what it was measured to take."""
    engine = llm.engine
    model = engine.model
    machine = roofline.measure(model.device, model.dtype)
    lines = [
        f"{machine.bandwidth / 1e9:.0f} GB/s read, {machine.flops / 1e9:.0f} GFLOP/s in {model.dtype}",
        roofline.explain(model.config, machine, context=min(1024, engine.max_model_len)),
        "",
        "tokens per step: at least ms, measured ms, measured relative to one token",
    ]
    costs = engine.step_costs()
    for tokens, ms in costs.items():
        least = roofline.account(model.config, 1, tokens - 1, 1, model.dtype.itemsize).bound(machine)
        lines.append(f"{tokens:5}: {least:8.2f} {ms:8.2f} {ms / next(iter(costs.values())):6.2f}x")
    return "\n".join(lines)


def report(
    llm: LLM, args: argparse.Namespace, console: Console, output: RequestOutput | None = None
) -> None:
    """Statistics at the end: a line for people, or with --json an object on standard output."""
    if args.json:
        result: dict[str, Any] = {"metrics": llm.metrics()}
        if output is not None:
            result["outputs"] = [completion.to_dict() for completion in output.outputs]
        print(json.dumps(result))
    elif output is not None and len(output.outputs) == 1:
        console.line(summary(output), DIM)


def summary(output: RequestOutput) -> str:
    """One line about how an output came about."""
    stats = output.stats
    text = f"[{len(output.token_ids)} tokens, {len(output.token_ids) / max(output.seconds, 1e-9):.1f} tok/s, "
    text += f"{stats.tokens_per_step:.2f} tokens per step"
    if stats.num_drafted:
        text += f", {stats.acceptance_rate:.0%} of {stats.num_drafted} drafts accepted"
    if stats.acceptance in LOSSY:
        text += f" ({stats.acceptance} acceptance: not what the model alone would have written)"
    if output.error:
        text += f"; {output.error}"
    return text + f", finished: {output.finish_reason}]"


def messages_for(prompt: str, system: str | None) -> list[dict[str, str]]:
    """A conversation of one user message."""
    user = {"role": "user", "content": prompt}
    return [{"role": "system", "content": system}, user] if system else [user]


def spec_config(args: argparse.Namespace) -> SpecConfig:
    names = ["num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"]
    names += ["draft_model", "heads", "tree_width", "acceptance"]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return SpecConfig(method=args.spec, **given)


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    names = ["temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "stop", "n"]
    names += ["ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty"]
    return SamplingParams(**{name: getattr(args, name) for name in names})


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    names = ["dtype", "device", "max_num_seqs", "max_model_len", "max_num_batched_tokens", "kv_cache_memory"]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return {**given, "enable_prefix_caching": not args.no_prefix_caching}


def _auto_or_int(text: str) -> int | str:
    return text if text == "auto" else int(text)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--model", default="smollm2-135m-instruct", help="a folder, a name in weights/, or a hub id")

    what = parser.add_argument_group("what to do")
    add = what.add_argument
    add("--prompt", metavar="TEXT", help="answer one prompt")
    add("--chat", action="store_true", help="talk with the model")
    add("--input", metavar="FILE", help='requests, a JSON object a line: {"prompt"|"messages", ...sampling}')
    add("--output", metavar="FILE", help="results, a line each; what it already holds is not done again")
    add("--demo", action="store_true", help="three requests with and without speculation")
    add("--explain", action="store_true", help="what a step costs by the number of tokens, and why")
    add("--raw", action="store_true", help="continue the text of --prompt instead of chatting about it")
    add("--system", metavar="TEXT", help="the system message of a chat")
    add("--json", action="store_true", help="print statistics as JSON on standard output")
    add("--show-drafts", action="store_true", help="colour the tokens that were guessed right (terminal)")

    spec = parser.add_argument_group("speculation")
    add = spec.add_argument
    add("--spec", choices=METHODS, default="ngram", help="how to guess (default: ngram)")
    add("--draft-model", metavar="MODEL", help="for --spec draft: a small model, same vocabulary")
    add("--heads", metavar="FILE", help="for --spec medusa (default: weights/heads/NAME.safetensors)")
    add("--tree-width", type=int, metavar="W", help="most continuations guessed at once (default: 1)")
    add(
        "--acceptance",
        choices=RULES,
        help="exact (default): the output is what it is without speculation; rejection: its distribution is; "
        "typical: the output changes, since tokens are accepted that are only likely enough",
    )
    add(
        "--num-speculative-tokens",
        type=_auto_or_int,
        metavar="K",
        help="most guesses per step; auto (default) chooses by measured cost and acceptance",
    )
    add("--prompt-lookup-min", type=int, metavar="N", help="shortest text to look up (default: 1 token)")
    add("--prompt-lookup-max", type=int, metavar="N", help="longest text to look up (default: 8 tokens)")

    sampling = parser.add_argument_group("sampling (defaults for all requests)")
    add = sampling.add_argument
    add("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    add("--top-p", type=float, default=1.0)
    add("--top-k", type=int, default=0)
    add("--min-p", type=float, default=0.0)
    add("--seed", type=int, help="same seed, same text")
    add("--max-tokens", type=int, default=256, help="most new tokens (default: 256)")
    add("--min-tokens", type=int, default=0)
    add("--stop", action="append", default=[], metavar="TEXT", help="end at this text; may be repeated")
    add("--ignore-eos", action="store_true")
    add("--n", type=int, default=1, help="how many outputs per prompt")
    add("--presence-penalty", type=float, default=0.0)
    add("--frequency-penalty", type=float, default=0.0)
    add("--repetition-penalty", type=float, default=1.0)

    engine = parser.add_argument_group("engine")
    add = engine.add_argument
    add("--dtype", help="auto (default), bfloat16, float16 or float32")
    add("--device", help="auto (default), cpu or cuda")
    add("--max-num-seqs", type=int, help="most requests at once (default: 64)")
    add("--max-model-len", type=int, help="longest prompt + output in tokens")
    add("--max-num-batched-tokens", type=int, help="most tokens per step; longer prompts are split")
    add("--kv-cache-memory", type=int, metavar="BYTES", help="size of the KV cache")
    add("--no-prefix-caching", action="store_true", help="do not reuse the cache of equal beginnings")
    return parser


if __name__ == "__main__":
    sys.exit(main())
