"""Text of a model's own, to train drafters on: what the target writes is what a drafter must foresee.

    rounds = write_texts(llm, folder, num_tokens=400_000)      or with prompts=read_prompts(file)

Without prompts the target invents them, as in Magpie (Xu et al., 2024, arXiv 2406.08464): it is shown its
chat template up to where the user speaks, perhaps the first words of the message, writes the rest of it
and then the answer. Some later prompts quote earlier answers, so that edits and copies occur too.

Conversations are written in rounds. A round leaves two files, a line per finished text: its messages, then
its answers. Whatever a file holds is not done again, and every draw depends only on the seed, the round
and the number of the conversation, so an interrupted run goes on to the same texts.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ... import LLM, SamplingParams
from .openings import CODE_COPY, KINDS

ROUND = 512  # conversations per round
MESSAGE_TOKENS, ANSWER_TOKENS = 128, 384  # the longest
QUOTE = 900  # characters of an earlier answer that a prompt may quote
MESSAGE_TEMPERATURE = 0.8
GREEDY_SHARE = 1 / 3
LOOP_WINDOW, MIN_VARIETY = 64, 0.5  # a loop: a window with fewer distinct runs of 4 tokens than that share
MIN_TOKENS = 8  # shortest answer that is kept
MARK = "\u2063here\u2063"  # finds the user's text in a rendered template


@dataclass(frozen=True)
class Text:
    """One conversation.

    Attributes:
        ids: all of it, with the template and the token that ended the answer.
        user, answer: where in `ids` the user's message and the answer begin.
        temperature: of the answer.
        kind: what it is about.
    """

    ids: list[int]
    user: int
    answer: int
    temperature: float
    kind: str


def write_texts(
    llm: LLM, folder: Path, num_tokens: int, seed: int = 0, prompts: Sequence[Any] | None = None
) -> list[list[Text]]:
    """Have the target write at least `num_tokens` tokens of text into `folder`; gives the texts by round.

    With `prompts`, each round answers the next of them, beginning anew when they are used up; without, the
    target invents the messages. Texts are cut where they begin to loop.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rounds: list[list[Text]] = []
    written = 0
    with tqdm(total=num_tokens, unit="token", desc="text", disable=None) as bar:
        while written < num_tokens:
            number = len(rounds)
            if prompts is None:
                recent = [text for texts in rounds[-2:] for text in texts]
                requests = _invented(llm, folder, number, seed, recent, bar)
            else:
                requests = _given(llm, number, seed, prompts)
            lines = _complete(llm, folder / f"answers-{number:04}.jsonl", requests, bar)
            texts = [text for line in lines if (text := _text(line)) is not None]
            if not texts:
                raise ValueError(
                    f"round {number} of the text gave only loops and answers of a few tokens; the model "
                    "may not know its chat template: give --prompts."
                )
            rounds.append(texts)
            gained = sum(len(text.ids) - text.user for text in texts)
            bar.update(gained)
            written += gained
    return rounds


def read_prompts(path: Path) -> list[Any]:
    """The prompts of a file of JSON lines, each {"prompt": text} or {"messages": [...]}: texts or lists."""
    prompts: list[Any] = []
    lines = path.read_text(encoding="utf-8-sig").rstrip().split("\n")  # a text may hold other line ends
    for number, line in enumerate(lines if lines[0] else [], 1):
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path} line {number} is not JSON ({error}).") from None
        if not isinstance(value, dict) or ("prompt" in value) == ("messages" in value):
            raise ValueError(f'{path} line {number} must be {{"prompt": text}} or {{"messages": [...]}}.')
        prompt = value.get("prompt", value.get("messages"))
        if not prompt or not isinstance(prompt, str if "prompt" in value else list):
            raise ValueError(f'{path} line {number}: "prompt" must be a text, "messages" a list, not empty.')
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f'{path} is empty; a line is {{"prompt": text}} or {{"messages": [...]}}.')
    return prompts


def variety(ids: Sequence[int], run: int = 4) -> float:
    """The share of distinct runs of `run` tokens: near 1 for prose, near 0 for a loop."""
    runs = [tuple(ids[i : i + run]) for i in range(len(ids) - run + 1)]
    return len(set(runs)) / len(runs) if runs else 1.0


def before_loop(ids: Sequence[int]) -> int:
    """How many of the ids come before the first loop: all, if there is none."""
    starts = range(0, len(ids) - LOOP_WINDOW + 1, 8)
    return next((i for i in starts if variety(ids[i : i + LOOP_WINDOW]) < MIN_VARIETY), len(ids))


def _given(llm: LLM, number: int, seed: int, prompts: Sequence[Any]) -> list[dict[str, Any]]:
    """The requests of a round that answers given prompts."""
    requests = []
    for i in range(min(ROUND, len(prompts))):
        rng = random.Random(f"{seed}-{number}-{i}")
        prompt = prompts[(number * ROUND + i) % len(prompts)]
        ids = llm.tokenizer.encode(prompt) if isinstance(prompt, str) else llm.chat_prompt(prompt)
        requests.append(_request(rng, ids, len(ids), "given", ANSWER_TOKENS))
    return requests


