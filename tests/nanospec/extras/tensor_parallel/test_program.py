"""A user's script with several ranks: a drafter defined in the script, a module next to it, forks, and being
killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.nanospec.extras.tensor_parallel.test_launch import ROOT, assert_gone, is_alive, random_model

SIBLING = """
seen = True
"""
SCRIPT = """
import json, os, random, signal, sys, time
import sibling
from nanospec import LLM, Drafter, SamplingParams, SimpleDrafter, SpecConfig

class Echo(Drafter):
    pass

class CustomDrafter(SimpleDrafter):
    def draft(self, tokens, k):
        after = [i for i, token in enumerate(tokens) if i and tokens[i - 1] == tokens[-1]]
        first = random.choice(after or [0])
        return tokens[first : first + k]

def generate(**params):
    sampling = SamplingParams(max_tokens=30, ignore_eos=True, seed=3, **params)
    return [output.token_ids for output in llm.generate([[5, 9, 5, 7, 5, 9], [8, 3, 8, 3]], sampling)]

folder, size, result = sys.argv[1], int(sys.argv[2]), {}
options = {"tensor_parallel_size": size, "device": "cpu", "threads": 1, "dtype": "float32"}
options |= {"max_model_len": 128, "spec": SpecConfig(num_speculative_tokens=4)}
if size > 1:
    try:
        LLM(folder, drafter=Echo(), **options)
    except ValueError as error:
        result["echo"] = str(error)
llm = LLM(folder, drafter=["ngram", CustomDrafter()], **options)
result |= {"seeded": generate(), "greedy": generate(temperature=0)}
result["accepted"] = llm.engine.metrics.spec.num_accepted > 0
child = os.fork()
if not child:
    if size > 1:
        try:
            generate()
        except ConnectionError as error:
            print(json.dumps({"child": str(error)}), flush=True)
    sys.exit()
os.waitpid(child, 0)
result["after"] = generate()
if size > 1:
    result["ranks"] = [process.pid for process in llm.engine.worker.job.processes]
    result["sessions"] = [os.getsid(0), *map(os.getsid, result["ranks"])]
    result["sleeps"] = child = os.fork()
    if not child:
        os.close(1), os.close(2)
        time.sleep(100)
print(json.dumps(result), flush=True)
if size > 1:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def printed(tmp_path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run the script with one process and with two ranks; return the output of the first and the lines of the
    second. The working directory holds a module that must not shadow the standard library's."""
    model = random_model(tmp_path / "model")
    (tmp_path / "queue.py").write_text("raise ImportError('not that of the standard library')")
    script = tmp_path / "program" / "script.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    (script.parent / "sibling.py").write_text(SIBLING)
    (tmp_path / "tmp").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "tmp")}
    pipes: Any = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    commands = [[sys.executable, str(script), str(model), size] for size in ("1", "2")]
    processes = [
        subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, **pipes) for command in commands
    ]
    texts = [process.communicate(timeout=100) for process in processes]
    assert processes[0].returncode == 0, texts[0][1]
    assert processes[1].returncode == -signal.SIGKILL, texts[1][1]
    return json.loads(texts[0][0]), [json.loads(line) for line in texts[1][0].splitlines()]


def test_user_script(tmp_path: Path) -> None:
    one, (child, several) = printed(tmp_path)
    for what in ("seeded", "greedy"):
        assert several[what] == one[what], what  # with different drafts
    assert several["accepted"]
    assert several["echo"].startswith(
        "Echo is defined in the main script, which other ranks do not run; move"
    )
    assert several["after"] == one["seeded"]
    assert child == {"child": "A forked process cannot use the ranks of its parent; create a new LLM in it."}
    ours, *theirs = several["sessions"]
    assert ours not in theirs
    assert is_alive(several["sleeps"])  # with all the leader's open files
    try:
        assert_gone(several["ranks"])
        assert not list((tmp_path / "tmp").glob("nanospec-*"))
    finally:
        os.kill(several["sleeps"], signal.SIGKILL)
