"""Training parallel heads: text, hidden states, training, each resumed as if nothing had happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import corpus
import pytest
import tokenizers
import torch
import torch.nn.functional as F
import train_heads
import training
from corpus import Text, before_loop, read_prompts, variety, write_texts
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor
from train_heads import Settings, Trainer, measure
from training import Data, FrozenCrossEntropy

from nanospec import LLM, SamplingParams, SpecConfig
from nanospec.models.decoder import Model
from nanospec.models.heads import Heads
from tests.tiny import Pages, tiny_config, tiny_model
from tests.util import assert_close

SETTINGS = Settings(num_heads=2, vocab=40, epochs=3, batch=64, lr=0.02)


# Training.


def counting(model: Model, number: int = 24, length: int = 30) -> list[Text]:
    """Texts that count upwards, modulo 40, from anywhere: easy to foresee."""
    texts = []
    for i in range(number):
        ids = [(7 * i + j) % 40 for j in range(length + i % 5)]
        texts.append(Text(ids, 2, 6, 0.0 if i % 3 == 0 else 0.8, "chat"))
    return texts


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model(tie_word_embeddings=True)


@pytest.fixture(scope="module")
def data(model: Model, tmp_path_factory: pytest.TempPathFactory) -> tuple[Data, Data]:
    rounds = [counting(model), counting(model, 9)]
    parts = training.cached_hidden(model, rounds, tmp_path_factory.mktemp("hidden"))
    return training.split(rounds, parts)


def trainer(model: Model, data: tuple[Data, Data], settings: Settings = SETTINGS) -> Trainer:
    vocab = training.choose_vocab(data[0], settings.vocab, model.config.vocab_size)
    return Trainer(model, settings, data[0], vocab)


class NoBar:
    def update(self, count: int) -> None:
        pass


def test_hidden_states_are_those_of_each_text_alone(model: Model) -> None:
    texts = counting(model, 5)
    parts = training.hidden_states(model, texts, NoBar()).split([len(text.ids) - 1 for text in texts])
    for text, part in zip(texts, parts, strict=True):
        expected = Pages(model, 1, 64).step({0: torch.tensor(text.ids)})[0]
        assert_close(model.logits(part), expected[1:], 1e-5)


def test_hidden_states_are_not_computed_twice(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = [counting(model, 3), counting(model, 5), counting(model, 4)]
    expected = training.cached_hidden(model, rounds, tmp_path / "at once")
    training.cached_hidden(model, rounds[:2], tmp_path / "resumed")
    done: list[int] = []
    compute = training.hidden_states

    def counted(model: Model, texts: list[Text], bar: Any) -> Tensor:
        done.append(len(texts))
        return compute(model, texts, bar)

    monkeypatch.setattr(training, "hidden_states", counted)
    resumed = training.cached_hidden(model, rounds, tmp_path / "resumed")
    assert done == [4]
    assert all(torch.equal(a, b) for a, b in zip(expected, resumed, strict=True))
    with pytest.raises(ValueError, match=r"hidden-0000.safetensors does not belong to the texts"):
        training.cached_hidden(model, [rounds[1]], tmp_path / "resumed")


def test_a_head_begins_as_the_targets_own(model: Model, data: tuple[Data, Data]) -> None:
    for layers in (1, 2):
        new = trainer(model, data, Settings(num_heads=3, num_layers=layers, vocab=0))
        guesses = new.guess(data[1].hidden)
        own = model.logits(data[1].hidden).topk(train_heads.RANKS).indices
        assert all(torch.equal(guesses[:, head], own) for head in range(3))


@pytest.mark.parametrize("labels", ["soft", "hard"])
def test_frozen_cross_entropy_is_the_usual_one(labels: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, projection = (torch.randn(n, 8, generator=generator, dtype=torch.float64) for n in (5, 11))
    x.requires_grad_()
    weight = torch.rand(5, generator=generator, dtype=torch.float64)
    logits = torch.randn(5, 11, generator=generator, dtype=torch.float64)
    target = logits.softmax(-1) if labels == "soft" else logits.argmax(-1)
    expected = (F.cross_entropy(x @ projection.T, target, reduction="none") * weight).sum() * 3
    (gradient,) = torch.autograd.grad(expected, x)
    actual = FrozenCrossEntropy.apply(x, projection, target, weight) * 3
    assert_close(actual, expected, 1e-6)  # it sums in float32
    assert_close(torch.autograd.grad(actual, x)[0], gradient, 1e-6)


@pytest.mark.parametrize("settings", [
    Settings(2, 1, 40, 40, 64, 0.02, labels="hard"),
    Settings(2, 2, 40, 40, 64, 0.02, labels="hard"),
    Settings(1, 1, 0, 40, 64, 0.02, labels="soft"),
], ids=["hard", "hard-2-blocks", "soft-all-tokens"])  # fmt: skip
def test_training_lowers_the_loss(
    model: Model, data: tuple[Data, Data], tmp_path: Path, settings: Settings
) -> None:
    new = trainer(model, data, settings)
    before = measure(new.guess, data[1])["all"]
    history = train_heads.train(new, data[1], tmp_path / "state.pt")
    after = measure(new.guess, data[1])["all"]
    assert len(history) == settings.epochs
    assert history[-1]["loss"] < (0.5 if settings.labels == "hard" else 0.99) * history[0]["loss"]
    if settings.labels == "hard":  # a random model knows nothing of counting, its text does
        assert min(after["accuracy"]) > 0.9 > 0.5 > max(before["accuracy"])
        assert after["tokens_per_step"] > 2.5 > 1.5 > before["tokens_per_step"]


@pytest.mark.parametrize("stop", [3, 10, 13], ids=lambda step: f"step{step}")
def test_training_goes_on_to_the_same_result(
    model: Model, data: tuple[Data, Data], tmp_path: Path, stop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_heads, "CHECKPOINT_SECONDS", -1.0)
    through = trainer(model, data)
    expected = train_heads.train(through, data[1], tmp_path / "through.pt")
    assert through.num_steps > 14
    step = Trainer.step

    def interrupted(self: Trainer) -> float:
        if self.step_number == stop:
            raise KeyboardInterrupt
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train_heads.train(trainer(model, data), data[1], tmp_path / "resumed.pt")
    resumed = trainer(model, data)
    assert train_heads.train(resumed, data[1], tmp_path / "resumed.pt") == expected
    assert torch.equal(resumed.weight, through.weight)
    assert torch.equal(resumed.bias, through.bias)
    assert train_heads.train(trainer(model, data), data[1], tmp_path / "resumed.pt") == expected  # all done


def test_a_saved_head_is_the_trained_one(model: Model, data: tuple[Data, Data], tmp_path: Path) -> None:
    for vocab in (40, 0):
        new = trainer(model, data, Settings(2, 2, vocab, 2, 64, 0.02, labels="hard"))
        train_heads.train(new, data[1], tmp_path / f"{vocab}.pt")
        train_heads.save_heads(tmp_path / "heads.safetensors", new, {"seed": 0})
        heads = Heads.load(tmp_path / "heads.safetensors", model)
        assert (heads.token_map is None) == (vocab == 0)
        expected = (new.forward(data[1].hidden) @ new.projection.T).transpose(0, 1)
        assert_close(heads.logits(data[1].hidden), expected, 1e-2)  # it is saved in bf16
        with safe_open(tmp_path / "heads.safetensors", "pt") as file:
            assert json.loads(file.metadata()["nanospec"]) == {"seed": 0}


def test_measuring_counts_what_a_chain_would_gain(data: tuple[Data, Data]) -> None:
    held_out = data[1]

    def oracle(offset: int) -> Any:
        place = iter(held_out.hidden.split(train_heads.EVAL_ROWS))
        ends = torch.cat([held_out.tokens, torch.full((4,), -1)])

        def guess(part: Tensor) -> Tensor:
            assert torch.equal(part, next(place))
            rows = torch.arange(len(part))
            return torch.stack([ends[rows + 2 + head] + offset for head in range(2)], 1)[..., None]

        return guess

    for offset, accuracy, least, most in ((0, 1.0, 2.7, 3.0), (50, 0.0, 1.0, 1.0)):
        figures = measure(oracle(offset), held_out)
        for part in figures.values():
            assert part["accuracy"] == [accuracy] * 2
            assert least <= part["tokens_per_step"] <= most
        assert figures["greedy"]["positions"] + figures["sampled"]["positions"] == figures["all"]["positions"]


def test_the_vocabulary_is_the_most_frequent(data: tuple[Data, Data]) -> None:
    tokens = torch.tensor([5, 5, 5, 9, 9, 3])
    few = Data(torch.empty(6, 1), tokens, tokens, [])
    assert training.choose_vocab(few, 2, 64).tolist() == [5, 9]
    assert training.choose_vocab(few, 5, 64).tolist() == [0, 1, 3, 5, 9]
    assert training.choose_vocab(few, 0, 7).tolist() == list(range(7))


def test_the_heads_that_are_here_foresee_the_model(smollm2: Path) -> None:
    file = smollm2.parent / "heads" / f"{smollm2.name}.safetensors"
    if not file.is_file():
        pytest.skip(f"needs {file.name}: python weights/train_heads.py --model {smollm2.name}")
    llm = LLM(smollm2, spec=SpecConfig(method="none"), max_model_len=512)
    prompt = llm.chat_prompt([{"role": "user", "content": "How do I bake bread? Explain step by step."}])
    output = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=120))[0].token_ids
    text = Text(prompt + output, len(prompt), len(prompt), 0.0, "chat")
    model = llm.engine.model
    hidden = training.hidden_states(model, [text], NoBar())
    heads = Heads.load(file, model)
    _, held_out = training.split([[text]] * 2, [hidden] * 2)
    accuracy = measure(lambda part: heads.top(part, 1), held_out)["all"]["accuracy"]
    assert len(accuracy) == heads.num_heads
    assert accuracy[0] > 0.2  # far from chance; a tiny model, and only the first guess


# Text.


def test_loops_are_found() -> None:
    prose = [(i * i) % 211 for i in range(150)]
    assert variety(prose) > 0.9 > 0.2 > variety([1, 2, 3] * 50)
    assert before_loop(prose) == 150
    assert before_loop([1, 2, 3] * 50) == 0
    assert 64 <= before_loop(prose[:100] + [1, 2, 3] * 50) <= 100


SPECIAL = ["<e>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint with a tokenizer of bytes and a chat template."""
    folder = tmp_path_factory.mktemp("bytes")
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIAL]
    config = tiny_config(vocab_size=len(letters), max_position_embeddings=1024)
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.ones(shape)
        if len(shape) == 1
        else 1.5 * torch.randn(shape, generator=generator) / shape[1] ** 0.5
        for name, shape in config.parameter_shapes().items()
    }
    described = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "eos_token_id": [letters.index("<e>"), letters.index("<|im_end|>")],
    }
    (folder / "config.json").write_text(json.dumps(described))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    save_file(weights, folder / "model.safetensors")
    backend = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of a few short texts."""
    monkeypatch.setattr(corpus, "ROUND", 12)
    monkeypatch.setattr(corpus, "MESSAGE_TOKENS", 10)
    monkeypatch.setattr(corpus, "ANSWER_TOKENS", 24)
    monkeypatch.setattr(corpus, "QUOTE", 30)
    monkeypatch.setattr(training, "HELD_OUT", 4)


def open_llm(folder: Path) -> LLM:
    return LLM(folder, spec=SpecConfig(method="none"), max_model_len=512, dtype="float32")


def lines_left(folder: Path, torn: bytes = b"") -> None:
    """As a run that was killed would have left it: the last file has few lines and perhaps a torn one."""
    file = sorted(folder.glob("*.jsonl"))[-1]
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:2]) + torn)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("given", [False, True], ids=["own", "given"])
def test_text_goes_on_to_the_same_text(folder: Path, tmp_path: Path, given: bool) -> None:
    prompts = ["abc", [{"role": "user", "content": "Hi"}]] if given else None
    amount = 100 if given else 1200
    llm = open_llm(folder)
    expected = write_texts(llm, tmp_path / "text", amount, 3, prompts)
    written = sum(len(text.ids) - text.user for texts in expected for text in texts)
    assert written >= amount
    assert len(expected) > 1
    for text in (text for texts in expected for text in texts):
        assert 0 <= text.user <= text.answer < len(text.ids)
    for number in (1, 0):
        for file in (tmp_path / "text").glob(f"*-{number + 1:04}.jsonl"):
            file.unlink()
        lines_left(tmp_path / "text", b'{"index": 3, "ids": [1,')
        assert write_texts(llm, tmp_path / "text", amount, 3, prompts) == expected
    assert write_texts(llm, tmp_path / "other", amount, 4, prompts) != expected


@pytest.mark.usefixtures("small")
def test_a_user_without_a_system_prompt(folder: Path, tmp_path: Path) -> None:
    """Some templates refuse system prompts; the text then does without."""
    refusing = tmp_path / "refusing"
    refusing.mkdir()
    for file in folder.iterdir():
        (refusing / file.name).write_bytes(file.read_bytes())
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    (refusing / "chat_template.jinja").write_text(refusal + TEMPLATE)
    assert write_texts(open_llm(refusing), tmp_path / "text", 20)


# The command.


def command(folder: Path, out: Path, *more: str) -> list[str]:
    options = {"--model": folder, "--out": out, "--tokens": 500, "--num-heads": 2, "--vocab": 50}
    options |= {"--epochs": 2, "--batch": 64, "--max-num-seqs": 8}
    return [str(word) for option in options.items() for word in option] + list(more)


@pytest.mark.usefixtures("small")
def test_the_command_resumes_to_the_same_file(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    once, twice = tmp_path / "once.safetensors", tmp_path / "twice.safetensors"
    assert train_heads.main(command(folder, once)) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["bytes"] == once.stat().st_size
    assert len(figures["held_out"]["all"]["accuracy"]) == 2
    for stage in ("cached_hidden", "train", "measure"):
        with monkeypatch.context() as patch:
            patch.setattr(train_heads, stage, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
            assert train_heads.main(command(folder, twice)) == 130
        assert "goes on from here" in capsys.readouterr().err
        assert not twice.exists()
    lines_left(tmp_path / ".twice-work" / "text")
    assert train_heads.main(command(folder, twice)) == 0
    first, second = load_file(once), load_file(twice)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.usefixtures("small")
def test_a_work_folder_has_one_owner(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "heads.safetensors"
    training.claim(tmp_path / ".heads-work", folder, None, seed=1)
    assert train_heads.main(command(folder, out)) == 1
    assert "was begun with seed=1, not 0; name another folder or delete it." in capsys.readouterr().err


BAD: dict[str, tuple[list[str], str]] = {
    "model": (["--model", "nothing"], "there is no model 'nothing'"),
    "tokens": (["--tokens", "0"], "--tokens=0 must be an integer of at least 1."),
    "heads": (["--num-heads", "0"], "num_heads=0 must be an integer from 1 to 16."),
    "labels": (["--labels", "mushy"], "labels='mushy' must be 'soft' or 'hard'."),
    "out": (["--out", "heads.bin"], "--out heads.bin must end in .safetensors."),
    "prompts": (["--prompts", "nowhere.jsonl"], "No such file"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_gets_one_sentence(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    more, sentence = BAD[what]
    assert train_heads.main(command(folder, tmp_path / "heads.safetensors", *more)) == 1
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert error[0].startswith("Cannot train heads for ")
    assert sentence in error[0]


@pytest.mark.parametrize(("line", "sentence"), [
    ("", "is empty; a line is"),
    ("{", "line 1 is not JSON"),
    ('{"text": "a"}', 'line 1 must be {"prompt": text} or'),
    ('{"prompt": ""}', "must be a text"),
    ('{"messages": "a"}', "a list, not empty"),
], ids=["empty", "torn", "unknown", "blank", "no-list"])  # fmt: skip
def test_bad_prompts_are_refused(tmp_path: Path, line: str, sentence: str) -> None:
    (tmp_path / "prompts.jsonl").write_text(line)
    with pytest.raises(ValueError, match=sentence):
        read_prompts(tmp_path / "prompts.jsonl")
