"""Sampling defaults of a model, from the generation_config.json in its folder.

All entry points (`LLM`, command line, batches, server) use them for the parameters that a request does not
set, as vLLM does with generation_config="auto". An explicit `SamplingParams()` keeps its own defaults.

Decoding is greedy if do_sample is false, or if the file sets neither do_sample nor a temperature, as in
transformers; do_sample without a temperature means 1. The other parameters apply regardless of do_sample;
max_new_tokens is not used.
"""

from pathlib import Path

from ..config import SamplingParams
from ..text.files import errors_of, read_json
from ..text.validation import shown

NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def default_params(folder: Path) -> SamplingParams:
    """Return the sampling defaults of the model in `folder`. Raises ValueError if the file is invalid."""
    path = folder / "generation_config.json"
    config = read_json(path) if path.is_file() else {}
    values = {name: config[name] for name in NAMES if config.get(name) is not None}
    do_sample = config.get("do_sample")
    if do_sample is False or "temperature" not in values:
        values["temperature"] = float(do_sample is True)
    with errors_of(path):
        if not isinstance(do_sample, bool | None):
            raise ValueError(f"do_sample={shown(do_sample)} must be true or false.")
        return SamplingParams(**values)
