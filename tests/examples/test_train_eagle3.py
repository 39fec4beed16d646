"""`examples/train_eagle3.py` trains a drafter that the engine loads."""

import json
import runpy
from pathlib import Path

import pytest

from nanospec import LLM, SamplingParams, SpecConfig
from tests.alphabet import ALPHABET, EOS

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_eagle3.py"


def test_trained_drafter_is_loaded_and_accepted(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = runpy.run_path(str(SCRIPT))
    text, out = tmp_path / "text.jsonl", tmp_path / "drafter"
    messages = [{"role": "user", "content": ALPHABET}, {"role": "assistant", "content": ALPHABET}]
    lines = [*({"text": ALPHABET[i % 9 :] + EOS + ALPHABET} for i in range(20)), {"messages": messages}]
    text.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--vocab", "30", "--passes", "3", "--epochs", "30", "--batch", "4", "--lr", "0.01"]
    script["main"](["--model", str(folder), "--text", str(text), "--out", str(out), *options])
    losses = [json.loads(line)["held_out_loss"] for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 30
    assert losses[-1] < 0.5 * losses[0]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    spec = SpecConfig(method="eagle3", draft_model=str(out), num_speculative_tokens=3)
    plain, speculative = (
        LLM(folder, spec=each, dtype="float32").generate("ab", params)[0]
        for each in (SpecConfig(method="none"), spec)
    )
    assert speculative.token_ids == plain.token_ids
    assert speculative.stats.acceptance_rate > 0.5
