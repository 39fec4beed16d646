"""Tool calls through the server, with OpenAI's client. The model has random weights, so only a grammar
makes it call functions."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from nanospec import LLM, SamplingParams, SpecConfig
from nanospec.apps.batch.run import Batch, run_batch
from nanospec.apps.openai_format import CHAT
from nanospec.apps.serve.gate import HTTPError
from nanospec.apps.serve.requests import read_request
from nanospec.apps.tool_calls.formats import prepare
from nanospec.apps.tool_calls.offer import read_tools
from nanospec.apps.tool_calls.parser import parse
from nanospec.extras.grammar.grammar import Grammars
from tests.nanospec.apps.batch.test_run import tasks_of_lines
from tests.nanospec.apps.serve.conftest import MODEL, serving
from tests.tiny import checkpoint, tiny_tokenizer

TEMPLATE = """{% if tools %}{{ tools | tojson }}<tool_call>{"name": ..., "arguments": ...}{% endif %}
{%- for m in messages %}{{ m.role }}:{{ m.content }}
{%- for call in m.tool_calls %}{{ call.function.arguments.items() | list }}{% endfor %}
{{- m.tool_call_id }};{% endfor %}"""
SCHEMA = {
    "type": "object", "properties": {"ab": {"$ref": "#/$defs/n"}, "b": {"type": "boolean"}},
    "required": ["ab", "b"], "additionalProperties": False, "$defs": {"n": {"enum": [0, 12, "red"]}},
}  # fmt: skip


def tool(name: str, **more: Any) -> Any:
    return {"type": "function", "function": {"name": name, **more}}


TOOLS = [tool("green", parameters=SCHEMA), tool("now", description="Time")]
STRICT = [tool("green", parameters=SCHEMA, strict=True)]
NAMED: Any = {"type": "function", "function": {"name": "green"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "green", "arguments": '{"ab": 0}'}}
USER: Any = {"role": "user", "content": "ab red"}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("tools")
    backend = tiny_tokenizer(folder).backend
    backend.add_special_tokens(["[TOOL_CALLS]", "<|python_tag|>"])
    backend.add_tokens(["<tool_call>", "</tool_call>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    size = backend.get_vocab_size()
    checkpoint(folder, "llama", vocab_size=size, max_position_embeddings=2048, eos_token_id=0)
    spec = SpecConfig(num_speculative_tokens=4)
    return LLM(folder, spec=spec, dtype="float32", max_num_seqs=4, max_model_len=1024)


@pytest.fixture(scope="module")
def client(llm: LLM) -> Iterator[openai.OpenAI]:
    with serving(llm) as served:
        yield openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=30)


def is_green(name: str, text: str) -> bool:
    arguments = json.loads(text)
    return (name, [*arguments]) == ("green", ["ab", "b"]) and arguments["ab"] in (0, 12, "red")


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_forced_calls_match_schemas_streamed_or_not_with_or_without_drafts(
    client: openai.OpenAI, choice: Any
) -> None:
    drafted = 0
    for seed in range(3):
        options: Any = {"model": MODEL, "seed": seed, "max_tokens": 400, "messages": [USER], "tools": TOOLS}
        options |= {"tool_choice": choice, "parallel_tool_calls": seed > 0}
        whole = client.chat.completions.create(**options)
        plain = client.chat.completions.create(**options, extra_body={"num_speculative_tokens": 0})
        with client.chat.completions.stream(**options) as stream:
            streamed = stream.get_final_completion()
        drafted += whole.usage.speculation["num_drafted"]
        [each] = streamed.choices
        messages: list[Any] = [answer.choices[0].message for answer in (whole, plain, streamed)]
        found, *others = [[(c.function.name, c.function.arguments) for c in m.tool_calls] for m in messages]
        assert others == [found, found]
        assert len(found) >= 1 if seed else len(found) == 1
        assert all(is_green(*call) or (call == ("now", "{}") and choice == "required") for call in found)
        assert each.message.role == "assistant"
        assert each.finish_reason == whole.choices[0].finish_reason == "tool_calls"
        assert each.message.content is None is whole.choices[0].message.content
    assert drafted


TEMPLATES = {  # and the token that starts a call
    "hermes": ('<tool_call> "arguments"', "<tool_call>"),
    "llama3": ('<|start_header_id|> "parameters": ', "{"),
    "mistral": ("[TOOL_CALLS]", "[TOOL_CALLS]"),
    "mistral-args": ("[TOOL_CALLS][ARGS]", "[TOOL_CALLS]"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_grammars_of_all_formats(llm: LLM, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call is forced, or follows text and a marker, which a bias makes likely, or is JSON."""
    template, token = TEMPLATES[name]
    monkeypatch.setattr(llm.tokenizer, "tool_template", "tools" + template)
    free: dict[str, Any] = {"logit_bias": {llm.tokenizer.backend.token_to_id(token): 100.0}}
    answer = {"type": "json_schema", "json_schema": {"schema": {"const": 12}}}
    json_or_call = {**free, "response_format": answer}
    for tools, choice, more in ((TOOLS, NAMED, {}), (STRICT, None, free), (STRICT, None, json_or_call)):
        offered = read_tools({"tools": tools, "tool_choice": choice, "parallel_tool_calls": False})
        assert offered is not None
        params, make = prepare(offered, llm.tokenizer, SamplingParams(max_tokens=100, seed=1, **more))
        [done] = llm.generate("ab", params)[0].outputs
        text, [call] = parse(done.text, make)
        assert (text, done.finish_reason) == ("", "stop")
        assert is_green(*call["function"].values())


