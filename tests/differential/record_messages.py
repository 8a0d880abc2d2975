#!/usr/bin/env python3
"""Records the chats that engines make of Anthropic's Messages bodies.

    record_messages.py VLLM SGLANG > tests/fixtures/messages/chats.jsonl

VLLM, SGLANG: the unpacked wheels of vllm(-cpu) 0.32.0 and sglang 0.5.23. Writes {"id", "engine", "late_system", "body",
"chat"}, without "chat" where the engine refused the body. The engines' own conversions run; every other module of theirs
is a stand-in that takes what it is given. Needs pydantic; `src/prompt/messages_tests.rs` and `tests/prompt_native.rs` read
the file. Of SGLang's server this is stated here: a reasoning parser with `<think>` for its marks, whose switch is
`enable_thinking`.
"""

import importlib.abc
import importlib.machinery
import json
import sys
import types
from types import SimpleNamespace
from unittest.mock import MagicMock

CONVERSIONS = {"vllm": "vllm.entrypoints.anthropic", "sglang": "sglang.srt.entrypoints.anthropic"}
CHAT_MEMBERS = ("tools", "tool_choice", "reasoning_effort", "chat_template_kwargs")


class Request(SimpleNamespace):
    """A chat request that keeps its members as they are."""

    def __init__(self, **members):
        super().__init__(**dict.fromkeys((*CHAT_MEMBERS, "response_format", "parallel_tool_calls")) | members)


class AsGiven:
    @staticmethod
    def model_validate(value):
        return value


class Tool(dict):
    def __init__(self, **members):
        super().__init__(**members)
        self.function = SimpleNamespace(**members.get("function", {}))


def pd_routing_fields():
    import pydantic

    class PDRoutingFields(pydantic.BaseModel):
        def pd_routing_kwargs(self):
            return {}

    return PDRoutingFields


