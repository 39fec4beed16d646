"""The pictures show what the JSON says, also where rows are missing or the machine is another."""

from __future__ import annotations

import copy
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from bench.pictures import fleet, guessing, over_k, peers, roofline, style
from bench.pictures.__main__ import PICTURES, main

Json = dict[str, Any]
RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
HERE = {
    "cpu": "Intel(R) Xeon(R) Processor (avx2, amx_bf16)",
    "cores": 2,
    "commit": "c0ffee",
    "date": "2026-11-22",
}
ELSEWHERE = {**HERE, "cpu": "AMD EPYC (avx2, avx512f, avx512_bf16)"}


def spread(median: float) -> Json:
    return {"median": median, "min": 0.9 * median, "max": 1.1 * median}


def guessed(lookup: float, heads: float, loops: int = 0) -> Json:
    speeds = {"none": 1.0, "ngram": lookup, "medusa K=2": heads}
    rows = {way: {"tokens_per_step": 1.5 * x, "speedup": spread(x)} for way, x in speeds.items()}
    return {**rows, "looping_outputs": loops, "distinct_4grams": 0.9}


def compared(case: str, system: str, way: str, speed: float, **more: Any) -> Json:
    return {"case": case, "system": system, "way": way, "tokens_per_second": spread(speed), **more}


def cpu(machine: Json, *rows: Json) -> Json:
    settings = {"model": "smollm2", "max_tokens": 96}
    return {"short": {"machine": machine, "settings": settings, "tried": {}, "table": list(rows)}}


def at_k(k: str, tokens: float, speedup: float, kind: str = "chat", batch: int = 1, **more: Any) -> Json:
    return {
        "kind": kind,
        "batch": batch,
        "k": k,
        "tokens_per_step": tokens,
        "speedup": spread(speedup),
        **more,
    }


FOUND: dict[str, Json] = {
    "drafters": {
        "machine": ELSEWHERE,
        "settings": {"prompts": 3, "repeats": 2, "max_tokens": 64},
        "greedy": {
            "qa": guessed(1.25, 0.9),
            "code edits": guessed(2.0, 1.5),
            "rag": guessed(3.0, 1.1, loops=1),
        },
    },
    "cpu": cpu(
        HERE,
        compared(
            "B=1, 200", "nanospec", "plain", 80.0, bandwidth_share=spread(0.8),
            decode_tokens_per_second=spread(90.0),
        ),
        compared(
            "B=1, 200", "vllm", "plain", 40.0, nanospec_ratio=spread(2.0), bandwidth_share=spread(0.4),
            decode_tokens_per_second=spread(50.0),
        ),
    ),
    "cpu_64": cpu(
        HERE,
        compared("B=64, 200", "nanospec", "n-gram", 1100.0, guess="K = auto"),
        compared("B=64, 200", "vllm", "n-gram", 800.0, guess="K = 0", nanospec_ratio=spread(1.4)),
    ),
    "cpu_others": cpu(
        HERE,
        compared("B=1, 200", "nanospec", "plain", 70.0),
        compared("B=1, 200", "llama.cpp", "plain", 50.0),
    ),
    "over_k": {
        "environment": HERE,
        "model": "smollm2",
        "settings": {"prompts": 8, "rounds": 3, "max_tokens": 96},
        "rows": [
            at_k("0", 1.0, 1.0), at_k("8", 2.4, 1.5), at_k("2", 2.0, 1.6),
            at_k("auto", 2.1, 1.68, guesses={"0": 30, "2": 60, "8": 10}),
        ],
    },
    "reading": {
        "environment": HERE,
        "sum_gb_per_s": [27.0, 28.0, 29.0],
        "product_gflop_per_s": [1400.0, 1500.0, 1600.0],
    },
    "fleet": json.loads((RESULTS / "fleet.json").read_text()),
    "automatic": {"environment": HERE, "step_ms_by_tokens": {"1": 10.0, "8": 11.0, "16": 12.5, "64": 20.0}},
}  # fmt: skip


@pytest.fixture
def found() -> dict[str, Json]:
    return copy.deepcopy(FOUND)


def written(folder: Path, found: dict[str, Json]) -> Path:
    for name, result in found.items():
        (folder / f"{name}.json").write_text(json.dumps(result))
    return folder


# ---- numbers -----------------------------------------------------------------------------------