def test_unconstrained_output_is_text(client: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "seed": 1, "max_tokens": 30, "messages": [USER], "logprobs": True}
    plain = client.chat.completions.create(**options, tools=TOOLS).choices[0]
    chunks = [c.choices[0] for c in client.chat.completions.create(**options, tools=TOOLS, stream=True)]
    assert plain.message.content == "".join(chunk.delta.content or "" for chunk in chunks)
    assert plain.finish_reason == chunks[-1].finish_reason != "tool_calls"
    tokens = [e.token for chunk in chunks if chunk.logprobs for e in chunk.logprobs.content or []]
    assert tokens == [e.token for e in (plain.logprobs and plain.logprobs.content) or []]


def test_prompt_has_tools_calls_and_results(llm: LLM) -> None:
    result = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "12"}]}
    cut = {**CALL, "function": {"name": "now", "arguments": "{"}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, result]

    def prompt(messages: Any = messages, **more: Any) -> str:
        [ids] = read_request(llm, CHAT, {"messages": messages, **more}).prompts
        return llm.tokenizer.decode(ids, skip_special_tokens=False)

    told = "user:ab red;assistant:[('ab', 0)];tool:12c1;"
    assert prompt() == prompt(tools=[]) == told
    offered = json.dumps([tool("green", parameters=SCHEMA)])
    expected = f'{offered}<tool_call>{{"name": ..., "arguments": ...}}{told}'
    assert prompt(tools=STRICT) == prompt(tools=STRICT, tool_choice="required") == expected
    # Calls that are not allowed must not change the start of the prompt.
    assert prompt(tools=STRICT, tool_choice="none") == expected
    with pytest.raises(HTTPError, match="cannot render"):  # arguments that do not parse remain a string
        prompt([USER, {"role": "assistant", "tool_calls": [cut]}])


def test_batch_line(llm: LLM, tmp_path: Path) -> None:
    body = {"messages": [USER], "tools": STRICT, "tool_choice": "required", "seed": 1, "max_tokens": 99}
    line: dict[str, Any] = {"custom_id": "a", "url": CHAT, "body": {**body, "parallel_tool_calls": False}}
    [task] = tasks_of_lines(tmp_path, line)
    [other] = tasks_of_lines(tmp_path, {**line, "body": {**line["body"], "tools": TOOLS}})
    assert task.key != other.key
    batch = Batch("x", "-", [task], set(), file := io.BytesIO())
    run_batch(llm, batch, MODEL)
    [choice] = json.loads(file.getvalue())["response"]["body"]["choices"]
    [call] = choice["message"]["tool_calls"]
    assert is_green(*call["function"].values())
    assert (choice["finish_reason"], call["type"]) == ("tool_calls", "function")


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": {}}, "tools", "must be a list of"),
    ({"tools": [{"type": "custom"}]}, "tools", "{'type': 'custom'}, but it must"),
    ({"tools": [tool("a b")]}, "tools", "the name 'a b'"),
    ({"tools": [tool("f", parameters={"type": "array"})]}, "tools", "must be a JSON schema of an object"),
    ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls", "must be true or false"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "'any' must be"),
    ({"tools": TOOLS, "tool_choice": tool("f")}, "tool_choice", "with the name of one of tools"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": [tool("f", strict=True, parameters={"$ref": "#/x"})]}, "tools", "tools: this grammar"),
    ({"tools": TOOLS, "response_format": {"type": "regex", "regex": "a"}}, "response_format", "combined"),
    ({"functions": [{"name": "f"}]}, "functions", "not supported; use tools"),
    ({"messages": [{"role": "tool", "content": "1"}]}, "messages", 'tool needs a "tool_call_id"'),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]}, "messages", "but each must be"),
]


@pytest.mark.parametrize(("body", "param", "message"), BAD, ids=[message for *_, message in BAD])
def test_bad_input(llm: LLM, body: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(HTTPError, match=message) as error:
        read_request(llm, CHAT, {"messages": [USER], **body})
    assert (error.value.status_code, error.value.param) == (400, param)


def test_models_without_a_known_format(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    for template, message in (
        ("{{ messages }}", "by this model's chat template"),
        ("tools <tool_call>", "only in those of Hermes and Qwen"),
    ):
        monkeypatch.setattr(llm.tokenizer, "tool_template", template)
        with pytest.raises(HTTPError, match=f"tools are not supported .*{message}"):
            read_request(llm, CHAT, {"messages": [USER], "tools": TOOLS})


def test_grammar_ends_or_continues_after_a_newline(llm: LLM) -> None:
    """Qwen generates a newline after a call. If only another call could follow, the output would not end."""
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
    tools = read_tools({"tools": TOOLS, "tool_choice": "required"})
    assert tools is not None
    params, _ = prepare(tools, llm.tokenizer, SamplingParams())
    guide = Grammars(llm.tokenizer, llm.tokenizer.vocab_size).guide(params.response_format or {})
    for _ in range(2):
        tokens = llm.tokenizer.encode(call, add_special_tokens=False)
        assert (guide.advance(tokens), guide.error) == (len(tokens), None)
        assert guide.plan(tokens, 0, 1, 8).masks[0][0] & 1  # token 0 is EOS


def test_call_cut_by_a_stop_string_is_not_reported_as_complete(client: openai.OpenAI) -> None:
    options: Any = {"tools": STRICT, "tool_choice": NAMED, "stop": ['"b"'], "max_tokens": 200}
    for stream in (False, True):
        answer: Any = client.chat.completions.create(model=MODEL, messages=[USER], stream=stream, **options)
        [*_, last] = answer if stream else [answer]
        assert last.choices[0].finish_reason == "stop"
