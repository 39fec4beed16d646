"""The estimate of a step by kernel: its arithmetic, and that it describes what is launched."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import pytest

from bench import estimate as before_after
from bench.cases import Case, layer
from nanospec.apps.cli.estimate import Gpu, Launch, attention, estimate, explain, main, total
from nanospec.apps.cli.shapes import SHAPES
from nanospec.kernels import dispatch, launch

H200 = Gpu()
STEPS = [(model, B, K) for model in SHAPES for B, K in ((1, 0), (1, 4), (8, 7), (64, 4))]


def us(one: Launch, part: str) -> float:
    return 1e6 * one.times(H200)[part]


def test_a_multiprocessor_has_its_share_of_the_memory() -> None:
    """192 programs on 132 places take as long as 264: 73 % of the machine."""
    even = us(Launch(132, resident=2, bytes=43e6), "waves")
    assert even == pytest.approx(10.0)
    assert us(Launch(264, resident=2, bytes=43e6), "waves") == pytest.approx(even)
    assert us(Launch(192, resident=2, bytes=43e6), "waves") == pytest.approx(even * 264 / 192)


def test_what_is_read_again_comes_from_the_cache() -> None:
    assert us(Launch(132, bytes=4.3e6, cached=10e-6 * H200.cache), "waves") == pytest.approx(10.0)
    alone = Launch(1, bytes=1e3, cached=1e6)  # one multiprocessor cannot draw all of its bandwidth
    assert us(alone, "waves") == pytest.approx(1e12 / H200.port, rel=0.01)


def test_a_loop_that_waits_bounds_each_wave() -> None:
    one = Launch(512, resident=3, bytes=268e6, loop=24e-6)
    full = 3 * 268e6 / 512 / (4.3e12 / 132)  # 396 programs, three each; then 116 that wait for their loads
    assert us(one, "waves") == pytest.approx(1e6 * full + 24)
    assert us(replace(one, loop=0.0), "waves") == pytest.approx(1e6 * full * 4 / 3)


def test_what_starts_early_and_finds_its_data_saves_the_start() -> None:
    plain = Launch(132, round_trips=1)
    fast = replace(plain, early=True, warm=True)
    saved = sum(plain.times(H200).values()) - sum(fast.times(H200).values())
    assert saved == pytest.approx(H200.launch - H200.early + H200.latency - H200.hit)


@pytest.mark.parametrize(("model", "B", "K"), STEPS)
def test_no_kernel_is_below_its_limit(model: str, B: int, K: int) -> None:
    for row in estimate(SHAPES[model], B, K, 1024, H200):
        assert row.us > row.limit, row
        assert all(part >= 0 for part in row.times.values()), row


def test_more_requests_take_longer() -> None:
    times = [total(estimate(SHAPES["qwen3-8b"], B, 4, 1024, H200)) for B in (1, 8, 32, 128)]
    assert all(a < b for a, b in pairwise(times))


# ---- what is launched --------------------------------------------------------------------------


def programs(case: Case, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each launch that the case makes on an H200."""
    from triton.runtime.interpreter import InterpretedFunction

    found = []

    def record(self: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> None:
        found.append(prod(grid))

    monkeypatch.setattr(InterpretedFunction, "run", record)
    with dispatch.forced("triton"), launch.targeting("sm_90"):
        case.build("meta").run()
    return found


PRODUCTS = {"qkv": "qkv_rope", "o": "linear_add o", "gate_up": "norm_swiglu"}
PRODUCTS["down"] = "linear_add down"


@pytest.mark.parametrize("shape", layer.MODELS, ids=lambda shape: shape.name)
@pytest.mark.parametrize(("B", "K"), [(1, 0), (1, 4), (8, 7), (64, 4)])
def test_programs_are_those_that_are_launched(
    shape: layer.Shape, B: int, K: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {row.name: row for row in estimate(SHAPES[shape.name], B, K, 1024, H200)}
    for case in layer.layer_linears(shape, B * (K + 1)):
        part = case.label.split("-")[-2]
        assert programs(case, monkeypatch)[-1] == rows[PRODUCTS.get(part, part)].programs, case.label
    case = layer.attention_case(shape, B, K + 1, 1024)
    assert programs(case, monkeypatch)[0] == rows["attention"].programs


@pytest.mark.parametrize(("queries", "resident"), [(1, 2), (5, 2), (16, 1)], ids=["16", "32", "64"])
def test_as_many_programs_of_attention_fit_as_their_compiled_sizes_allow(queries: int, resident: int) -> None:
    """104,448, 110,592 and 122,880 bytes of shared memory for 16, 32 and 64 columns of heads of 128."""
    assert attention(H200, SHAPES["qwen3-8b"], 8, queries, 4096).resident == resident


# ---- the command line --------------------------------------------------------------------------


def test_the_explanation_names_every_kernel_its_limit_and_its_estimate() -> None:
    text = explain(SHAPES["qwen3-8b"], 64, 4, 1024, H200)
    rows = estimate(SHAPES["qwen3-8b"], 64, 4, 1024, H200)
    for row in rows:
        (line,) = (line for line in text.splitlines() if line.startswith(row.name + " "))
        assert f"{row.limit:.1f}" in line
        assert f"{row.us:.1f}" in line
    assert f"{total(rows):.2f} estimated" in text


def test_a_model_is_explained_by_its_configuration_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 1000,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main([str(tmp_path), "--batch", "2", "--drafts", "0", "3"]) == 0
    out = capsys.readouterr().out
    assert "a step of 2 x 1 tokens" in out
    assert "a step of 2 x 4 tokens" in out


def test_one_is_not_many_names_ignore_case_and_columns_are_told_apart(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["Qwen3-8B", "--batch", "1", "2", "1000000", "--drafts", "1"]) == 0
    out = capsys.readouterr().out
    assert "1 request, 1 draft\n" in out
    assert "2 requests, 1 draft each\n" in out
    table = out.split("\n\n")[2].splitlines()[1:-1]
    assert len({len(line) for line in table}) == 1
    assert {len(line.replace("layout, embedding", "layout").split("  ")) > 8 for line in table} == {True}
    (sample,) = {line for line in table if line.startswith("sample ")}
    assert sample.split()[2] == "–"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--batch", "0"], "'0' is not a whole number of 1 or more"),
        (["--batch", "1", "-3"], "'-3' is not a whole number of 1 or more"),
        (["--drafts", "-1"], "'-1' is not a whole number of 0 or more"),
        (["--context", "-5"], "'-5' is not a whole number of 1 or more"),
        (["--context", "many"], "'many' is not a whole number of 1 or more"),
        (["--context", "999999999"], "the window of qwen3-8b is 40960"),
    ],
)
def test_what_no_step_can_be_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["qwen3-8b", *arguments])
    assert exit.value.code == 2
    assert said in capsys.readouterr().err


def test_an_unknown_model_is_told_what_is_built_in(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["nosuchmodel"])
    assert exit.value.code == 2
    told = capsys.readouterr().err
    assert "no model 'nosuchmodel'" in told
    assert re.search("built in: .*qwen3-0.6b.*qwen3-8b", told)


def test_before_and_after_stand_side_by_side() -> None:
    before, after = before_after.figures("old"), before_after.figures("new")
    for row in after:
        row["us"] = row["us"] / 2
    lines = before_after.markdown(before + after).splitlines()
    row = next(row for row in before if row["kernel"] == "head")
    assert f"{row['us']:.1f} → {row['us'] / 2:.1f}" in next(line for line in lines if "| head |" in line)
    assert "→" not in "".join(before_after.markdown(before))
