"""What the command line generates: an answer, a chat, a batch, the demo, the costs of a step."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from ..config import EngineConfig, SamplingParams
from ..llm import LLM, RequestOutput
from ..metrics import LOSSY
from ..models.hub import program
from . import roofline
from .console import DIM, Console
from .demo import run_demo
from .jsonl import run_batch
from .options import engine_options, sampling_params, spec_config


def run(args: argparse.Namespace) -> None:
    """Do what the options say. Raises ValueError, TypeError or OSError for what cannot be done."""
    console = Console(sys.stderr if args.json else sys.stdout, args.show_drafts)
    params, spec, options = sampling_params(args), spec_config(args), engine_options(args)
    if args.demo:
        run_demo(args.model, spec, console, options)
        return
    if args.chat or args.prompt is not None:  # one request: less to measure and to keep room for
        options.setdefault("max_num_seqs", min(params.n, EngineConfig.max_num_seqs))
    if sys.stderr.isatty():
        print(f"Loading {args.model} ...", file=sys.stderr)
    llm = LLM(args.model, spec=spec, **options)
    if args.chat:
        run_chat(llm, params, console, args)
    elif args.prompt is not None:
        run_prompt(llm, params, console, args)
    else:
        if args.explain:
            console.line(explain_costs(llm))
        else:
            run_batch(llm, args.input, args.output, params)
        report(llm, args, console)


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
            if args.json:  # standard output is for the statistics alone
                console.write("> ")
            text = input("" if args.json else "> ").strip()
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
    model = engine.worker.model
    machine = roofline.measure(model.device, model.dtype)
    context = min(1024, engine.max_model_len)
    lines = [
        f"{machine.bandwidth / 1e9:.0f} GB/s read, {machine.flops / 1e9:.0f} GFLOP/s in {model.dtype}; "
        f"one request after {context} tokens",
        roofline.explain(model.config, machine, context),
        "",
        "tokens per step: ms at these rates without a text, measured ms, measured relative to one token",
    ]
    costs = (engine.policy.costs or engine.worker.measure()).of_one_row()
    for tokens, ms in costs.items():
        least = roofline.account(model.config, 1, tokens - 1, 1, model.dtype.itemsize).bound(machine)
        lines.append(f"{tokens:5}: {least:8.2f} {ms:8.2f} {ms / next(iter(costs.values())):6.2f}x")
    lines += ["", f"by kernel, on an H200: {program()} explain MODEL"]
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
    elif output is not None:
        if len(output.outputs) == 1:
            console.line(summary(output), DIM)
        runs = llm.engine.worker.runs()
        threads = f", {runs['threads']} threads" if "threads" in runs else ""
        console.line(f"[{runs['dtype']} on {runs['device']} by {runs['by']}{threads}]", DIM)


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