class StandIn(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        known = {
            "ChatCompletionRequest": Request,
            "ChatCompletionToolsParam": AsGiven,
            "StreamOptions": AsGiven,
            "ChatCompletionNamedToolChoiceParam": AsGiven,
            "Tool": Tool,
            "ToolChoice": dict,
            "ToolChoiceFuncName": dict,
            "OpenAIServingChat": type("OpenAIServingChat", (), {}),
            "MMPayload": str,
            "VLLM_MAX_STOP_STRINGS": 4,
            "resolve_return_mm_kwargs_alias": lambda data: data,
        }
        if name == "PDRoutingFields":
            return pd_routing_fields()
        return known.get(name, MagicMock())


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for all of the engines but their conversions."""

    def __init__(self, roots):
        self.roots = roots

    def find_spec(self, name, path, target=None):
        engine = name.split(".")[0]
        if engine not in (*self.roots, "fastapi", "starlette") or name.startswith(tuple(CONVERSIONS.values())):
            return None
        spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
        spec.submodule_search_locations = [f"{self.roots.get(engine, '')}/{name.replace('.', '/')}"]
        return spec

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        pass


def vllm(late_system):
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    return lambda body: AnthropicServingMessages.to_chat_completion_request(
        AnthropicMessagesRequest.model_validate(body), merge_inline_system=not late_system
    )


def sglang(late_system):
    from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from sglang.srt.entrypoints.anthropic.serving import AnthropicServing

    def switch(request, enabled):
        request.chat_template_kwargs = {**(request.chat_template_kwargs or {}), "enable_thinking": enabled}

    chat = MagicMock(
        supports_inline_system=late_system,
        supports_native_reasoning_history=lambda: False,
        wrap_reasoning_history=lambda text: f"<think>{text}\n</think>",
        apply_reasoning_enabled=switch,
    )
    serving = AnthropicServing(chat)
    return lambda body: serving._convert_to_chat_completion_request(AnthropicMessagesRequest.model_validate(body))


def text(value):
    return {"type": "text", "text": value}


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def bodies():
    weather = {
        "name": "weather",
        "description": "Weather of a place",
        "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    }
    bare = {"name": "bare", "input_schema": {"properties": {}}}
    strict = {"name": "strict", "description": "", "strict": True, "input_schema": {"type": "object"}}
    made = {}
    made["plain"] = dict(messages=[user("Hello, world")])
    made["system_text"] = dict(system="Be brief.", messages=[user("Hi"), assistant("Hello"), user("More")])
    made["system_empty"] = dict(system="", messages=[user("Hi")])
    made["system_spaces"] = dict(system="  ", messages=[user("Hi")])
    made["system_blocks"] = dict(
        system=[text("One."), {"type": "text", "text": "Two.", "cache_control": {"type": "ephemeral"}}, text("")],
        messages=[user([text("Hi")])],
    )
    made["billing_header"] = dict(
        system=[text("x-anthropic-billing-header: cch=1f2e"), text("You help.")], messages=[user("Hi")]
    )
    made["two_texts"] = dict(
        messages=[user([text("First"), text("Second")]), assistant([text("A"), text("B")]), user([text("C")])]
    )
    made["empty_texts"] = dict(messages=[user([text(""), text("x")]), assistant([text("")]), user([text("y")])])
    made["tool_round"] = dict(
        tools=[weather, bare],
        messages=[
            user("Weather in Köln?"),
            assistant(
                [
                    text("Let me see."),
                    {
                        "type": "tool_use",
                        "id": "toolu_1",
                        "name": "weather",
                        "input": {"place": "Köln", "n": 1.5, "deep": {"list": [1, None, True, '"q"']}},
                    },
                ]
            ),
            user([{"type": "tool_result", "tool_use_id": "toolu_1", "content": "12 °C"}]),
        ],
    )
    made["tool_blocks"] = dict(
        tools=[weather],
        tool_choice={"type": "auto"},
        messages=[
            user("x"),
            assistant(
                [
                    {"type": "tool_use", "id": "t1", "name": "weather", "input": {}},
                    {"type": "tool_use", "id": "t2", "name": "weather", "input": {"place": "B"}},
                ]
            ),
            user(
                [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [text("one"), text("two")]},
                    {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
                    text("go on"),
                ]
            ),
        ],
    )
    made["text_before_result"] = dict(
        messages=[
            user("x"),
            assistant([{"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}]),
            user([text("before"), {"type": "tool_result", "tool_use_id": "t1", "content": "r"}, text("after")]),
        ]
    )
    made["strict_tool"] = dict(
        tools=[strict], tool_choice={"type": "any", "disable_parallel_tool_use": True}, messages=[user("x")]
    )
    made["named_tool"] = dict(
        tools=[weather, bare], tool_choice={"type": "tool", "name": "weather"}, messages=[user("x")]
    )
    made["no_tool"] = dict(tools=[weather], tool_choice={"type": "none"}, messages=[user("x")])
    made["thinking_history"] = dict(
        messages=[
            user("x"),
            assistant(
                [
                    {"type": "thinking", "thinking": "Hmm.", "signature": "s"},
                    {"type": "thinking", "thinking": "So.", "signature": "s"},
                    text("Answer"),
                ]
            ),
            user("y"),
        ]
    )
    made["thinking_alone"] = dict(
        messages=[user("x"), assistant([{"type": "thinking", "thinking": "Hmm.", "signature": "s"}]), user("y")]
    )
    made["thinking_and_tool"] = dict(
        tools=[weather],
        messages=[
            user("x"),
            assistant(
                [
                    {"type": "thinking", "thinking": "Use it.", "signature": "s"},
                    {"type": "tool_use", "id": "t1", "name": "weather", "input": {"place": "A"}},
                ]
            ),
            user([{"type": "tool_result", "tool_use_id": "t1", "content": "r"}]),
        ],
    )
    made["redacted"] = dict(
        messages=[user("x"), assistant([{"type": "redacted_thinking", "data": "abc"}, text("Answer")]), user("y")]
    )
    made["thinking_enabled"] = dict(
        max_tokens=4096, thinking={"type": "enabled", "budget_tokens": 1024}, messages=[user("x")]
    )
    made["thinking_adaptive"] = dict(thinking={"type": "adaptive"}, messages=[user("x")])
    made["thinking_disabled"] = dict(thinking={"type": "disabled"}, messages=[user("x")])
    made["effort"] = dict(output_config={"effort": "high"}, messages=[user("x")])
    made["effort_max"] = dict(output_config={"effort": "xhigh"}, messages=[user("x")])
    made["prefill"] = dict(messages=[user("x"), assistant("The answer is")])
    made["late_system"] = dict(
        system="Top.",
        messages=[
            user("x"),
            {"role": "system", "content": " Remember. "},
            user("y"),
            {"role": "system", "content": [text("x-anthropic-billing-header: 1"), text("And this.")]},
            user("z"),
        ],
    )
    made["late_system_only"] = dict(
        messages=[user("x"), {"role": "system", "content": [text("A "), text("B")]}, user("z")]
    )
    made["unicode_input"] = dict(
        messages=[
            user("x"),
            assistant(
                [
                    {
                        "type": "tool_use",
                        "id": "t",
                        "name": "f",
                        "input": {"emoji": "😀 ü", "big": 123456789012345678901, "e": 1e22},
                    }
                ]
            ),
            user([{"type": "tool_result", "tool_use_id": "t", "content": "ok"}]),
        ]
    )
    made["server_tool"] = dict(
        tools=[{"type": "web_search_20250305", "name": "web_search"}, weather], messages=[user("x")]
    )
    made["empty_user"] = dict(messages=[user([]), user("x")])
    made["unknown_block"] = dict(
        messages=[user([{"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}])]
    )
    made["assistant_empty"] = dict(messages=[user("x"), assistant([]), user("y")])
    return {name: {"model": "m", "max_tokens": body.pop("max_tokens", 64), **body} for name, body in made.items()}


def recorded(engine, late_system, convert, name, body):
    line = {"id": name, "engine": engine, "late_system": late_system, "body": body}
    try:
        request = convert(json.loads(json.dumps(body)))
    except ValueError:  # pydantic's refusals are of this kind too
        return line
    members = {name: getattr(request, name) for name in CHAT_MEMBERS if getattr(request, name) is not None}
    return line | {"chat": {"messages": request.messages, **members}}


def main(vllm_root, sglang_root):
    roots = {"vllm": vllm_root, "sglang": sglang_root}
    sys.meta_path.insert(0, Finder(roots))
    sys.path[:0] = roots.values()
    for engine, make in (("vllm", vllm), ("sglang", sglang)):
        for late_system in (False, True):
            convert = make(late_system)
            for name, body in bodies().items():
                # The others have no late system message to place.
                if not late_system or name.startswith("late_system"):
                    line = recorded(engine, late_system, convert, name, body)
                    print(json.dumps(line, ensure_ascii=False, separators=(",", ":")))


if __name__ == "__main__":
    main(*sys.argv[1:])