def test_the_heat_map(tmp_path: Path, found: dict[str, Json]) -> None:
    data = guessing.read(written(tmp_path, found))
    assert data
    assert (data.ways, data.kinds) == (["ngram", "medusa K=2"], ["rag", "code edits", "qa"])
    assert data.cells["medusa K=2", "qa"] == pytest.approx((0.9, 0.81, 0.99, 1.35))
    assert data.means["ngram"] == pytest.approx((1.25 * 2 * 3) ** (1 / 3))
    assert data.loops == {"rag"}
    said = guessing.title(data)  # of texts without loops
    assert "2.0 times the speed on code edits, 1.2 on questions (lookup)" in said


def test_a_way_that_was_not_measured_everywhere_has_no_mean(tmp_path: Path, found: dict[str, Json]) -> None:
    del found["drafters"]["greedy"]["qa"]["ngram"]
    data = guessing.read(written(tmp_path, found))
    assert data
    assert (data.ways, [*data.means]) == (["medusa K=2", "ngram"], ["medusa K=2"])
    assert "(Medusa heads, K = 2)" in guessing.title(data)


@pytest.mark.parametrize(
    ("way", "name"),
    [
        ("ngram", "lookup"),
        ("ngram+medusa", "lookup and heads"),
        ("ngram tree W=2 K=8", "lookup, tree of 2, K = 8"),
        ("recycling K=3", "recycling, K = 3"),
    ],
)
def test_ways_in_words(way: str, name: str) -> None:
    assert guessing.way_name(way) == name


def test_faster_is_bluer_and_slower_is_orange() -> None:
    pytest.importorskip("matplotlib")
    slow, same, fast = (guessing.shade(speedup)[0] for speedup in (0.8, 1.0, 2.0))
    assert slow[2] < same[2]
    assert fast[0] < same[0]


def test_speeds_of_peers(tmp_path: Path, found: dict[str, Json]) -> None:
    data = peers.read(written(tmp_path, found))
    assert data
    assert [(lane.batch, lane.way) for lane in data.lanes] == [(1, "plain"), (64, "n-gram")]
    assert data.lanes[0].marks["nanospec"].median == 80, "of the file that has vLLM beside it"
    assert data.lanes[0].marks["llama.cpp"] == pytest.approx((50, 45, 55))
    assert data.lanes[1].ratio == pytest.approx((1.4, 1.26, 1.54))
    assert data.others == ["llama.cpp"]
    assert "1 request or 64 at once, nanospec writes 1.4 to 2.0 times" in peers.title(data)


def test_another_machine_is_not_mixed_in(tmp_path: Path, found: dict[str, Json]) -> None:
    found["cpu_64"]["short"]["machine"] = ELSEWHERE
    found["automatic"]["environment"] = ELSEWHERE
    folder = written(tmp_path, found)
    lanes, points = peers.read(folder), roofline.read(folder)
    assert lanes
    assert ([lane.batch for lane in lanes.lanes], lanes.files) == ([1], ["cpu", "cpu_others"])
    assert points
    assert [(p.system, p.tokens) for p in points.points] == [("nanospec", 1), ("vllm", 1)]


def test_over_k(tmp_path: Path, found: dict[str, Json]) -> None:
    data = over_k.read(written(tmp_path, found))
    assert data
    [curve] = data.curves
    assert [(p.k, p.tokens, p.time) for p in curve.fixed] == [
        ("0", 1.0, 1.0), ("2", 2.0, pytest.approx(1.25)), ("8", 2.4, pytest.approx(1.6)),
    ]  # fmt: skip
    assert curve.fixed[1].low == pytest.approx(1.25 / 1.1)
    assert curve.fixed[1].high == pytest.approx(1.25 / 0.9)
    assert curve.best.k == "2"
    assert curve.chosen == {0: 0.3, 2: 0.6, 8: 0.1}
    assert (
        over_k.title(data)
        == "The best number of guesses is 2; the automatic choice reaches 105% of its speed"
    )


def test_points_under_the_roof(tmp_path: Path, found: dict[str, Json]) -> None:
    data = roofline.read(written(tmp_path, found))
    assert data
    assert (data.memory, data.products) == ((27, 28, 29), (1400, 1500, 1600))
    ours = {p.tokens: p for p in data.points if p.system == "nanospec"}
    assert {n: p.ms for n, p in ours.items()} == {1: 10, 8: 11, 16: 12.5, 64: 20}
    assert ours[1].gflops == pytest.approx(2 * 134.5e6 / 10e-3 / 1e9, rel=0.01), "two for each weight"
    assert ours[16].intensity == pytest.approx(16, rel=0.02), "bf16: two FLOPs for two bytes, each token"
    assert [p.ms for p in data.points if p.system == "vllm"] == [pytest.approx(20)]
    assert "a step of 16 tokens takes 1.25 times as long" in roofline.title(data)