def _invented(
    llm: LLM, folder: Path, number: int, seed: int, texts: list[Text], bar: Any
) -> list[dict[str, Any]]:
    """The requests of a round whose messages the target itself writes; a few quote from `texts`."""
    quotable = [text for text in texts if text.kind not in ("copy", "text")]
    begun: list[tuple[random.Random, str, str, str]] = []  # and kind, system prompt, first words
    asked: list[dict[str, Any]] = []
    for i in range(ROUND):
        rng = random.Random(f"{seed}-{number}-{i}")
        name, system, words = _opening(llm, rng, quotable)
        begun.append((rng, name, system, words))
        if name not in ("text", "copy"):
            ids = llm.tokenizer.encode(_before_user(llm, system) + words, add_special_tokens=False)
            asked.append({**_request(rng, ids, 0, name, MESSAGE_TOKENS), "temperature": MESSAGE_TEMPERATURE})
    written = iter(_complete(llm, folder / f"messages-{number:04}.jsonl", asked, bar))
    requests = []
    for rng, name, system, message in begun:
        if name == "text":
            requests.append(_request(rng, llm.tokenizer.encode(message.rstrip()), 0, name, ANSWER_TOKENS))
            continue
        if name != "copy":
            message += llm.tokenizer.decode(next(written)["output"])
        start = llm.tokenizer.encode(_before_user(llm, system), add_special_tokens=False)
        ids = llm.chat_prompt(_messages(llm, system, message.strip() or "Hello!"))
        # What was quoted is in the training text already, as the answer that it was.
        user = len(ids) if name == "copy" else _common(start, ids)
        requests.append(_request(rng, ids, user, name, ANSWER_TOKENS))
    return requests


def _opening(llm: LLM, rng: random.Random, quotable: list[Text]) -> tuple[str, str, str]:
    """How a conversation begins: its kind, the system prompt, the first words, perhaps with a quotation."""
    name = rng.choices(list(KINDS), [kind.share for kind in KINDS.values()])[0]
    if name == "copy" and not quotable:
        name = "chat"
    kind, quote = KINDS[name], ""
    if name == "copy":
        text = rng.choice(quotable)
        quote = llm.tokenizer.decode(text.ids[text.answer :])[:QUOTE].strip()
        kind = CODE_COPY if "```" in quote else kind
    return name, rng.choice(kind.systems), rng.choice(kind.openings).replace("{}", quote)


def _request(rng: random.Random, ids: list[int], user: int, kind: str, limit: int) -> dict[str, Any]:
    warm = round(rng.uniform(0.7, 1.0), 2)
    return {
        "ids": ids,
        "user": user,
        "kind": kind,
        "temperature": 0.0 if rng.random() < GREEDY_SHARE else warm,
        "limit": limit,
        "seed": rng.getrandbits(31),
    }


def _before_user(llm: LLM, system: str) -> str:
    """The rendered chat template up to the user's first message."""
    text = llm.tokenizer.apply_chat_template(_messages(llm, system, MARK), add_generation_prompt=False)
    before, mark, _ = text.partition(MARK)
    if not mark:
        raise ValueError("the chat template does not show the user's message as it is; give --prompts.")
    return before


def _messages(llm: LLM, system: str, message: str) -> list[dict[str, str]]:
    """A conversation of one message, without the system prompt if the model's template refuses it."""
    user = [{"role": "user", "content": message}]
    both = [{"role": "system", "content": system}, *user]
    try:
        llm.tokenizer.apply_chat_template(both)
    except ValueError:
        return user
    return both if system else user


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _complete(llm: LLM, path: Path, requests: list[dict[str, Any]], bar: Any) -> list[dict[str, Any]]:
    """The requests, each with its "output": those in the file, and the others generated and appended."""
    done = _lines(path)
    todo = [i for i in range(len(requests)) if i not in done]
    params = [
        SamplingParams(temperature=r["temperature"], max_tokens=r["limit"], seed=r["seed"])
        for r in (requests[i] for i in todo)
    ]
    if todo:
        with path.open("a", encoding="utf-8") as file:

            def write(position: int, output: Any) -> None:
                index = todo[position]
                done[index] = {**requests[index], "index": index, "output": output.token_ids}
                file.write(json.dumps(done[index], separators=(",", ":")) + "\n")
                file.flush()
                bar.set_postfix_str(f"{path.stem}: {len(done)} of {len(requests)}")

            llm.generate([requests[i]["ids"] for i in todo], params, write)
    return [done[i] for i in range(len(requests))]


def _lines(path: Path) -> dict[int, dict[str, Any]]:
    """The finished lines of a file by index; a torn last one is removed."""
    if not path.is_file():
        return {}
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    try:
        return {line["index"]: line for line in map(json.loads, whole.splitlines())}
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{path} does not hold texts of this program; name another --work folder.") from None


def _text(line: dict[str, Any]) -> Text | None:
    """The text of a finished request up to where it loops, None if that is hardly anything."""
    prompt, output = line["ids"], line["output"][: before_loop(line["output"])]
    if len(output) < MIN_TOKENS:
        return None
    return Text(prompt + output, line["user"], len(prompt), line["temperature"], line["kind"])
