"""Measure the perplexity of a model by weight format, and the bytes of its weights.

    python bench/perplexity.py MODEL[:int8|int4][@float32] ... [--windows 24] [--llama FILE.gguf]

A model is a folder or a GGUF file, `:int8` or `:int4` quantizes it while loading, and `@float32` computes in
float32 with dequantized weights. A window has 512 tokens; half of the windows are from a play, the others
from code edits. The first 64 tokens of a window are not scored. `--llama` measures a file with llama.cpp, in
the environment of `make peers`. Requires the evaluation data.
"""

import json
import math
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from bench import common
from bench.cpu import python_of
from nanospec.kernels.batch import Batch, Chunk
from nanospec.kernels.table import Table
from nanospec.models.decoder import Model
from nanospec.models.folders import resolve_model
from nanospec.models.weights import load_model
from nanospec.text.tokenizer import Tokenizer

LENGTH, CONTEXT, BLOCK_SIZE = 512, 64, 16
LLAMA = """
import json, sys
import numpy as np
from llama_cpp import Llama
model, windows, context = json.loads(sys.stdin.read())
llm = Llama(model, n_ctx=len(windows[0]), n_batch=len(windows[0]), logits_all=True, verbose=False)
total = 0.0
for ids in windows:
    llm.reset()
    llm.eval(ids)
    logits = np.array(llm.scores[context - 1 : len(ids) - 1], dtype=np.float64)
    logits -= logits.max(1, keepdims=True)
    total -= float((logits[range(len(logits)), ids[context:]] - np.log(np.exp(logits).sum(1))).mean())
print(json.dumps(total / len(windows)))
"""


def read_windows(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Return `count` windows of token ids, alternating between the play and code."""
    code = "\n\n".join(text for pair in common.code_edit_pairs(100) for text in pair)
    texts = [tokenizer.encode(text[: 8 * count * LENGTH]) for text in (common.shakespeare(), code)]
    windows = [ids[i * LENGTH : (i + 1) * LENGTH] for i in range((count + 1) // 2) for ids in texts]
    return [ids for ids in windows if len(ids) == LENGTH][:count]


@torch.inference_mode()
def loss(model: Model, ids: list[int]) -> float:
    """Return the mean negative log-likelihood of the tokens of a window after the first `CONTEXT`."""
    table = Table.empty(1, LENGTH, BLOCK_SIZE, 0, "cpu")
    table.block_table.copy_(torch.arange(LENGTH // BLOCK_SIZE)[None])
    table.tokens[0] = torch.tensor(ids, dtype=torch.int32)
    batch = Batch.from_chunks(table, [Chunk(0, 0, LENGTH)])
    hidden = model.forward(batch, model.allocate_kv_cache(LENGTH // BLOCK_SIZE, BLOCK_SIZE))
    logits: Tensor = model.logits(hidden[CONTEXT - 1 : -1])
    return float(torch.nn.functional.cross_entropy(logits.float(), torch.tensor(ids[CONTEXT:])))


def measure(name: str, count: int) -> dict[str, object]:
    """Return the row of a model, named as in the module docstring."""
    path, _, dtype = name.partition("@")
    path, _, quantization = path.partition(":")
    folder = resolve_model(path)
    dtypes = torch.float32 if dtype else torch.bfloat16
    model = load_model(folder, dtypes, "cpu", quantization=quantization or None)
    windows = read_windows(Tokenizer(folder), count)
    losses = [loss(model, ids) for ids in windows]
    row = {"perplexity": round(math.exp(sum(losses) / len(losses)), 4), "windows": len(losses)}
    return {"model": Path(path).name + name[len(path) :], **row, "weight_bytes": model.weight_bytes}


def measure_llama(path: str, count: int) -> dict[str, object]:
    """Return the row of a GGUF file in llama.cpp."""
    windows = read_windows(Tokenizer(resolve_model(path)), count)
    work = json.dumps([str(Path(path).resolve()), windows, CONTEXT])
    run = [str(python_of("llama.cpp")), "-c", LLAMA]
    found = json.loads(subprocess.run(run, input=work, stdout=subprocess.PIPE, text=True, check=True).stdout)
    row = {"perplexity": round(math.exp(found), 4), "windows": len(windows)}
    return {"model": f"llama.cpp {Path(path).name}", **row, "weight_bytes": Path(path).stat().st_size}


def main() -> None:
    parser = common.parser(__doc__, windows=24, name="perplexity")
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--llama", nargs="*", default=[], metavar="FILE.gguf")
    args = parser.parse_args()
    rows = []
    for names, run in ((args.models, measure), (args.llama, measure_llama)):
        for name in names:
            rows.append(run(name, args.windows))
            print(rows[-1], flush=True)
    common.save(args.name, {"machine": common.environment(), "rows": rows}, args.out)


if __name__ == "__main__":
    main()