def test_the_head_of_a_prompt_scores_one_token() -> None:
    head, attention = 576 * 49152, 30 * 500 * 576
    flops = 2 * 1000 * (134.5e6 - head) + 2 * head + 4 * 1000 * attention
    assert roofline.point("nanospec", 1000, 100.0, prompt=True).gflops == pytest.approx(flops / 1e8, rel=0.01)


def test_pictures_of_a_fleet(found: dict[str, Json]) -> None:
    made = found["fleet"]
    made["routing"]["by_size"] = {
        str(n): {router: {"requests_per_s_and_gpu": rate / n} for router, rate in rates.items()}
        for n in (1, 8)
        for rates in [{"prefix": 24.0, "least loaded": 16.0, "random": 15.0, "hash": 8.0}]
    }
    assert fleet.rates(made, "prefix") == {1: 24.0, 8: 3.0}
    assert fleet.routing_title(made).startswith(
        "On 8 GPUs routing by prefix takes 1.5 times the load of the least loaded, a hash alone 0.5"
    )
    for policy, ms in {"none": 10.0, "auto": 5.0, "K=4": 20.0}.items():
        made["day"]["policies"][policy]["tpot_ms"] = [ms] * 24
    made["day"]["policies"]["auto"]["tpot_ms"][12] = 4.0
    made["day"]["policies"]["K=4"]["tpot_ms"][13] = 30.0
    assert fleet.day_title(made) == (
        "Automatic K makes tokens 2.0 times as fast as none at night and 2.5 times at noon; "
        "a fixed K = 4 makes them up to 3.0 times as slow"
    )
    rows = {"1": {"gain": 2.5}, "64": {"gain": 1.25}}
    for kind, last in (("prose", 16), ("code edits", 64)):
        made["drafts"]["qwen3-8b"][kind] = {"worth_until": last, "rows": rows}
    assert fleet.gain_title(made) == (
        "Drafts pay an 8B model up to 16 rows of prose; with code edits they still gain 25% at 64 rows"
    )
    made["draft_models"]["crossovers"] = [
        {"gpus": n, "layers": 28, "rows": 1, "exchange_us": 10, "parameters": 16e9 / n} for n in (2, 8)
    ]
    assert "over 2 GPUs from 8.0B parameters on, over 8 from 2.0B" in fleet.split_title(made)


def test_machines_in_words() -> None:
    assert style.machine(HERE) == "2 cores of an Intel Xeon server with AMX"
    assert style.machine(ELSEWHERE) == "2 cores of an AMD EPYC server with avx512_bf16"
    assert style.machine({}) == "? cores of an unknown processor server"


# ---- files -------------------------------------------------------------------------------------


def test_without_results_nothing_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--results", str(tmp_path), "--out", str(tmp_path)])
    assert [*tmp_path.iterdir()] == []
    assert capsys.readouterr().out.count("is not drawn") == len(PICTURES)


def test_pictures_are_drawn_alike_with_their_text(tmp_path: Path, found: dict[str, Json]) -> None:
    pytest.importorskip("matplotlib")
    found["drafters"]["greedy"]["qa"].pop("ngram")
    results = written(tmp_path, found)
    for name in ("once", "again"):
        main(["--results", str(results), "--out", str(tmp_path / name)])
    for name, picture in PICTURES.items():
        text = (tmp_path / "once" / f"{name}.svg").read_text()
        assert text == (tmp_path / "again" / f"{name}.svg").read_text()
        words = " ".join(
            "".join(node.itertext()) for node in ET.fromstring(text).iter() if "text" in str(node.tag)
        )
        assert picture.title(picture.read(results)) in words


def test_the_committed_pictures_are_small_and_say_what_the_results_say() -> None:
    for name, picture in PICTURES.items():
        file, data = RESULTS.parents[1] / "docs" / "pictures" / f"{name}.svg", picture.read(RESULTS)
        assert file.exists() == (data is not None), "make pictures"
        if data:
            assert file.stat().st_size <= 150_000
            said = re.sub(r"<[^>]*>|\s+", "", file.read_text(encoding="utf-8"))
            assert re.sub(r"\s+", "", picture.title(data)) in said, f"{file.name} is older: make pictures"
