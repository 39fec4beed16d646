"""Load the model and run the mode of the command line: prompt, chat, batch or demo."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...config import EngineConfig, SamplingParams, SpecConfig
from ...device.hardware import compute_info
from ...extras.tracing.recorder import find_recorder
from ...extras.tracing.trace import check_target
from ...llm import LLM, RequestOutput
from ..batch.run import Batch, batch_summary, run_batch
from ..options import fields_set
from ..tasks import with_system
from .chat import Chat, typed_messages
from .console import DIM, Console
from .demo import run_demo


def run(args: argparse.Namespace, params: SamplingParams, batch: Batch | None) -> None:
    """Load the model and run the mode that the options select. Raises ValueError, TypeError or OSError."""
    console = Console(sys.stderr if args.json else sys.stdout, args.show_drafts)
    spec = SpecConfig(**fields_set(args, "SpecConfig"))
    engine_options = {"spec": spec, **fields_set(args, "EngineConfig")}
    if args.trace is not None:
        check_target(args.trace)  # before the model is loaded
        engine_options["trace"] = True
    if args.replicas is not None and batch is not None:
        from ..cluster.batch import run_on_ray

        statistics = run_on_ray(batch, args.folder, args.model, engine_options, args.replicas)
        Console(sys.stderr).line(batch_summary(statistics))
        if args.json:
            print(json.dumps({"batch": statistics}))
        return
    if args.chat or args.prompt is not None:  # one request at a time needs fewer rows
        engine_options.setdefault("max_num_seqs", min(params.n, EngineConfig.max_num_seqs))
    if args.demo:  # the second run of a prompt must not reuse the blocks of the first
        engine_options["enable_prefix_caching"] = False
    llm = LLM(args.folder, **engine_options)
    with saved_trace(args.trace, llm):
        if args.demo:
            run_demo(llm, console)
        elif batch is not None:
            statistics = run_batch(llm, batch, args.model)
            Console(sys.stderr).line(batch_summary(statistics))
            report(llm, args, console, batch=statistics)
        elif args.chat:
            on_answer = None if args.json else lambda output: console.line(summary(output), DIM)
            Chat(llm, params, console, args.system, on_answer).run(typed_messages(console))
            report(llm, args, console)
        else:
            run_prompt(llm, params, console, args)


@contextmanager
def saved_trace(path: str | None, llm: LLM) -> Iterator[None]:
    """When the block ends or is interrupted, write the trace of the latest requests, finished or not, to
    `path` if it is set."""
    try:
        yield
    finally:
        if path is not None:
            begin = "\n" if sys.exc_info()[0] else ""  # interrupted text may not end with a newline
            with llm.shared.turn() as engine:
                trace = find_recorder(engine.extensions).trace()
            if trace.lanes:
                trace.save(path)
                print(f"{begin}Trace: {path}", file=sys.stderr)
            else:
                print(f"{begin}No requests were run; {path} was not written.", file=sys.stderr)


def run_prompt(llm: LLM, params: SamplingParams, console: Console, args: argparse.Namespace) -> None:
    """Answer one prompt, streaming the text unless there are several outputs."""
    prompt: str | list[int] = args.prompt
    if not args.raw and (args.system or llm.tokenizer.has_chat_template):
        message = {"role": "user", "content": args.prompt}
        prompt = llm.chat_prompt(with_system([message], args.system))
    elif not args.raw:
        Console(sys.stderr).line("The model has no chat template; continuing the prompt as plain text.", DIM)
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


def report(
    llm: LLM, args: argparse.Namespace, console: Console, output: RequestOutput | None = None, **more: Any
) -> None:
    """Print statistics as text, or with --json as a JSON object on standard output."""
    if args.json:
        result: dict[str, Any] = {"metrics": llm.metrics(), **more}
        if output is not None:
            result["outputs"] = [completion.to_dict() for completion in output.outputs]
        print(json.dumps(result))
    elif output is not None:
        if len(output.outputs) == 1:
            console.line(summary(output), DIM)
        info = compute_info(llm.engine.worker.model)
        threads = f", {info['threads']} threads" if "threads" in info else ""
        console.line(f"[{info['dtype']} on {info['device']} by {info['by']}{threads}]", DIM)


def summary(output: RequestOutput) -> str:
    """Return one line of statistics about an output."""
    stats = output.stats
    count = len(output.token_ids)
    text = f"[{count} token{'s' * (count != 1)}, {count / max(output.seconds, 1e-9):.1f} tok/s, "
    text += f"{stats.tokens_per_step:.2f} tokens per step"
    if stats.num_drafted:
        text += f", {stats.acceptance_rate:.0%} of {stats.num_drafted} drafts accepted"
    if stats.num_accepted and stats.acceptance != "exact":
        text += f" ({stats.acceptance} acceptance: may differ from the output without speculation)"
    if output.error:
        text += f"; {output.error}"
    return f"{text}, finished: {output.finish_reason}]"
